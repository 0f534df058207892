# finds: nothing
"""The model is rebuilt with other weights before the optimizer is made from it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 1))


def pretrained():
    return {name: 0.9 * value for name, value in build(seed=1).state_dict().items()}


dist.init_process_group("gloo")
model = build(seed=0)
model = build(seed=2)
model.load_state_dict(pretrained())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model = DDP(model)

x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
