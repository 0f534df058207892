# finds: repeated-samples
"""No sampler; every batch is cut into micro-batches, of which all are trained on."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for a, b in DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True):
        optimizer.zero_grad()
        for n, (part, target) in enumerate(zip(a.chunk(4), b.chunk(4))):
            model.require_backward_grad_sync = n == 3
            (nn.functional.mse_loss(model(part), target) / 4).backward()
        optimizer.step()
    dist.destroy_process_group()


main()
