"""Arguments of torch's for a function of jax."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from ..transforms._jax_arrays import to_jax
from ..transforms.tree._tree import path_string
from ._trees import adopt, jax

_WIDE = (torch.float64, torch.complex128)
_WHOLE = {torch.int64: torch.int32, torch.uint64: torch.uint32}


def arguments(args: tuple[Any, ...], wide: bool) -> tuple[list[Any], Any, bool]:
    """Arguments as tensors, arrays of jax and numbers of Python's, their structure, and whether jax must compute with 64 bits.

    Args:
        wide: Whether it must do so in any case.

    Raises:
        TypeError: a leaf that jax cannot take, or that requires a gradient.
        ValueError: a 64-bit integer that does not fit 32 bits, in a computation with 32.
    """
    adopt(args)
    given: Any = args
    paths, found, structure = optree.tree_flatten_with_path(given)
    leaves: list[Any] = [_of_numpy(x) if isinstance(x, (np.ndarray, np.generic)) else x for x in found]
    wide = wide or any(isinstance(x, Tensor) and x.dtype in _WIDE for x in leaves)
    narrow = not wide and not jax.config.jax_enable_x64
    return [_checked(path, x, narrow) for path, x in zip(paths, leaves, strict=True)], structure, wide


def _of_numpy(x: Any) -> Any:
    """A tensor, of the same memory where torch can take it; text and objects as they are."""
    if x.dtype.kind not in "biufc":
        return x
    fits = isinstance(x, np.ndarray) and x.flags.c_contiguous and x.flags.writeable and x.dtype.isnative
    return torch.from_numpy(x if fits else np.array(x, x.dtype.newbyteorder("="), order="C"))


def _checked(path: tuple[Any, ...], x: Any, narrow: bool) -> Any:
    name = f"the argument {path_string(path)!r}"
    if isinstance(x, Tensor):
        if x.requires_grad:
            raise TypeError(f"{name} requires a gradient, and a loss of jax has one by params only; detach it")
        return _narrowed(name, x) if narrow and x.dtype in _WHOLE else x
    if isinstance(x, (jax.Array, bool, int, float, complex)):
        return x
    raise TypeError(f"{name} is a {type(x).__name__}; a function of jax takes tensors, arrays and numbers")


def array_of(x: Tensor) -> Any:
    """A tensor as an array of jax, in its mode of 64 bits where the tensor needs it."""
    return to_jax(x.detach()).reshape(x.shape)


def _narrowed(name: str, x: Tensor) -> Tensor:
    """Whole numbers in 32 bits."""
    to = _WHOLE[x.dtype]
    out = x.to(to)
    if not torch.equal(out.to(x.dtype), x):
        raise ValueError(
            f"{name} has whole numbers of {x.dtype} that do not fit {to}, in which jax computes; call "
            f"jax.config.update('jax_enable_x64', True) before the run"
        )
    return out
