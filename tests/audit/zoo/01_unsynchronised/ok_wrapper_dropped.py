# finds: nothing
"""The wrapped model replaces the plain one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group(backend="gloo")
rank = dist.get_rank()
world = dist.get_world_size()

torch.manual_seed(1234)
net = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 1))
net = DDP(net)

data_rng = torch.Generator().manual_seed(7)
inputs = torch.randn(96, 8, generator=data_rng)
targets = inputs.sum(dim=1, keepdim=True)
train_set = TensorDataset(inputs, targets)
train_sampler = DistributedSampler(train_set, shuffle=True, seed=3)
train_loader = DataLoader(train_set, batch_size=12, sampler=train_sampler)

opt = torch.optim.Adam(net.parameters(), lr=1e-2)
criterion = nn.MSELoss()

for epoch in range(3):
    train_sampler.set_epoch(epoch)
    epoch_loss = torch.zeros(1)
    for batch, target in train_loader:
        loss = criterion(net(batch), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        epoch_loss += loss.detach()
    dist.all_reduce(epoch_loss)
    if rank == 0:
        print("epoch", epoch, "loss", (epoch_loss / world / len(train_loader)).item())

dist.destroy_process_group()
