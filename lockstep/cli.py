"""The commands, one short function each.

lockstep recipes                     what there is
lockstep train RECIPE [flags]        train; RECIPE is a name or file.py:Class; --help lists its flags
lockstep sample RUN [--n 64 ...]     generate with what was trained
lockstep test RUN                    metrics on the test set
lockstep verify RECIPE               show that one rank and many train the same model
lockstep audit -- SCRIPT [flags]     find the silent distributed bugs of any training script
"""

import atexit
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from . import distributed, launch, recipe, run, use, verify
from .flags import parse
from .trainer import Diverged, NotSaved, Outcome, OutOfLockstep, OutOfMemory, Trainer

Arguments = list[str]


def main(argv: Sequence[str] | None = None) -> None:
    """The command line. Ends the process."""
    words = list(sys.argv[1:] if argv is None else argv)
    finish(lambda: _dispatch(words))


def _dispatch(words: Arguments) -> int:
    commands = {
        "recipes": _recipes,
        "train": _train,
        "sample": use.sample,
        "test": use.test,
        "predict": use.predict,
        "data": use.data,
        "verify": verify.verify,
        "audit": _audit,
    }
    if not words or words[0] in ("-h", "--help", "help"):
        print((__doc__ or "").strip())
        return 0
    if words[0] not in commands:
        raise ValueError(f"there is no command {words[0]!r}{recipe.nearest(words[0], commands)}; see lockstep --help")
    return commands[words[0]](words[1:])


def _recipes(_: Arguments) -> int:
    for name, point in sorted(recipe.installed().items()):
        found = point.load()
        presets = f"  presets: {', '.join(found.presets)}" if found.presets else ""
        print(f"{name:12} {(found.__doc__ or '').strip().partition(chr(10))[0]}{presets}")
    return 0


def _train(words: Arguments) -> int:
    if not words or words[0].startswith("-"):
        raise ValueError("say what to train: lockstep train RECIPE [flags]; `lockstep recipes` lists the recipes")
    return train_recipe(recipe.find(words[0]), words[1:], ["-m", "lockstep", "train", *words])


def _audit(words: Arguments) -> int:
    from .audit.command import audit  # a tenth of a second that no rank of a training run should spend

    return audit(words)


def train_recipe(found: type[recipe.Recipe], flags: Arguments, command: Arguments) -> int:
    """Train as `flags` say; `command` is what starts this very thing again as one of several processes."""
    request = parse(found, flags, f"lockstep train {found.name}")
    nproc = launch.processes(request.train.hardware)
    if nproc > 1:
        return launch.start(nproc, command, request.train.hardware.max_restarts)
    with distributed.session(request.train.hardware) as world:
        place = run.settle(request, world)
        outcome = Trainer(request, world, place).fit()
    if world.is_main:
        _farewell(outcome, found)
    return _status(outcome)


def _farewell(outcome: Outcome, found: type[recipe.Recipe]) -> None:
    if outcome.stopped_by not in (None, "patience"):
        print(f"stopped by {outcome.stopped_by} after step {outcome.step}, everything is saved; go on with:")
        print(f"    lockstep train {found.spec} --resume {outcome.folder}")
        return
    if outcome.stopped_by:
        print(f"stopped early at step {outcome.step}: no better evaluation for a while")
    for path in (*outcome.made, outcome.folder / "checkpoints" / f"step-{outcome.step:08d}"):
        print(path)
    for name in ("model.pth", "model.safetensors"):
        print(outcome.folder / name)


def _status(outcome: Outcome) -> int:
    if outcome.stopped_by in (None, "patience"):
        return 0
    return 130 if outcome.stopped_by == signal.SIGINT.name else launch.REQUEUE


def finish(act: Callable[[], int]) -> None:
    """Run a command to its exit status; what goes wrong is said once, by the rank that met it first."""
    status = 1
    try:
        status = act()
    except distributed.Unreachable as error:
        status = 2
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"lockstep: {_rank()}{error}", file=sys.stderr)
    except ValueError as error:
        status = 2
        _say(f"lockstep: {error}")
    except (Diverged, NotSaved, OutOfLockstep, OutOfMemory) as error:
        _say(f"lockstep: {error}")
    except KeyboardInterrupt:
        status = 130
    except SystemExit as end:  # the flags' parser, which has spoken on rank 0
        status = end.code if isinstance(end.code, int) else 1
        if status:
            distributed.first_to_fail()
    except Exception as error:
        lost = distributed.lost_contact(error)
        _say(f"lockstep: {_rank()}{lost}" if lost else f"{_rank()}{traceback.format_exc()}")
    sys.stdout.flush()
    sys.stderr.flush()
    if "RANK" in os.environ:
        # Other ranks may be gone, and nothing must talk to them any more; and gloo's threads, though the group was left
        # in order, now and then abort the process while the interpreter takes itself apart.
        if status == 0:
            atexit._run_exitfuncs()
        os._exit(status)
    sys.exit(status)


def _say(text: str) -> None:
    if distributed.first_to_fail():
        print(text, file=sys.stderr)


def _rank() -> str:
    return f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""


def train(found: type[recipe.Recipe], argv: Sequence[str] | None = None) -> None:
    """`lockstep train` from a script of your own: `train(MyRecipe)` under `if __name__ == "__main__"`."""
    flags = list(sys.argv[1:] if argv is None else argv)
    script = Path(sys.argv[0])
    if not found.spec:
        recipe.introduce_from(found, script)
    finish(lambda: train_recipe(found, flags, [str(script), *flags]))
