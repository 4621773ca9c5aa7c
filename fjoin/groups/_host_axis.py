"""An axis whose ranks are processes of one host, which exchange CPU tensors through shared memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._errors import DesyncError
from ..shared_memory import Exchange, HostChannel, HostLinks, combine, copy_all
from ..transforms.axes import Done, PieceSum, Work, from_order, to_order
from ._axis import GroupAxis, keep_freed
from ._message import plain


class HostAxis(GroupAxis):
    """An axis over a process group whose ranks are on one host. Tensors on other devices use the group.

    Sums are taken in rank order, so they are bit for bit those of the lockstep simulator.

    Args:
        links: The connections of this rank to the ranks of its host.
        number: The number of this axis among those that use the links.
        ranks: The ranks along this axis, as the links count them.
    """

    def __init__(self, links: HostLinks, number: int, ranks: Sequence[int], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.channel = HostChannel(links, number, ranks, self.rank, self.check)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer whose messages need no copy."""
        return self.channel.links.zeros(numel, dtype)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor for `start_`, on the CPU without a copy."""
        if device.type != "cpu":
            return super().empty(numel, dtype, device)
        keep_freed()
        return self.channel.links.lend(numel, dtype)

    def _exchange(self, op: str, x: Tensor, *args: Any, arg: Any = None, **kwargs: Any) -> Exchange:
        """Start a message; see `HostChannel.exchange`.

        Args:
            arg: The argument of the collective.
        """
        self._open()
        return self._counted(op, x, self.channel.exchange(op, x, *args, **kwargs), arg)

    def _counted(self, op: str, x: Tensor, work: Exchange, arg: Any = None) -> Exchange:
        work.waiting = self.traffic.launched(op, self.name, x, self.size, arg, self.rank)
        return work

    def begin_reduce(self, buffer: Tensor) -> Work:
        """Start summing a contiguous buffer in place."""
        if buffer.device.type != "cpu":
            return super().begin_reduce(buffer)
        self._open()
        if buffer.numel() == 0:
            return Done()
        work = self._counted("psum", buffer, self.channel.reduce_("psum", buffer.detach().view(-1)))
        return Summed(work) if work.pushes and buffer.is_floating_point() else work

    def begin_scatter(self, flat: Tensor, bounds: Sequence[int], rank: int) -> PieceSum:
        """Start summing the pieces of a flat buffer, each on its rank; on the CPU in place."""
        return OwnPiece(self, flat, bounds) if flat.device.type == "cpu" else super().begin_scatter(flat, bounds, rank)

    def scatter_(self, buffer: Tensor, bounds: Sequence[int]) -> Exchange:
        """Start summing the pieces of a flat buffer on the CPU, each on its rank, in place.

        Args:
            bounds: The first element of each rank's piece, and the end of the last one.
        """
        pieces, own = list(zip(bounds, bounds[1:], strict=False)), buffer[bounds[self.rank] : bounds[self.rank + 1]]
        # Without packets that are not answered: `total` is that of all ranks.
        same = len(buffer), tuple(bounds)
        return self._exchange(
            "psum_scatter", buffer, pieces, lambda parts: combine(parts, [own]), settles=True, inline=False, same=same
        )

    def begin(self, op: str, x: Tensor, arg: Any) -> Callable[[], Tensor]:
        """Start a collective; the returned function waits for it and returns the result."""
        if x.device.type != "cpu":
            return super().begin(op, x, arg)
        self._open()
        n, x = self.size, plain(x)
        rest, m, shape = x.shape[1:], x.numel(), tuple(x.shape)
        if op == "psum":
            out = x.clone()
            if not m:
                return _After(Done(), out)
            return _After(self._counted(op, out, self.channel.reduce_(op, out.view(-1), same=shape)), out)
        if op in ("pmax", "pmin"):
            order = to_order(x, op == "pmax")
            out = order.clone() if order is x else order.contiguous()
            fold = torch.maximum if op == "pmax" else torch.minimum
            work = self._counted(op, out, self.channel.reduce_(op, out.view(-1), fold, shape))
            return _After(work, out, lambda: from_order(out, x.dtype))
        if op == "pbroadcast":
            out = x.clone()
            mine = [(0, m if self.rank == arg else 0)] * n
            take = lambda parts: copy_all(out, [parts[arg]])  # noqa: E731
            return _After(self._exchange(op, x, mine, take, same=(arg, shape)), out)
        if op == "all_gather":
            out = x.new_empty((n, *shape))
            return _After(self._exchange(op, x, [(0, m)] * n, lambda parts: copy_all(out, parts), same=shape), out)
        if op in ("psum_scatter", "all_to_all"):
            row = m // n
            ranges = [(i * row, (i + 1) * row) for i in range(n)]
            if op == "all_to_all":
                out = torch.empty_like(x)
                return _After(self._exchange(op, x, ranges, lambda parts: copy_all(out, parts), same=shape), out)
            out = x.new_empty(rest)
            work = self._exchange(op, x, ranges, lambda parts: combine(parts, [out.view(-1)]), same=shape)
            return _After(work, out)
        if op == "all_to_all_single":
            give, take_rows = arg
            row = rest.numel()
            ends = [row * end for end in itertools.accumulate(give, initial=0)]
            out = x.new_empty((sum(take_rows), *rest))

            def taken(parts: list[Tensor]) -> None:
                if (got := [len(part) for part in parts]) != [rows * row for rows in take_rows]:
                    raise DesyncError(
                        f"all_to_all_single: the ranks give this rank {got} elements, but it takes {list(take_rows)} rows of "
                        f"{row}; input_split_sizes and output_split_sizes of two ranks must agree"
                    )
                copy_all(out, parts)

            return _After(self._exchange(op, x, list(itertools.pairwise(ends)), taken, arg=arg, same=tuple(rest)), out)
        send = dict(arg).get(self.rank)
        receive = {target: source for source, target in arg}.get(self.rank)
        out = torch.zeros_like(x)
        ranges = [(0, m if i == send else 0) for i in range(n)]
        take_one = (lambda parts: None) if receive is None else (lambda parts: copy_all(out, [parts[receive]]))
        return _After(self._exchange(op, x, ranges, take_one, same=(sorted(arg), shape)), out)

    def begin_gather(self, flat: Tensor, sizes: Sequence[int], rank: int) -> Work:
        """Start filling a flat buffer from all ranks' parts of it, of these sizes in rank order; each has its own."""
        if flat.device.type != "cpu":
            return super().begin_gather(flat, sizes, rank)
        start = sum(sizes[: self.rank])
        own, at = flat[start : start + sizes[self.rank]], [sum(sizes[:i]) for i in range(self.size + 1)]

        def fill(parts: list[Tensor]) -> None:
            for i, part in enumerate(parts):
                if i != self.rank:
                    flat[at[i] : at[i + 1]].copy_(part)

        same = flat.numel(), tuple(sizes)
        return self._exchange("all_gather", own, [(0, len(own))] * self.size, fill, settles=True, same=same)


