"""An axis whose ranks are processes of one host, which exchange CPU tensors through shared memory."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from ..transforms.axes._order import from_order, to_order
from ._axis import Done, GroupAxis, Work
from ._exchange import Exchange
from ._host_links import INLINE_BYTES, HostLinks

# Elements that are summed at once, so that the parts stay in the cache.
_CHUNK_BYTES = 256 * 1024


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
        self.links, self.number, self.ranks, self._message = links, number, list(ranks), 0

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer whose messages need no copy."""
        return self.links.memory.zeros(numel, dtype)

    def _exchange(
        self,
        op: str,
        source: Tensor,
        ranges: Sequence[tuple[int, int]],
        take: Callable[[list[Tensor]], float | None],
        pushes: bool = False,
        settles: bool = False,
        size: int | None = None,
        message: int | None = None,
    ) -> Exchange:
        """Start a message in which the rank at index i along the axis gets a range of `source`.

        Args:
            take: Gets all ranks' parts for this rank, in rank order.
            size: A number that must be the same on all ranks.
            message: The number of the message, the same on all ranks; by default the next one.
        """
        self._open()
        if message is None:
            self._message = message = (self._message + 1) % 2**32
        source = source.detach().reshape(-1)
        others = {rank: ranges[i] for i, rank in enumerate(self.ranks) if i != self.rank}
        first, last = ranges[self.rank]

        def taken(parts: dict[int, Tensor]) -> float | None:
            parts[self.ranks[self.rank]] = exchange.source[first:last]
            return take([parts[rank] for rank in self.ranks])

        call = f"{op} {source.dtype} {size}"
        exchange = Exchange(
            self.links,
            (self.number, message),
            source,
            others,
            zlib.crc32(call.encode()),
            taken,
            pushes,
            settles,
            self.check,
        )
        # Profilers see it, as they see the messages of a process group.
        with record_function(f"fjoin::{op}") if profiler._is_profiler_enabled else contextlib.nullcontext():
            self.links.start(exchange)
        return exchange

    def reduce_(self, buffer: Tensor) -> Work:
        """Start summing a contiguous buffer in place."""
        if buffer.device.type != "cpu":
            return super().reduce_(buffer)
        if buffer.numel() == 0:
            return Done()
        n, flat = buffer.numel(), buffer.detach().view(-1)
        if n * buffer.element_size() <= INLINE_BYTES:
            return self._exchange("psum", flat, [(0, n)] * self.size, lambda parts: _sum(parts, [flat]), size=n)
        bounds = [i * n // self.size for i in range(self.size + 1)]
        pieces = list(zip(bounds, bounds[1:], strict=False))
        work = self._exchange("psum", flat, pieces, lambda parts: _sum(parts, parts), pushes=True, size=n)
        return Summed(work) if buffer.is_floating_point() else work

    def scatter_(self, buffer: Tensor, bounds: Sequence[int]) -> Exchange:
        """Start summing the pieces of a flat buffer on the CPU, each on its rank, in place.

        Args:
            bounds: The first element of each rank's piece, and the end of the last one.
        """
        pieces, own = list(zip(bounds, bounds[1:], strict=False)), buffer[bounds[self.rank] : bounds[self.rank + 1]]
        return self._exchange(
            "scatter", buffer, pieces, lambda parts: _sum(parts, [own]), settles=True, size=len(buffer)
        )

    def begin(self, op: str, x: Tensor, arg: Any) -> Callable[[], Tensor]:
        """Start a collective; the returned function waits for it and returns the result."""
        if x.device.type != "cpu":
            return super().begin(op, x, arg)
        n, x = self.size, x.contiguous()
        rest = x.shape[1:]
        m = x.numel()
        if op == "psum":
            out = x.clone()
            return _After(self.reduce_(out), out)
        if op in ("pmax", "pmin"):
            order = to_order(x, op == "pmax")
            out = order.clone() if order is x else order
            fold = torch.maximum if op == "pmax" else torch.minimum

            def largest(parts: list[Tensor]) -> None:
                total = parts[0].clone()
                for part in parts[1:]:
                    fold(total, part, out=total)
                out.view(-1).copy_(total)

            work = self._exchange(op, order, [(0, m)] * n, largest, size=m)
            return _After(work, out, lambda: from_order(out, x.dtype))
        if op == "pbroadcast":
            out = x.clone()
            mine = [(0, m if self.rank == arg else 0)] * n
            return _After(self._exchange(op, x, mine, lambda parts: _copy(out, [parts[arg]]), size=m), out)
        if op == "all_gather":
            out = x.new_empty((n, *x.shape))
            return _After(self._exchange(op, x, [(0, m)] * n, lambda parts: _copy(out, parts), size=m), out)
        if op in ("psum_scatter", "all_to_all"):
            row = m // n
            ranges = [(i * row, (i + 1) * row) for i in range(n)]
            if op == "all_to_all":
                out = torch.empty_like(x)
                return _After(self._exchange(op, x, ranges, lambda parts: _copy(out, parts), size=m), out)
            out = x.new_empty(rest)
            return _After(self._exchange(op, x, ranges, lambda parts: _sum(parts, [out.view(-1)]), size=m), out)
        if op == "all_to_all_single":
            give, take = arg
            row, at = rest.numel(), 0
            ranges = []
            for rows in give:
                ranges.append((at * row, (at + rows) * row))
                at += rows
            out = x.new_empty((sum(take), *rest))
            return _After(self._exchange(op, x, ranges, lambda parts: _copy(out, parts)), out)
        send = dict(arg).get(self.rank)
        receive = {target: source for source, target in arg}.get(self.rank)
        out = torch.zeros_like(x)
        ranges = [(0, m if i == send else 0) for i in range(n)]
        take_one = (lambda parts: None) if receive is None else (lambda parts: _copy(out, [parts[receive]]))
        return _After(self._exchange(op, x, ranges, take_one, size=m), out)

    def gather_(self, flat: Tensor, sizes: Sequence[int], message: int | None = None) -> Work:
        """Start filling a flat buffer from all ranks' parts of it, of these sizes in rank order; each has its own."""
        if flat.device.type != "cpu":
            return super().gather_(flat, sizes)
        start = sum(sizes[: self.rank])
        own, at = flat[start : start + sizes[self.rank]], [sum(sizes[:i]) for i in range(self.size + 1)]

        def fill(parts: list[Tensor]) -> None:
            for i, part in enumerate(parts):
                if i != self.rank:
                    flat[at[i] : at[i + 1]].copy_(part)

        return self._exchange(
            "gather", own, [(0, len(own))] * self.size, fill, settles=True, size=flat.numel(), message=message
        )


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


def _copy(out: Tensor, parts: Sequence[Tensor]) -> None:
    flat, at = out.view(-1), 0
    for part in parts:
        flat[at : at + len(part)].copy_(part)
        at += len(part)


def _sum(parts: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
    """Write the sum of the parts, in their order, to all of `outs`, which may be the parts; returns the sum of its elements."""
    n, seen = len(parts[0]), []
    step, floats = max(1, _CHUNK_BYTES // parts[0].element_size()), parts[0].is_floating_point()
    wide = torch.float64 if parts[0].dtype is torch.float64 else torch.float32
    for at in range(0, n, step):
        first, *rest = (part[at : at + step] for part in parts)
        to, *others = (out[at : at + step] for out in outs)
        if not rest:
            to.copy_(first)
        else:
            total = torch.add(first, rest[0], out=to) if len(rest) == 1 else first + rest[0]
            for part in rest[1:]:
                total += part
            if total is not to:
                to.copy_(total)
        for out in others:
            out.copy_(to)
        if floats:  # while it is in the cache
            seen.append(to.sum(dtype=wide))
    return float(torch.stack(seen).sum()) if seen else 0.0
