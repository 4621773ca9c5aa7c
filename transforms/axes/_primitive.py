"""One collective on one tensor over one axis: the primitive of all collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._axis_env import Axis, lookup
from .._check import AxisName, axis_names
from ..tree._tree import Tree, plain
from ._packing import can_send, messages, packed, refuse

names = axis_names

_TRANSPOSE = {
    "psum": "psum",
    "all_gather": "psum_scatter",
    "psum_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all_single",
    "ppermute": "ppermute",
    "pbroadcast": "psum",
}


class _Collective(torch.autograd.Function):
    """One collective on one tensor, over one axis."""

    @staticmethod
    def forward(x: Tensor, op: str, arg: Any, axis: Axis) -> Tensor:
        return axis.run(op, x, arg)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        # The axis is kept here, since backward may run in a thread where nothing is bound.
        _, ctx.op, ctx.arg, ctx.axis = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        op, arg, axis = ctx.op, ctx.arg, ctx.axis
        if op not in _TRANSPOSE:
            raise TypeError(f"{op} has no gradient; detach its input, or use psum or all_gather")
        if op == "ppermute":
            arg = tuple((target, source) for source, target in arg)
        if op == "all_to_all_single":
            arg = arg[::-1]
        out = _apply_function(grad, _TRANSPOSE[op], arg, axis)
        if op == "pbroadcast":
            out = torch.where(axis.index() == ctx.arg, out, torch.zeros_like(out))
        return out, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, op: str, arg: Any, axis: Axis) -> tuple[Tensor, int]:
        """Of a user's own vmap: its dimension is kept at the end."""
        out = _apply_function(x.movedim(in_dims[0], -1), op, arg, axis)
        return out, out.dim() - 1


_apply_function: Callable[..., Tensor] = _Collective.apply


def note(axis: AxisName, what: str) -> None:
    """Describe the floats in the next message of bytes over an axis; the simulator compares it between ranks."""
    for one in _lookup_all(axis):
        one.note(what)


def apply_one(op: str, x: Tensor, axis: Axis, arg: Any = None) -> Tensor:
    if plain(x):  # an autograd.Function inspects its signature in every call
        return axis.run(op, x, arg)
    return _apply_function(x, op, arg, axis)


def reduce_over(op: str, tree: Tree, axis: AxisName) -> Tree:
    ordered = op in ("pmax", "pmin")
    for one in _lookup_all(axis):
        run_ = one.run_ if op == "psum" else None
        tree = packed(tree, 0, lambda x, one=one: apply_one(op, x, one), run_, ordered, op == "psum")  # type: ignore[misc]
    return tree


def sum_donated(leaves: list[Tensor], axis: AxisName) -> list[Tensor]:
    """psum of tensors that may be overwritten. All messages travel at once.

    Args:
        leaves: No transform wraps them, and no two of them share memory.

    Returns:
        The sums, in the memory of `leaves` or in that of the messages.
    """
    if not all(can_send(leaf, False) for leaf in leaves):
        refuse(leaves, False)
    for one in _lookup_all(axis) if leaves else ():
        sums, waits = list(leaves), []
        for members in messages(leaves, True):
            parts = [leaves[i] for i in members]
            if len(parts) == 1 and parts[0].is_contiguous():
                waits.append(one.start_(parts[0].view(-1)))
                continue
            sizes = [x.numel() for x in parts]
            flat = one.empty(sum(sizes), parts[0].dtype, parts[0].device)
            torch.cat([x.reshape(-1) for x in parts], out=flat)
            waits.append(one.start_(flat))
            for i, own in zip(members, flat.split(sizes), strict=True):
                sums[i] = own.view(leaves[i].shape)
        for wait in waits:
            wait()
        leaves = sums
    return leaves


def _lookup_all(axis: AxisName) -> list[Axis]:
    """The interpreters to reduce over one after another, or one interpreter that covers all axes at once."""
    wanted = names(axis)
    found = [lookup(name) for name in wanted]
    if len(wanted) > 1 and (joint := found[0].joint(wanted)) is not None:
        return [joint]
    return found
