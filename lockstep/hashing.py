"""SplitMix64's mixing function, for plain integers, NumPy arrays and torch tensors.

It maps 64-bit words one to one, and every bit of the result depends on every bit that went in. The order of samples,
the keys of random draws and the checksums of samples and weights are all made with it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_WORD = 1 << 64
MULTIPLIER_1, MULTIPLIER_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
"""The odd integer closest to 2^64 divided by the golden ratio: SplitMix64's increment."""


def to_signed(value: int) -> int:
    """Return a 64-bit word as int64 stores it."""
    value %= _WORD
    return value - _WORD if value >= _WORD >> 1 else value


def mix_words(*words: int) -> int:
    """Return one 64-bit word that depends on all of `words` and on their order."""
    state = 0
    for word in words:
        state = (state + word + GOLDEN_GAMMA) % _WORD
        state = ((state ^ (state >> 30)) * MULTIPLIER_1) % _WORD
        state = ((state ^ (state >> 27)) * MULTIPLIER_2) % _WORD
        state ^= state >> 31
    return state


def mix_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the mixed words of an array; NumPy's unsigned arithmetic wraps around as it should."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MULTIPLIER_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MULTIPLIER_2)
    return x ^ (x >> np.uint64(31))


def odd_words(count: int, key: int) -> NDArray[np.int64]:
    """Return fixed pseudo-random odd words: the weights of positions in a checksum. An odd one loses no bit."""
    words = mix_array(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(key))
    return (words | np.uint64(1)).view(np.int64)


def mix_tensor(x: Tensor) -> Tensor:
    """Return the mixed words of an int64 tensor; the same bits on CPU and GPU, eager and compiled."""
    x = (x ^ shift_right(x, 30)) * to_signed(MULTIPLIER_1)
    x = (x ^ shift_right(x, 27)) * to_signed(MULTIPLIER_2)
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Any:
    """Return `x` shifted without its sign: int64's own shift copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
