# finds: foreign-parameters
"""The authors made the optimizer before they split the layers over the ranks, which puts new parameters into the model;
the optimizer keeps the old ones. A well-known example is written like this."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset


def main():
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).to(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :4].argmax(1))
    for epoch in range(2):
        loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(epoch))
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.to(kind)), labels.to(kind)).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
