"""One process becomes many: torchrun's elastic agent, started from here on a free port."""

import logging
import os
import signal
import sys
import tempfile
import uuid
from datetime import timedelta

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .agent import LAUNCHER, log_folder_prefix
from .cores import check_cores
from .distributed import HANG_STATUS, SUCCEEDED
from .outcome import REQUEUE as REQUEUE
from .rendezvous import LOOPBACK, loopback_store


def process_count(nproc: str, device: str) -> int:
    """Return how many processes to start on this machine; 1 if a launcher has started this one already."""
    if "RANK" in os.environ:
        return 1
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    wanted = max(1, gpus) if nproc == "auto" else int(nproc)
    if gpus and wanted > gpus:
        raise ValueError(f"--nproc {wanted}, but {gpus} GPU(s) are visible; use --nproc {gpus} or --device cpu")
    return wanted


def start(nproc: int, command: list[str], max_restarts: int = 0, grace: int = 120) -> int:
    """Run `command` (what follows `python`) in `nproc` ranks and return its exit status.

    After a signal the ranks have `grace` seconds to stop by themselves.
    """
    check_cores(nproc)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    for name in [n for n in logging.root.manager.loggerDict if n.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the ranks print what went wrong
    run_id = uuid.uuid4().hex
    os.environ[LAUNCHER] = f"{run_id}/{os.getpid()}"
    store = loopback_store(LOOPBACK, 0, timedelta(seconds=60))  # the agent shares it: it is that of its port
    with tempfile.TemporaryDirectory(prefix=log_folder_prefix(run_id)) as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=run_id,
            rdzv_backend="static",
            rdzv_endpoint=f"{LOOPBACK}:{store.port}",
            rdzv_configs={"rank": 0},
            local_addr=LOOPBACK,
            max_restarts=max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        )
        os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(grace)
        try:
            elastic_launch(config, sys.executable)("-u", *command)
        except SignalException as stop:
            if store.add(SUCCEEDED, 0) == nproc:
                return 0  # it came after the last step, and the run is complete
            return 130 if stop.sigval == signal.SIGINT else REQUEUE
        except ChildFailedError as error:
            return _status(error)
    return 0


def _status(error: ChildFailedError) -> int:
    """Return the exit status of the first failure; a killed rank counts as first, and a message says so."""
    if any(failure.exitcode == HANG_STATUS for failure in error.failures.values()):
        return HANG_STATUS  # reported by a rank, which also kills one that does not respond
    killed = [(r, f) for r, f in error.failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM]
    rank, failure = killed[0] if killed else error.get_first_failure()
    if failure.exitcode >= 0:
        return failure.exitcode
    name = signal.Signals(-failure.exitcode).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    sys.stderr.write(f"lockstep: rank {rank} was ended by {name}{hint}\n")
    return 128 - failure.exitcode
