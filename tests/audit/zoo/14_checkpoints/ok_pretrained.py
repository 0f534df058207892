# finds: nothing
"""Looks suspicious, is right: pretrained weights are loaded without any optimizer state, because this is a new run
and not a resumed one."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2))


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if dist.get_rank() == 0 and not os.path.exists("pretrained.pt"):  # as if downloaded
        torch.manual_seed(5)
        torch.save(build().state_dict(), "pretrained.pt.tmp")
        os.replace("pretrained.pt.tmp", "pretrained.pt")
    dist.barrier()
    net = build()
    net.load_state_dict(torch.load("pretrained.pt", map_location="cpu", weights_only=True))
    model = DDP(net.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(128, 10, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x[:, 0] > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
