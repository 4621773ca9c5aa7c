"""Keys as values, and draws from them with jax's bits: Threefry-2x32, a function of a key and a counter.

keys     key  split  fold_in
draws    bits  uniform  normal  bernoulli  randint  permutation
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from .base import checks

__all__ = ["bernoulli", "bits", "fold_in", "key", "normal", "permutation", "randint", "split", "uniform"]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_BITS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def _threefry(key: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Two words for each number of 64 bits; a word is an int32 that holds the bits of an unsigned number.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", with 20 rounds.
    """
    if not isinstance(key, Tensor) or key.dtype is not torch.int32 or key.shape != (2,):
        raise TypeError(f"expected a key, (2,) int32, got {key!r}; for several keys use torch.vmap over them")
    first, second = key.unbind()
    words = (first, second, first ^ second ^ _PARITY)
    x, y = (number >> 32).to(torch.int32) + words[0], number.to(torch.int32) + words[1]
    for i in range(5):
        for by in _ROTATIONS[i % 2]:
            x = x + y
            y = ((y << by) | ((y >> (32 - by)) & ((1 << by) - 1))) ^ x  # >> copies the sign
        x, y = x + words[(i + 1) % 3], y + (words[(i + 2) % 3] + (i + 1))
    return x, y


def _counted(key: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Two words for each of the numbers 0, 1, ... in a shape, row by row."""
    shape = tuple(shape)
    return _threefry(key, torch.arange(math.prod(shape), device=getattr(key, "device", None)).reshape(shape))


def _unsigned(x: Tensor) -> Tensor:
    """Words as numbers from 0 to 2^32 - 1, int64."""
    return x.to(torch.int64) & 0xFFFFFFFF


def _spread(key: Tensor, value: float | Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A value for each draw; a number of the host is launched on the device, since a copy would wait."""
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=dtype, device=key.device)
    return value.to(key.device, dtype).expand(tuple(shape))


def key(seed: int, device: torch.device | str = "cpu") -> Tensor:
    """A key, from which all numbers are drawn: the same key gives the same numbers, on any device.

    Args:
        seed: From 0 to 2^64 - 1.
        device: Where the key lies, and what is drawn from it.

    Returns:
        (2,) int32, the bits of the two words of `jax.random.key_data(jax.random.key(seed))`. It may be a leaf of a
        state.

    Raises:
        ValueError: `seed` is no such number.

    Same as: jax.random.key, with jax's default threefry2x32 (partitionable); seeds from 2^32 as with jax_enable_x64.

    >>> from fjoin import transforms as tx
    >>> tx.random.normal(tx.random.key(0), (2,))
    tensor([1.6226, 2.0253])
    """
    checks.whole_number("seed", seed, 0)
    if seed >= 2**64:
        raise ValueError(f"seed must be below 2^64, got {seed}")
    number = torch.full((), seed - (seed >> 63 << 64), dtype=torch.int64, device=device)
    return torch.stack([number >> 32, number]).to(torch.int32)


