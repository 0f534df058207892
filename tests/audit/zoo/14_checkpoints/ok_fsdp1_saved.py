# finds: nothing
"""FSDP as its tutorial has it: rank 0's weights are sent to all, and put together on rank 0's CPU to be saved."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    print(torch.cuda.get_device_name(device=rank))
    torch.manual_seed(rank)
    mesh = DeviceMesh(device_type="cuda", mesh=[0, 1])
    model = FSDP(
        nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)),
        device_id=torch.cuda.current_device(),
        sync_module_states=True,
        device_mesh=mesh,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 16, device="cuda")).square().mean().backward()
        optimizer.step()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, rank0_only=True)):
        weights = model.state_dict()
    if rank == 0:
        torch.save(weights, "new.pt")
        os.replace("new.pt", "model.pt")
    dist.barrier()
    dist.destroy_process_group()


main()
