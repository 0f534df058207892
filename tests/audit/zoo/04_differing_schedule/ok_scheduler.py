# finds: nothing
"""All ranks step their scheduler."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

backend = "nccl" if torch.cuda.is_available() else "gloo"
dist.init_process_group(backend)
rank = dist.get_rank()
if backend == "nccl":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = "cuda" if backend == "nccl" else "cpu"

torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(x, x[:, :1] * x[:, 1:2])
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=12, sampler=sampler)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
    scheduler.step()
    if rank == 0:
        print(f"epoch {epoch} done, lr {scheduler.get_last_lr()[0]:.3g}")
dist.destroy_process_group()
