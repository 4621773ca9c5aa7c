"""The form of a batch: what a captured step depends on besides the values of tensors."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from ..._errors import CaptureError


def form_of(batch: Any, device: torch.device) -> tuple[list[Tensor], Any]:
    """The tensors of a batch, and all else that a graph depends on.

    Raises:
        CaptureError: a tensor lies elsewhere, or a leaf is neither a tensor nor a plain value.
    """
    paths, leaves, spec = optree.tree_flatten_with_path(batch, none_is_leaf=True)
    form = list[Any]()
    for path, x in zip(paths, leaves, strict=True):
        if isinstance(x, Tensor):
            if x.device != device:
                raise CaptureError(
                    f"capture=True: {_named('batch', path)} lies on {x.device}, and the parameters on {device}; move the batch there "
                    f"before the step"
                )
            form.append((x.shape, x.dtype))
        elif x is None or isinstance(x, (bool, int, float, str)):
            form.append(x)
        else:
            raise CaptureError(
                f"capture=True: {_named('batch', path)} is a {type(x).__name__}; a captured step takes tensors of the device, numbers "
                f"and strings, in tuples, lists and dicts"
            )
    return [x for x in leaves if isinstance(x, Tensor)], (spec, *form)


def numbers_in(aux: Any) -> dict[str, Any]:
    """What aux holds besides tensors, by place."""
    paths, leaves, _ = optree.tree_flatten_with_path(aux, none_is_leaf=True)
    return {_named("aux", p): x for p, x in zip(paths, leaves, strict=True) if not isinstance(x, Tensor)}


def _named(what: str, path: tuple[Any, ...]) -> str:
    return what + "".join(f"[{key!r}]" for key in path)
