"""Threefry-2x32, a function of a key and a counter, in int32 tensors that hold the bits of unsigned words."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .base import whole_number

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry(key: Tensor, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Two words for each counter.

    Args:
        key: (2,) int32.
        high, low: The words of the counters, int32, of one shape.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", with 20 rounds.
    """
    first, second = key.unbind(-1)
    words = (first, second, first ^ second ^ _PARITY)
    x, y = high + words[0], low + words[1]
    for i in range(5):
        for by in _ROTATIONS[i % 2]:
            x = x + y
            y = ((y << by) | ((y >> (32 - by)) & ((1 << by) - 1))) ^ x  # >> copies the sign
        x, y = x + words[(i + 1) % 3], y + (words[(i + 2) % 3] + (i + 1))
    return x, y


def counters(shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The words of the numbers 0, 1, ... in a shape, row by row."""
    count = math.prod(shape)
    if count < 2**31:
        low = torch.arange(count, dtype=torch.int32, device=device).reshape(tuple(shape))
        return torch.zeros_like(low), low
    number = torch.arange(count, dtype=torch.int64, device=device).reshape(tuple(shape))
    return word(number >> 32), word(number)


def word(number: Tensor) -> Tensor:
    """The last 32 bits of whole numbers, as int32."""
    last = number.to(torch.int64) & 0xFFFFFFFF
    return (last - ((last & 0x80000000) << 1)).to(torch.int32)


def word_of(number: int, device: torch.device | str) -> Tensor:
    """The last 32 bits of a number of the host, 0-d int32; the device gets it with a launch, without a copy."""
    last = number & 0xFFFFFFFF
    return torch.full((), last - ((last & 0x80000000) << 1), dtype=torch.int32, device=device)


def unsigned(x: Tensor) -> Tensor:
    """Words as numbers from 0 to 2^32 - 1, int64."""
    return x.to(torch.int64) & 0xFFFFFFFF


def key(seed: int, device: torch.device | str = "cpu") -> Tensor:
    """A key, from which all numbers are drawn: the same key gives the same numbers, on any device.

    Args:
        seed: From 0 to 2^64 - 1.
        device: Where the key lies, and what is drawn from it.

    Returns:
        (2,) int32, the bits of the two words of `jax.random.key_data(jax.random.key(seed))`. It may be a leaf of a state.

    Raises:
        TypeError, ValueError: `seed` is no such number.

    Same as: jax.random.key, with jax's default threefry2x32 (partitionable); seeds from 2^32 as with jax_enable_x64.

    >>> from fjoin import transforms as tx
    >>> tx.random.normal(tx.random.key(0), (2,))
    tensor([1.6226, 2.0253])
    """
    whole_number("seed", seed, 0)
    if seed >= 2**64:
        raise ValueError(f"seed must be below 2^64, got {seed}")
    return torch.stack([word_of(seed >> 32, device), word_of(seed, device)])


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
    check_key("split", key)
    shape = (num,) if isinstance(num, int) else tuple(num)
    return torch.stack(threefry(key, *counters(shape, key.device)), -1)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A key for a number, such as that of a step: other numbers give independent keys.

    Args:
        data: From 0 to 2^32 - 1; an integer, or a 0-d tensor of integers.

    Same as: jax.random.fold_in.

    >>> from fjoin import transforms as tx
    >>> at_step_3 = tx.random.fold_in(tx.random.key(0), 3)
    """
    check_key("fold_in", key)
    if isinstance(data, Tensor):
        if data.dim() or data.is_floating_point() or data.is_complex():
            raise TypeError(
                f"fold_in: data must be a 0-d tensor of integers, got {data.dtype} of shape {tuple(data.shape)}"
            )
        low = word(data).to(key.device)
    else:
        whole_number("data", data, 0)
        if data >= 2**32:
            raise ValueError(f"fold_in: data must be below 2^32, got {data}")
        low = word_of(data, key.device)
    return torch.stack(threefry(key, torch.zeros_like(low), low), -1)


def check_key(name: str, key: Tensor) -> None:
    """Raise TypeError unless `key` is one."""
    if not isinstance(key, Tensor) or key.dtype is not torch.int32 or key.shape != (2,):
        got = f"a tensor of {key.dtype}, {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
        raise TypeError(
            f"{name} takes a key, (2,) int32, as key(seed), split and fold_in make them; got {got}. Several keys: torch.vmap over them"
        )


_SIGNED = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
_MANTISSA = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}


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
    check_key("bits", key)
    if width not in _SIGNED:
        raise ValueError(f"bits: width must be 8, 16, 32 or 64, got {width!r}")
    high, low = threefry(key, *counters(shape, key.device))
    if width == 64:
        return (high.to(torch.int64) << 32) | unsigned(low)
    mixed = high ^ low
    if width == 32:
        return mixed
    last = mixed & ((1 << width) - 1)
    return last.to(torch.uint8) if width == 8 else (last - ((last & 0x8000) << 1)).to(torch.int16)


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

    Same as: jax.random.uniform.

    >>> from fjoin import transforms as tx
    >>> tx.random.uniform(tx.random.key(0), (2,))
    tensor([0.9477, 0.9786])
    """
    check_key("uniform", key)
    mantissa = _mantissa(dtype)
    low, high = (_on(key.device, v, dtype) for v in (minval, maxval))
    _check_fits("uniform", "minval and maxval", torch.broadcast_shapes(low.shape, high.shape), shape)
    width = 8 if mantissa < 8 else torch.finfo(dtype).bits
    drawn = bits(key, shape, width)
    shift = width - mantissa
    # The mantissa of a number from 1 to 2.
    if width == 64:
        fraction = (drawn >> shift) & ((1 << mantissa) - 1)
        floats = (fraction | 0x3FF0000000000000).view(torch.float64) - 1.0
    else:
        fraction = (drawn.to(torch.int32) >> shift) & ((1 << mantissa) - 1)
        floats = ((fraction << (23 - mantissa)) | 0x3F800000).view(torch.float32).to(dtype) - 1.0
    return torch.maximum(low, floats * (high - low) + low)


def _mantissa(dtype: torch.dtype) -> int:
    if dtype not in _MANTISSA:
        raise TypeError(f"dtype must be one of {', '.join(map(str, _MANTISSA))}, got {dtype}")
    return _MANTISSA[dtype]


def _on(device: torch.device, value: Any, dtype: torch.dtype) -> Tensor:
    """A tensor of a device; a number of the host is launched there, since a copy would wait."""
    return value.to(device, dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=dtype, device=device)


def _check_fits(name: str, what: str, given: Sequence[int], shape: Sequence[int]) -> None:
    """Raise where a draw would serve several results."""
    pairs = zip(reversed(given), reversed(shape), strict=False)
    if len(given) > len(shape) or any(n not in (1, to) for n, to in pairs):
        raise ValueError(f"{name}: {what} must broadcast to the shape {tuple(shape)}, got {tuple(given)}")


def normal(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers with mean 0 and variance 1, normally distributed.

    Same as: jax.random.normal; up to the last bits of the inverse error function.

    >>> from fjoin import transforms as tx
    >>> tx.random.normal(tx.random.key(1), (2,))
    tensor([-0.1544,  0.0847])
    """
    _mantissa(dtype)
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
    check_key("bernoulli", key)
    chance = _on(key.device, p, p.dtype if isinstance(p, Tensor) and p.is_floating_point() else torch.float32)
    shape = tuple(chance.shape) if shape is None else shape
    _check_fits("bernoulli", "p", chance.shape, shape)
    return uniform(key, shape, chance.dtype) < chance


