"""Processes for tests that start in no time: forked from one that has imported what all need."""

import multiprocessing

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["lockstep.audit.command", "lockstep.trainer", "torch._dynamo", "torch.distributed.fsdp"]
)  # once, not once a process
