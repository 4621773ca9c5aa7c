"""One collective on one tensor over one axis, and how a tree is packed for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..base import AxisName, Tree, checks, trees
from ._environment import Axis, lookup, note_mixed

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def to_order(x: Tensor, nan_is_largest: bool) -> Tensor:
    """Integers in the order of these floats, with NaN at one end and at least 32 bits; other dtypes are unchanged."""
    if not x.is_floating_point():
        return x
    wide = x.detach() if x.dtype in _INTEGERS else x.detach().float()
    integers = _INTEGERS[wide.dtype]
    end = torch.iinfo(integers).max if nan_is_largest else torch.iinfo(integers).min
    return torch.where(wide.isnan(), end, _swapped(wide.view(integers)))


def from_order(order: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `to_order`; both ends of the integers are the bits of a NaN."""
    if not dtype.is_floating_point:
        return order
    wide = torch.float64 if order.dtype is torch.int64 else torch.float32
    return _swapped(order).view(wide).to(dtype)


def _swapped(bits: Tensor) -> Tensor:
    """Bits with the order of negative numbers reversed: floats store a sign and a magnitude."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


class Message(NamedTuple):
    """One message of one rank in one step."""

    collective: str  # its name in transforms: "psum", "all_gather", ...
    axis: str  # the axis, or several joined by " x "
    dtype: torch.dtype  # of the message
    payload_bytes: int  # the input of the collective on one rank
    sent_bytes: int  # the bytes that one rank sends in a ring


def sent_bytes(op: str, payload: int, ranks: int, arg: Any = None, rank: int = 0) -> int:
    """The bytes that one rank sends to its neighbour in a ring.

    Args:
        op: The name of the collective.
        payload: The bytes of its input on this rank.
        arg: Of all_to_all_single: the rows to each rank, and those from each.
        rank: This rank, whose rows for itself are not sent.
    """
    if op == "all_to_all_single":
        give, _ = arg
        return round(payload * (1 - give[rank] / max(sum(give), 1)))
    sums = 2 if op in ("psum", "pmax", "pmin") else 1
    return round(payload * {"all_gather": ranks - 1, "ppermute": 1}.get(op, sums * (ranks - 1) / ranks))


# Measured: packing 37 MB takes 2 to 3 times as long in one piece, whose memory comes from the system anew each time.
# Leaves are never split.
MESSAGE_BYTES = 25 * 10**6
# In sums leaves of this size are messages of their own, which need no copy: a smaller message costs more than the copy.
DIRECT_BYTES = 4 * 10**6
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


def can_send(leaves: list[Tensor], ordered: bool) -> bool:
    for layout, dtype in {(leaf.layout, leaf.dtype) for leaf in leaves}:
        if layout is not torch.strided or dtype not in _SENT or (ordered and dtype.is_complex):
            return False
    return True


def refuse(tree: Tree, ordered: bool) -> NoReturn:
    """Raise TypeError for the first leaf that cannot be sent between ranks."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    path, leaf = next((p, x) for p, x in zip(paths, map(as_tensor, leaves), strict=True) if not can_send([x], ordered))
    name = f"the leaf at {trees.path_string(path)!r}" if path else "the tensor"
    if leaf.layout is not torch.strided:
        raise TypeError(
            f"{name} has layout {leaf.layout}, but only dense tensors travel between ranks; use .to_dense()"
        )
    if ordered and leaf.is_complex():
        raise TypeError(f"{name} has dtype {leaf.dtype}, and complex numbers have no order; use torch.view_as_real")
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
    if not can_send(leaves, ordered):
        refuse(tree, ordered)
    out: list[Any] = [None] * len(leaves)
    rows = [leaf.reshape((*leaf.shape[:lead], math.prod(leaf.shape[lead:]))) for leaf in leaves]
    for members in messages(leaves, alone):
        flat = rows[members[0]] if len(members) == 1 else torch.cat([rows[i] for i in members], dim=-1)
        result = run_(flat) if run_ is not None and len(members) > 1 and trees.plain(flat) else run(flat)
        sizes = [rows[i].shape[-1] for i in members]
        for i, piece in zip(members, result.split(sizes, dim=-1), strict=True):
            out[i] = piece.reshape((*result.shape[:-1], *leaves[i].shape[lead:]))
    return optree.tree_unflatten(structure, out)


def messages(leaves: list[Tensor], alone: bool) -> list[list[int]]:
    """The leaves that travel together: of one dtype and device, in their order, up to `MESSAGE_BYTES`.

    Args:
        alone: Whether those of at least `DIRECT_BYTES` travel alone.
    """
    done: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    alike = len({leaf.dtype for leaf in leaves}) == len({leaf.device for leaf in leaves}) == 1
    for i, leaf in enumerate(leaves):
        key, size = None if alike else (leaf.dtype, leaf.device), leaf.nbytes
        if alone and size >= DIRECT_BYTES:
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


names = checks.axis_names

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
        if op == "all_gather" and not torch.compiler.is_compiling():
            with _disable_current_modes():  # a policy of `remat` that keeps all the rest does not keep what is gathered
                return axis.run(op, x, arg)
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


def apply_one(op: str, x: Tensor, axis: Axis, arg: Any = None) -> Tensor:
    if trees.plain(x):  # an autograd.Function inspects its signature in every call
        return axis.run(op, x, arg)
    note_mixed(axis, x)
    return _apply_function(x, op, arg, axis)


def reduce_over(op: str, tree: Tree, axis: AxisName) -> Tree:
    ordered = op in ("pmax", "pmin")
    for one in _lookup_all(axis):
        run_ = one.run_ if op == "psum" else None
        tree = packed(tree, 0, lambda x, one=one: apply_one(op, x, one), run_, ordered, op == "psum")  # type: ignore[misc]
    return tree


def sum_plain(leaves: list[Tensor], axis: AxisName, kept: Sequence[Tensor] = ()) -> tuple[list[Tensor], list[Tensor]]:
    """psum of tensors that may be overwritten. All messages travel at once.

    Args:
        leaves: No transform wraps them, and no two of them share memory.
        kept: Those that must not be overwritten.

    Returns:
        The sums, in the memory of `leaves` or in that of the messages; and the messages, which hold nothing else.
    """
    if not can_send(leaves, False):
        refuse(leaves, False)
    keep, sent = set(map(id, kept)), leaves
    for one in _lookup_all(axis) if leaves else ():
        sums, waits, sent = list(leaves), [], []
        for members in messages(leaves, True):
            parts = [leaves[i] for i in members]
            if len(parts) == 1 and parts[0].is_contiguous() and id(parts[0]) not in keep:
                sent.append(parts[0].view(-1))
                waits.append(one.start_(sent[-1]))
                continue
            flat = one.empty(sum([x.numel() for x in parts]), parts[0].dtype, parts[0].device)
            own = torch._C._nn.unflatten_dense_tensors(flat, parts)
            # Of no elements torch's is (0,).
            own = [x if x.numel() else x.view(like.shape) for x, like in zip(own, parts, strict=True)]
            torch._foreach_copy_(own, parts)  # half of the host's time for cat and reshape
            waits.append(one.start_(flat))
            sent.append(flat)
            for i, x in zip(members, own, strict=True):
                sums[i] = x
        for wait in waits:
            wait()
        leaves = sums
    return leaves, sent


def _lookup_all(axis: AxisName) -> list[Axis]:
    """The interpreters to reduce over one after another, or one interpreter that covers all axes at once."""
    wanted = names(axis)
    found = [lookup(name) for name in wanted]
    if len(wanted) > 1 and (joint := found[0].joint(wanted)) is not None:
        return [joint]
    return found
