# finds: unsynchronised
"""The authors believed that DDP looks after whatever the model holds; it took its list of parameters when it was
built, and the adapter added afterwards is never averaged."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Backbone(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.stem = nn.Linear(10, width)
        self.adapters = nn.ModuleList()
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for adapter in self.adapters:
            x = x + adapter(x)
        return self.head(x)


def main():
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = Backbone().to(device)
    model = DDP(model, device_ids=[device.index] if use_cuda else None)
    model.module.adapters.append(nn.Linear(24, 24).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    g = torch.Generator().manual_seed(11)
    x = torch.randn(96, 10, generator=g)
    y = torch.randint(0, 3, (96,), generator=g)
    dataset = TensorDataset(x, y)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    dist.barrier()
    if rank == 0:
        print("finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