class OwnPiece(PieceSum):
    """The sum of this rank's piece, which it takes where the piece is."""

    def __init__(self, axis: HostAxis, flat: Tensor, bounds: Sequence[int]) -> None:
        self._piece, self._floats = flat[bounds[axis.rank] : bounds[axis.rank + 1]], flat.is_floating_point()
        self._work = axis.scatter_(flat, bounds)

    def arrived(self) -> bool:
        return self._work.arrived()

    def wait(self) -> Tensor:
        self._work.wait()
        self.total = self._work.total if self._floats else None
        return self._piece


class Summed:
    """A sum under way.

    Attributes:
        total: Once it has ended: the sum of all elements. It is finite only if all of them are.
    """

    def __init__(self, work: Exchange) -> None:
        self._work, self.arrived = work, work.arrived
        self.total: float | None = None

    def wait(self) -> None:
        self._work.wait()
        self.total = self._work.total


class _After:
    """A collective under way; a call waits for it and returns its result."""

    def __init__(self, work: Any, out: Tensor, result: Callable[[], Tensor] | None = None) -> None:
        self._work, self._out, self._result = work, out, result

    def arrived(self) -> bool:
        return not isinstance(self._work, Exchange) or self._work.arrived()

    def __call__(self) -> Tensor:
        self._work.wait()
        return self._out if self._result is None else self._result()
