"""Packing: the leaves of a tree in one message per dtype, device and 25 MB."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import optree
import torch
from torch import Tensor

from ..tree._tree import Tree, path_string, plain

# Measured: packing 37 MB takes 2 to 3 times as long in one piece, whose memory comes from the system anew each time.
# Leaves are never split.
MESSAGE_BYTES = 25 * 10**6
# In sums leaves of this size travel alone, without being packed.
_LARGE_BYTES = 2**20
# The dtypes that every backend can send and add.
_SENT = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}


def can_send(leaf: Tensor, ordered: bool) -> bool:
    if leaf.layout is not torch.strided:
        return False
    return leaf.dtype in _SENT and not (ordered and leaf.is_complex())


def refuse(tree: Tree, ordered: bool) -> NoReturn:
    """Raise TypeError for the first leaf that cannot be sent between ranks."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    path, leaf = next((p, x) for p, x in zip(paths, map(as_tensor, leaves), strict=True) if not can_send(x, ordered))
    name = f"the leaf at {path_string(path)!r}" if path else "the tensor"
    if leaf.layout is not torch.strided:
        raise TypeError(
            f"{name} has layout {leaf.layout}, and only dense tensors travel between ranks; use .to_dense()"
        )
    if ordered and leaf.is_complex():
        raise TypeError(
            f"{name} has dtype {leaf.dtype}, and complex numbers have no order; use torch.view_as_real(tensor)"
        )
    other = torch.float32 if leaf.is_floating_point() else torch.int64
    raise TypeError(f"{name} has dtype {leaf.dtype}, which does not travel between ranks; convert it with .to({other})")


def as_tensor(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf
    try:
        return torch.as_tensor(leaf)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"a collective takes tensors and numbers, got {leaf!r}") from None


def packed(
    tree: Tree,
    lead: int,
    run: Callable[[Tensor], Tensor],
    run_: Callable[[Tensor], Tensor] | None = None,
    ordered: bool = False,
    alone: bool = False,
) -> Tree:
    """Apply `run` to the leaves: one call per dtype, device and `MESSAGE_BYTES`.

    The leaves are packed after their first `lead` dimensions. `run` may change the number of leading dimensions, but
    not the packed one.

    Args:
        run_: Like `run`, but it may overwrite its argument; it is called for fresh copies through which nothing
            differentiates.
        ordered: Whether floats are sent as integers and compared.
        alone: Whether large leaves travel alone.
    """
    leaves, structure = optree.tree_flatten(tree)
    leaves = [as_tensor(leaf) for leaf in leaves]
    if not all([can_send(leaf, ordered) for leaf in leaves]):
        refuse(tree, ordered)
    out: list[Any] = [None] * len(leaves)
    for members in messages(leaves, alone):
        if len(members) == 1:
            (i,) = members
            flat = leaves[i].reshape((*leaves[i].shape[:lead], math.prod(leaves[i].shape[lead:])))
        else:
            flat = torch.cat(
                [leaves[i].reshape((*leaves[i].shape[:lead], math.prod(leaves[i].shape[lead:]))) for i in members],
                dim=-1,
            )
        result = run_(flat) if run_ is not None and len(members) > 1 and plain(flat) else run(flat)
        sizes = [math.prod(leaves[i].shape[lead:]) for i in members]
        for i, piece in zip(members, result.split(sizes, dim=-1), strict=True):
            out[i] = piece.reshape((*result.shape[:-1], *leaves[i].shape[lead:]))
    return optree.tree_unflatten(structure, out)


def messages(leaves: list[Tensor], alone: bool) -> list[list[int]]:
    """The leaves that travel together: of one dtype and device, in their order, up to `MESSAGE_BYTES`.

    Args:
        alone: Whether those of at least `_LARGE_BYTES` travel alone.
    """
    done: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for i, leaf in enumerate(leaves):
        key, size = (leaf.dtype, leaf.device), leaf.numel() * leaf.element_size()
        if alone and size >= _LARGE_BYTES:
            done.append([i])
            continue
        members, filled = filling.get(key, ([], 0))
        if members and filled + size > MESSAGE_BYTES:
            members, filled = [], 0
        if not members:
            done.append(members)
        members.append(i)
        filling[key] = members, filled + size
    return done
