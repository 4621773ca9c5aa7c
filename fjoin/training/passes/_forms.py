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
            form.append((x.shape, x.dtype, x.requires_grad))
        elif x is None or isinstance(x, (bool, int, float, str)):
            form.append(repr(x))  # 1, 1.0 and True are equal, and so are 0.0 and -0.0
        else:
            raise CaptureError(
                f"capture=True: {_named('batch', path)} is a {type(x).__name__}; a captured step takes tensors of the device, numbers "
                f"and strings, in tuples, lists and dicts"
            )
    return [x for x in leaves if isinstance(x, Tensor)], (spec, *form)


def inputs_like(batch: Any) -> Any:
    """A batch in memory of its own."""
    return optree.tree_map(_input_like, batch, none_is_leaf=True)


def _input_like(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def numbers_in(aux: Any) -> dict[str, Any]:
    """What aux holds besides tensors, by place; arrays as lists."""
    paths, leaves, _ = optree.tree_flatten_with_path(aux, none_is_leaf=True)
    found = ((path, x) for path, x in zip(paths, leaves, strict=True) if not isinstance(x, Tensor))
    return {_named("aux", path): x.tolist() if hasattr(x, "tolist") else x for path, x in found}


def _named(what: str, path: tuple[Any, ...]) -> str:
    return what + "".join(f"[{key!r}]" for key in path)
