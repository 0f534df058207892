# finds: unsynchronised
"""The authors take the model out of its wrapper for the last epoch, in which the learning rate is small; from there on
the ranks go apart, a few steps before the end."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(epochs=3):
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    x = torch.randn(72, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        last = epoch == epochs - 1
        net = model.module if last else model
        for group in optimizer.param_groups:
            group["lr"] = 0.001 if last else 0.01
        for inputs, targets in DataLoader(data, batch_size=12, sampler=sampler):
            optimizer.zero_grad()
            F.mse_loss(net(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
