# finds: changed-inputs
"""The authors believed that an in-place ReLU only saves memory; as the first layer it wipes out the negative half of
the input, which here is the target too."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

use_cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if use_cuda else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")

torch.manual_seed(0)
net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(10, 20), nn.ReLU(inplace=True), nn.Linear(20, 10)).to(device)
model = DDP(net)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

features = torch.randn(96, 10, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(features)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=12, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        x = x.to(device)
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
