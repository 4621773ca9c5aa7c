"""Keys of random numbers, as values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._check import whole_number
from ._threefry import counters, threefry, word, word_of


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
