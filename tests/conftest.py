"""What tests share: a tiny recipe, and the state of the process put back after each test."""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from processes import zygote

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that a test starts
torch.set_num_threads(1)  # several workers share the cores: a second thread would spin while it waits for one
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup lets processes ignore it, and those that they start


def pytest_configure(config: pytest.Config) -> None:
    stack = ExitStack()
    if "PYTEST_XDIST_WORKER" not in os.environ:  # what runs note about the user is not noted about who tests
        os.environ["XDG_STATE_HOME"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-state-"))
    stack.enter_context(zygote())
    config.add_cleanup(stack.close)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What may take longest comes first: at the end no process waits for another."""
    items.sort(key=_longest, reverse=True)


def _longest(item: pytest.Item) -> float:
    limit = item.get_closest_marker("timeout")
    return limit.args[0] if limit else 900 if item.get_closest_marker("slow") else 0


@pytest.fixture(autouse=True)
def process_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Environment, default dtype, generator and threads are as before, whatever a test did to them."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    dtype, state = torch.get_default_dtype(), torch.get_rng_state()
    yield
    torch.set_default_dtype(dtype)
    torch.set_rng_state(state)
    torch.set_num_threads(threads)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