def randint(key: Tensor, shape: Sequence[int], minval: int, maxval: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Whole numbers from `minval` to below `maxval`, all nearly equally likely.

    Args:
        dtype: int32, or int64 for at most 2^31 numbers.

    Raises:
        ValueError: there is no such number, or it does not fit the dtype.

    Same as: jax.random.randint.

    >>> from fjoin import transforms as tx
    >>> tx.random.randint(tx.random.key(0), (3,), 0, 10)
    tensor([9, 0, 2], dtype=torch.int32)
    """
    check_key("randint", key)
    if dtype not in (torch.int32, torch.int64):
        raise TypeError(f"randint: dtype must be torch.int32 or torch.int64, got {dtype}")
    try:
        minval, maxval = operator.index(minval), operator.index(maxval)
    except TypeError:
        raise TypeError(f"randint: minval and maxval must be whole numbers, got {minval!r} and {maxval!r}") from None
    known = torch.iinfo(dtype)
    if not known.min <= minval < maxval <= known.max + 1:
        raise ValueError(f"randint: there must be whole numbers of {dtype} from {minval} to below {maxval}")
    span = maxval - minval
    first, second = split(key)
    if dtype is torch.int32:
        high, low = (unsigned(bits(k, shape)) % span for k in (first, second))
        factor = (2**16 % span) ** 2 % 2**32 % span  # in words of 32 bits
        return (((high * factor) % 2**32 + low) % 2**32 % span + minval).to(dtype)
    if span > 2**31:
        raise ValueError(f"randint: of {dtype} there may be 2^31 numbers, got {span}")
    over = 2**32 % span
    high, low = (_remainder(bits(k, shape, 64), span) for k in (first, second))
    return (high * (over * over % span) + low) % span + minval


def _remainder(words: Tensor, span: int) -> Tensor:
    """The remainders of unsigned numbers of 64 bits."""
    return (unsigned(words >> 32) % span * (2**32 % span) + unsigned(words) % span) % span


def permutation(key: Tensor, x: int | Tensor, axis: int = 0, independent: bool = False) -> Tensor:
    """A random order of slices along an axis, or of the numbers 0, ..., x - 1.

    Args:
        independent: Whether each vector along the axis has an order of its own.

    Returns:
        Like `x`, or (x,) int32 for a number.

    Same as: jax.random.permutation.

    >>> from fjoin import transforms as tx
    >>> tx.random.permutation(tx.random.key(0), 5)
    tensor([0, 1, 4, 3, 2], dtype=torch.int32)
    """
    check_key("permutation", key)
    if not isinstance(x, Tensor):
        whole_number("permutation: x", x, 0)
        return _shuffled(key, torch.arange(x, dtype=torch.int32, device=key.device), 0)
    _check_axis("permutation", "x", x, axis)
    if independent or x.dim() == 1:
        return _shuffled(key, x, axis)
    order = _shuffled(key, torch.arange(x.shape[axis], device=key.device), 0)
    return x.index_select(axis, order)


def _shuffled(key: Tensor, x: Tensor, axis: int) -> Tensor:
    # As many sorts by random words as make equal ones unlikely to matter.
    for _ in range(math.ceil(3 * math.log(max(1, x.numel())) / math.log(2**32 - 1))):
        key, own = split(key).unbind()
        words = unsigned(bits(own, x.shape))
        x = x.gather(axis, torch.sort(words, dim=axis, stable=True).indices)
    return x


def _check_axis(name: str, what: str, x: Tensor, axis: int) -> None:
    if not -x.dim() <= axis < x.dim():
        raise IndexError(f"{name}: axis {axis} is none of {what}, whose shape is {tuple(x.shape)}")


def categorical(key: Tensor, logits: Tensor, axis: int = -1, shape: Sequence[int] | None = None) -> Tensor:
    """Indices along an axis, with probabilities softmax(logits).

    Args:
        shape: The shape of the result, to which that of `logits` without the axis is broadcast; by default the latter.

    Returns:
        int32.

    Same as: jax.random.categorical.

    >>> from fjoin import transforms as tx
    >>> tx.random.categorical(tx.random.key(0), torch.zeros(3, 4))
    tensor([1, 3, 2], dtype=torch.int32)
    """
    check_key("categorical", key)
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(f"categorical: logits must be a tensor of floating point numbers, got {logits!r}")
    _check_axis("categorical", "logits", logits, axis)
    axis = axis % logits.dim()
    rest = (*logits.shape[:axis], *logits.shape[axis + 1 :])
    given: Any = rest if shape is None else tuple(shape)
    _check_fits("categorical", "the shape of logits without the axis", rest, given)
    prefix = given[: len(given) - len(rest)]
    drawn = (*prefix, *given[len(prefix) :][:axis], logits.shape[axis], *given[len(prefix) :][axis:])
    least = torch.finfo(logits.dtype).tiny
    noise = -torch.log(-torch.log(uniform(key, drawn, logits.dtype, least, 1.0)))
    return torch.argmax(noise + logits, dim=len(prefix) + axis).to(torch.int32)
