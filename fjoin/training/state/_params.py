"""Parameters in the form of the step: path -> leaf, in the order of registration."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import optree
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..._functional import Apply
from ...transforms.tree._check_tree import OF_MODULE, check_dense
from ...transforms.tree._tree import flatten_in_insertion_order


def flatten(params: Any) -> tuple[dict[str, Tensor], Callable[[dict[str, Any]], Any]]:
    """Path -> leaf in the order of registration, and the function that rebuilds the tree."""
    if isinstance(params, nn.Module) or (isinstance(params, tuple) and params and isinstance(params[0], Apply)):
        raise TypeError(f"params must be a pytree of tensors, got a {type(params).__name__}{OF_MODULE}")
    if params is None or isinstance(params, Iterator):
        hint = OF_MODULE if params is not None else ""
        raise TypeError(
            f"params must be a pytree of tensors, such as a dict from paths to tensors, got {params!r}{hint}"
        )
    if "jax" in sys.modules:
        from ...jax._trees import tensors_of

        params = tensors_of(params)
    names, leaves, structure = flatten_in_insertion_order(params)
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"several leaves of params have the paths {twice}; rename them")
    first: dict[int, str] = {}
    for name, leaf in zip(names, leaves, strict=True):
        check_dense(f"params[{name!r}]", leaf)
        if is_traceable_wrapper_subclass(leaf):
            raise TypeError(
                f"params[{name!r}] is a {type(leaf).__name__}, but a step holds plain tensors; a tensor-parallel or fully_shard "
                f"model is trained in a loop over fjoin.join(loader), with its loss times loop.scale"
            )
        if leaf.device != leaves[0].device:
            raise ValueError(
                f"params[{name!r}] lies on {leaf.device}, but params[{names[0]!r}] on {leaves[0].device}; a step takes "
                f"parameters of one device: a model over several is trained in a loop over fjoin.join(loader)"
            )
        if first.setdefault(id(leaf), name) != name:
            raise ValueError(
                f"params[{name!r}] and params[{first[id(leaf)]!r}] are the same tensor, which would become two; pass it once and "
                f"use it twice in loss_fn (fjoin.functional does that for a module's shared parameters)"
            )

    def rebuild(flat: dict[str, Any]) -> Any:
        return optree.tree_unflatten(structure, [flat[name] for name in names])

    return dict(zip(names, leaves, strict=True)), dict if type(params) is dict and names == list(params) else rebuild


def check_values(params: dict[str, Tensor]) -> None:
    """Raise ValueError for parameters on the meta device, which have no values to send to other ranks."""
    if empty := [path for path, p in params.items() if p.is_meta]:
        raise ValueError(
            f"params[{empty[0]!r}] is on the meta device and holds no values; give it some first, by module.to_empty(device=...) and "
            f"an initialization"
        )


def check_buffers(buffers: Any) -> None:
    """Raise TypeError unless `buffers` is None or a dict from paths to tensors."""
    if buffers is None or (isinstance(buffers, dict) and all(isinstance(b, Tensor) for b in buffers.values())):
        return
    raise TypeError(f"buffers must be a dict from paths to tensors, got {buffers!r}")
