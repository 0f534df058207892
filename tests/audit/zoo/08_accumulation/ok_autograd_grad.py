# finds: nothing
"""Gradients are taken by torch.autograd.grad, averaged and put in their place: nothing adds up."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(100, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for x, y in DataLoader(data, batch_size=8, sampler=DistributedSampler(data)):
        found = torch.autograd.grad(nn.functional.mse_loss(model(x), y), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), found):
            dist.all_reduce(gradient)
            parameter.grad = gradient / dist.get_world_size()
        optimizer.step()
    dist.destroy_process_group()


main()
