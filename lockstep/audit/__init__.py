"""Find the silent bugs of any distributed training script.

`lockstep audit -- train.py` on the command line; `watch()` in a script of your own; `assert_in_lockstep` in a test.
"""

from .library import assert_in_lockstep, watch

__all__ = ["assert_in_lockstep", "watch"]
