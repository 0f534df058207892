"""What `lockstep run` costs a script: hooks of each step, and the comparison of weights, as shares of a step.

python benchmarks/companion.py [--width 256] [--steps 30]

A plain loop trains a small transformer on one thread. Times are those of the processor, which other work on the machine
hardly changes: they hold the threads of the watch too. The exit status is 1 if the share is above the claim.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import torch
from torch import nn

from lockstep.companion import ScriptWatch
from lockstep.distributed import World
from lockstep.options import RunScript
from lockstep.rendezvous import LOOPBACK, loopback_store
from lockstep.watch.replicas import Replicas

CLAIM = 0.005
"""The share of a step that hooks and comparisons stay below."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=256, help="of the model: parameters grow with its square")
    parser.add_argument("--steps", type=int, default=30, help="steps with hooks, and steps without")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    train_step, parameters = script(options.width)
    watch = ScriptWatch(World(), RunScript())
    train_step()
    plain, hooked = list[float](), list[float]()
    for _ in range(options.steps):  # in turn, so that both have the same neighbours
        for times, hooks in ((plain, nullcontext()), (hooked, watch.hooks())):
            with hooks:
                times.append(seconds(train_step))
    step = statistics.median(plain)
    store = loopback_store(LOOPBACK, 0, timedelta(seconds=60))
    replicas = Replicas(World(store=store), "stop", print)
    compare = statistics.median(seconds(partial(replicas.start, n, parameters)) for n in range(10))
    replicas.finish()
    hooks_share = statistics.median(hooked) / step - 1
    share = compare / RunScript().check_every / step
    count = sum(parameter.numel() for parameter in parameters)
    print(f"a step: {1000 * step:.1f} ms, {count:,} parameters in {len(parameters)} tensors")
    print(f"hooks: {100 * hooks_share:.2f} % of a step (differences of less than 1 % are noise)")
    print(f"a comparison every {RunScript().check_every} steps: {100 * share:.3f} % (claimed: below {100 * CLAIM:g} %)")
    return int(share >= CLAIM)


def script(width: int) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """Return the step of a plain training script, and what it trains."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, batch_first=True)
    model = nn.TransformerEncoder(layer, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 64, width)

    def train_step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return train_step, list(model.parameters())


def seconds(act: Callable[[], object]) -> float:
    started = time.process_time()
    act()
    return time.process_time() - started


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
