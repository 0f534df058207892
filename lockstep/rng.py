"""Random numbers that depend on a key, not on the state of a generator.

A key is made of (seed, epoch, sample). What a sample draws depends on its key and on the name of the draw alone:
not on the rank, the position in the batch, the worker that loaded it or what was drawn before.

    rng = Rng.of(seed, epoch, index)             # epoch, index: (n,) int64 tensors, one entry for each sample
    rng.normal("noise", 3, 32, 32)               # (n, 3, 32, 32)
    rng.bernoulli("drop_label", 0.1)             # (n,) bool

The generator is SplitMix64: a counter, two multiplications, three shifts, all in int64 tensors that wrap around. The
same bits come out on CPU and GPU, eager and compiled. Uniforms are multiples of 2^-24, exact in float32 and
float64; normals are computed in float64 and rounded, so devices differ in the last bit at most.
"""

import math

import torch
from torch import Tensor

from .hashing import GOLDEN_GAMMA, mix_tensor, mix_words, shift_right, to_signed

_GAMMA = to_signed(GOLDEN_GAMMA)


def _hash_name(name: str) -> int:
    return to_signed(mix_words(*name.encode()))


# All that torch.compiler.assume_constant_result does; to call it would load the compiler, which takes as long to
# import as all the rest of torch, in every process, also those that never compile.
_hash_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Rng:
    """Random draws for a batch: one key per sample, one name per draw. The same name gives the same numbers."""

    def __init__(self, keys: Tensor):
        assert keys.dtype == torch.int64 and keys.ndim == 1
        self.keys = keys

    @classmethod
    def of(cls, seed: int, epoch: Tensor, index: Tensor) -> "Rng":
        """Return the randomness of samples `index` in epochs `epoch`, both (n,) int64."""
        return cls(mix_tensor(mix_tensor(index * _GAMMA + to_signed(mix_words(seed))) + epoch * _GAMMA))

    def _bits(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return (n, *shape) int64, 64 random bits each."""
        counter = torch.arange(math.prod(shape), device=self.keys.device)
        # The counter meets data before anything is multiplied: a product of a loop index and a 64-bit constant is an
        # index expression to Inductor, overflows in its C++, and there the compiler may do as it likes (it did).
        state = mix_tensor(self.keys ^ _hash_name(name))[:, None] ^ counter
        return mix_tensor(state * _GAMMA).view(len(self.keys), *shape)

    def uniform(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return (n, *shape) in [0, 1)."""
        bits = shift_right(self._bits(name, shape), 40)
        return bits.to(dtype or torch.get_default_dtype()) * 2.0**-24

    def normal(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return (n, *shape) with mean 0 and variance 1, by Box and Muller; no value is larger than 6.76."""
        bits = self._bits(name, shape)
        radius = (shift_right(bits, 32).double() + 0.5) * 2.0**-32
        angle = (bits & 0xFFFFFFFF).double() * (math.tau * 2.0**-32)
        return ((-2 * radius.log()).sqrt() * angle.cos()).to(dtype or torch.get_default_dtype())

    def integers(self, name: str, high: int, *shape: int) -> Tensor:
        """Return (n, *shape) int64 in [0, high), for high up to 2^31."""
        assert 0 < high <= 1 << 31
        return (shift_right(self._bits(name, shape), 32) * high) >> 32

    def bernoulli(self, name: str, p: float, *shape: int) -> Tensor:
        """Return (n, *shape) bool, true with probability p; compared as integers, so rounding cannot change a value."""
        return shift_right(self._bits(name, shape), 40) < round(p * (1 << 24))
