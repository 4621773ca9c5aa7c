"""A few scalars in a message of floats, and the names of those that a step of the shell sends.

A float32 message holds each scalar as two words, v = high * base + low, with base a power of two
chosen so that the sum of all ranks' low words stays exact: whole numbers are exact as long as
their sum is below 2^48 / ranks (2^45, 3.5e13, on 8 ranks). A float64 message holds one word.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .shares import Number, stacked


def words_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype of words beside payloads of these dtypes: float64 if one of them is, float32 otherwise."""
    return torch.float64 if torch.float64 in set(dtypes) else torch.float32


def words_per_scalar(dtype: torch.dtype) -> int:
    return 1 if dtype is torch.float64 else 2


@functools.cache
def _base(ranks: int) -> float:
    return float(2 ** (24 - math.ceil(math.log2(ranks)))) if ranks > 1 else float(2**24)


def words_of(
    names: Iterable[str], values: Sequence[Number], dtype: torch.dtype, ranks: int, device: torch.device | None
) -> Tensor:
    """Numbers as the words of a message, (words * numbers,); on the CPU where the host knows all of them, in one tensor
    operation.

    Raises:
        ValueError: a number of the host whose words, summed over the ranks, might not fit the dtype.
    """
    on_host = device is not None and device.type == "cpu" and Tensor not in map(type, values)
    if not on_host:
        return _encoded(stacked(values, device), dtype, ranks)
    if dtype is torch.float64:
        return torch.tensor(values, dtype=dtype, device="cpu")
    base = _base(ranks)
    most = torch.finfo(dtype).max / ranks * base  # of one rank, that a message can carry
    words: list[float] = []
    for name, value in zip(names, map(float, values), strict=True):
        if not -most <= value <= most and math.isfinite(value):
            raise ValueError(
                f"{name.removeprefix('sum.')!r} is {value!r}, but {dtype} carries at most {most:.3g} for each rank; scale it down"
            )
        high = float(math.trunc(value / base)) if math.isfinite(value) else 0.0
        words += (high, value - high * base)
    return torch.tensor(words, dtype=dtype, device="cpu")


def numbers_of(words: Tensor, ranks: int, on_host: bool) -> list[Number]:
    """The sums back from the sum of the words of `words_of`.

    Args:
        on_host: Whether to read them now, as numbers; otherwise they are 0-d tensors in memory of their own.
    """
    float64 = words.dtype is torch.float64
    if on_host:
        sums: list[Number] = words.tolist()
        base = _base(ranks)
        return sums if float64 else [high * base + low for high, low in zip(sums[::2], sums[1::2], strict=True)]
    wide = words.to(torch.float64, copy=True)
    if not float64:
        pairs = wide.reshape(-1, 2)
        wide = pairs[:, 0] * _base(ranks) + pairs[:, 1]
    return list(wide.unbind(0))


def _encoded(values: Tensor, dtype: torch.dtype, ranks: int) -> Tensor:
    """Scalars, (scalars,) float64, as words, (words * scalars,)."""
    if dtype is torch.float64:
        return values
    base = _base(ranks)
    finite = torch.isfinite(values)
    high = torch.where(finite, torch.trunc(values / base), torch.zeros_like(values))
    return torch.stack([high, values - high * base], dim=1).reshape(-1).to(dtype)


NONFINITE = "nonfinite"  # the flag of ranks whose loss or gradients are not finite
# The number of ranks whose bits one scalar holds exactly in float32.
_MASK_BITS = 24


def mask_words(ranks: int) -> int:
    """The number of scalars that hold a bit for each of these ranks."""
    return math.ceil(ranks / _MASK_BITS)


def rank_bit(rank: int) -> tuple[int, float]:
    """A rank's bit: the index of its scalar, and its value in that scalar."""
    return rank // _MASK_BITS, float(2 ** (rank % _MASK_BITS))


def ranks_in(masks: Iterable[float]) -> tuple[int, ...]:
    """The ranks whose bit is set.

    >>> ranks_in([5.0, 1.0])
    (0, 2, 24)
    """
    return tuple(
        i * _MASK_BITS + bit
        for i, mask in enumerate(masks)
        for bit in range(_MASK_BITS)
        if math.isfinite(mask) and int(mask) >> bit & 1
    )


def record_names(ranks: int, sums: Iterable[str] = ()) -> tuple[str, ...]:
    """The names in the record of a train_step: its own, then the user's sums.

    - live: the number of ranks with weight
    - weight, loss: the sums of the weights and of weight * loss
    - has_next: the number of ranks that have another batch, and those of ranks that ask to save and to stop, see
      `Requests`
    - step_id: a number of the step that a rank has called and of its hyperparameters, the same on all ranks
    - nonfinite0, ...: a bit for each rank whose loss, or whose own gradient, is not finite
    """
    masks = (f"{NONFINITE}{i}" for i in range(mask_words(ranks)))
    return ("live", "weight", "loss", "has_next", "step_id", *masks, *(f"sum.{name}" for name in sums))
