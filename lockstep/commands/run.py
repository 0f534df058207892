"""`lockstep run [--nproc N] -- SCRIPT [flags]`: run a training script as it is, on many ranks, and watch it."""

import os

import tyro

from .. import companion, launch
from ..options import RunScript
from ..script import check, split_words


def run(words: list[str]) -> int:
    own, script = split_words(words)
    options = tyro.cli(RunScript, args=own, prog="lockstep run", use_underscores=True)
    check(script, "run")
    if "RANK" in os.environ:
        return companion.run(script, options)
    nproc = launch.process_count(options.nproc, "auto" if options.nproc == "auto" else "cpu")
    command = ["-m", "lockstep", "run", *own, "--", *script]
    return launch.start(nproc, command, options.max_restarts, options.grace)