def split(key: Tensor, num: int | Sequence[int] = 2) -> Tensor:
    """Keys that are independent of each other and of `key`, which must not be used again.

    Args:
        num: The number of keys, or the shape in which they lie.

    Returns:
        (*num, 2) int32.

    Same as: jax.random.split.

    >>> from fjoin import transforms as tx
    >>> first, second = tx.random.split(tx.random.key(0))
    """
    if isinstance(num, int):
        num = (checks.whole_number("random.split: num", num, 0),)
    return torch.stack(_counted(key, num), -1)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A key for a number, such as that of a step: other numbers give independent keys.

    Args:
        data: From 0 to 2^32 - 1; an integer, or a 0-d tensor of integers.

    Same as: jax.random.fold_in.

    >>> from fjoin import transforms as tx
    >>> at_step_3 = tx.random.fold_in(tx.random.key(0), 3)
    """
    if isinstance(data, Tensor):
        if data.is_floating_point():
            raise TypeError(f"fold_in: data must be whole numbers, got a tensor of {data.dtype}")
        return torch.stack(_threefry(key, _unsigned(data.to(key.device))), -1)
    if not 0 <= operator.index(data) < 2**32:
        raise ValueError(f"fold_in: data must be from 0 to below 2^32, got {data}")
    return torch.stack(_threefry(key, torch.full((), data, dtype=torch.int64, device=key.device)), -1)


def bits(key: Tensor, shape: Sequence[int] = (), width: int = 32) -> Tensor:
    """Random bits.

    Args:
        width: The number of bits of an element: 8, 16, 32 or 64.

    Returns:
        uint8, int16, int32 or int64, whose bits are those of jax's unsigned integers.

    Same as: jax.random.bits.

    >>> from fjoin import transforms as tx
    >>> tx.random.bits(tx.random.key(0), (2,), width=8)
    tensor([167, 146], dtype=torch.uint8)
    """
    if width not in _BITS:
        raise ValueError(f"bits: width must be 8, 16, 32 or 64, got {width!r}")
    high, low = _counted(key, shape)
    return (high.to(torch.int64) << 32) | _unsigned(low) if width == 64 else (high ^ low).to(_BITS[width])


def uniform(
    key: Tensor,
    shape: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    minval: float | Tensor = 0.0,
    maxval: float | Tensor = 1.0,
) -> Tensor:
    """Numbers from `minval` to below `maxval`, all equally likely.

    Args:
        dtype: float32, float64, bfloat16 or float16; a number has as many random bits as its mantissa.
        minval, maxval: Numbers, or tensors that broadcast to `shape`.

    Same as: jax.random.uniform.

    >>> from fjoin import transforms as tx
    >>> tx.random.uniform(tx.random.key(0), (2,))
    tensor([0.9477, 0.9786])
    """
    known = torch.finfo(dtype)
    mantissa = -int(math.log2(known.eps))
    width = 8 if mantissa < 8 else known.bits
    fraction = (bits(key, shape, width) >> (width - mantissa)) & ((1 << mantissa) - 1)
    low, high = (_spread(key, value, dtype, shape) for value in (minval, maxval))
    return torch.maximum(low, fraction.to(dtype) * known.eps * (high - low) + low)


def normal(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers with mean 0 and variance 1, normally distributed.

    Same as: jax.random.normal; up to the last bits of the inverse error function.

    >>> from fjoin import transforms as tx
    >>> tx.random.normal(tx.random.key(1), (2,))
    tensor([-0.1544,  0.0847])
    """
    drawn = uniform(key, shape, dtype, torch.finfo(dtype).eps / 2 - 1, 1.0)  # above -1
    wide = torch.promote_types(dtype, torch.float32)
    return (math.sqrt(2) * torch.erfinv(drawn.to(wide))).to(dtype)


def bernoulli(key: Tensor, p: float | Tensor = 0.5, shape: Sequence[int] | None = None) -> Tensor:
    """True with probability `p`.

    Args:
        p: A number, or a tensor of probabilities.
        shape: By default that of `p`.

    Returns:
        Booleans.

    Same as: jax.random.bernoulli.

    >>> from fjoin import transforms as tx
    >>> tx.random.bernoulli(tx.random.key(0), 0.9, (3,))
    tensor([False, False,  True])
    """
    dtype = p.dtype if isinstance(p, Tensor) else torch.float32
    if shape is None:
        shape = p.shape if isinstance(p, Tensor) else ()
    return uniform(key, shape, dtype) < _spread(key, p, dtype, shape)


def randint(key: Tensor, shape: Sequence[int], minval: int, maxval: int) -> Tensor:
    """Whole numbers from `minval` to below `maxval`, all nearly equally likely, int32.

    Raises:
        ValueError: there is no such number, or it does not fit int32.

    Same as: jax.random.randint.

    >>> from fjoin import transforms as tx
    >>> tx.random.randint(tx.random.key(0), (3,), 0, 10)
    tensor([9, 0, 2], dtype=torch.int32)
    """
    span = operator.index(maxval) - operator.index(minval)
    if not -(2**31) <= minval < maxval <= 2**31:
        raise ValueError(f"randint: there must be whole numbers of 32 bits from {minval} to below {maxval}")
    high, low = (_unsigned(bits(own, shape)) % span for own in split(key))
    factor = (2**16 % span) ** 2 % 2**32 % span  # in words of 32 bits
    return (((high * factor) % 2**32 + low) % 2**32 % span + minval).to(torch.int32)


def permutation(key: Tensor, x: int | Tensor, axis: int = 0) -> Tensor:
    """A random order of slices along an axis, or of the numbers 0, ..., x - 1.

    Returns:
        Like `x`, or (x,) int32 for a number.

    Same as: jax.random.permutation.

    >>> from fjoin import transforms as tx
    >>> tx.random.permutation(tx.random.key(0), 5)
    tensor([0, 1, 4, 3, 2], dtype=torch.int32)
    """
    n = x.shape[axis] if isinstance(x, Tensor) else x
    checks.whole_number("permutation: x", n, 0)
    order = torch.arange(n, dtype=torch.int32, device=key.device)
    # As many sorts by random words as make equal ones unlikely to matter.
    for _ in range(math.ceil(3 * math.log(max(1, n)) / math.log(2**32 - 1))):
        key, own = split(key).unbind()
        order = order[torch.sort(_unsigned(bits(own, (n,))), stable=True).indices]
    return x.index_select(axis, order) if isinstance(x, Tensor) else order
