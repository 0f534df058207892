# finds: nothing
"""A head that is in no loss is frozen before DDP looks at the model."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
        self.main = nn.Linear(32, 3)
        self.auxiliary = nn.Linear(32, 3)

    def forward(self, x):
        h = self.trunk(x)
        return self.main(h), self.auxiliary(h)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    net = TwoHeads().cuda()
    net.auxiliary.requires_grad_(False)
    model = DDP(net, device_ids=[local_rank])
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    x = torch.randn(128, 10, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(dim=1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            main_logits, _ = model(x.cuda())
            loss = F.cross_entropy(main_logits, y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
