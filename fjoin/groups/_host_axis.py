"""An axis whose ranks are processes of one host, which exchange CPU tensors through shared memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import DesyncError
from ..shared_memory import Exchange, HostChannel, HostLinks, combine, copy_all
from ..transforms.axes import PieceSum, Work, from_order, to_order
from ._axis import GroupAxis, elements, keep_freed
from ._message import Received, plain

_FOLDS: dict[str, Callable[..., Tensor]] = {"psum": torch.add, "pmax": torch.maximum, "pmin": torch.minimum}


class HostAxis(GroupAxis):
    """An axis over a process group whose ranks are on one host. Tensors on other devices use the group.

    Sums are taken in rank order, so they are bit for bit those of the lockstep simulator.

    Args:
        links: The connections of this rank to the ranks of its host.
        number: The number of this axis among those that use the links.
        args: As for `GroupAxis`.
    """

    def __init__(self, links: HostLinks, number: int, *args: Any) -> None:
        super().__init__(*args)
        ranks = dist.get_process_group_ranks(self.group)
        self.channel = HostChannel(links, number, ranks, self.rank, self.check, self._launched)

    def _launched(self, op: str, x: Tensor, arg: Any) -> AbstractContextManager[None]:
        return self.traffic.launched(op, self.name, x, self.size, arg, self.rank)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer whose messages need no copy."""
        return self.channel.links.zeros(numel, dtype)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor for `start_`, on the CPU without a copy."""
        if device.type != "cpu":
            return super().empty(numel, dtype, device)
        keep_freed()
        return self.channel.links.lend(numel, dtype)

    def begin_reduce(self, buffer: Tensor) -> Work:
        """Start summing a contiguous buffer in place."""
        if buffer.device.type != "cpu":
            return super().begin_reduce(buffer)
        return self.channel.reduce_("psum", buffer.detach().view(-1))

    def begin_scatter(self, flat: Tensor, bounds: Sequence[int], rank: int) -> PieceSum:
        """Start summing the pieces of a flat buffer, each on its rank; on the CPU in place."""
        if flat.device.type != "cpu":
            return super().begin_scatter(flat, bounds, rank)
        own, same = flat[bounds[rank] : bounds[rank + 1]], (len(flat), tuple(bounds))
        work = self.channel.exchange(
            "psum_scatter", flat, list(itertools.pairwise(bounds)), lambda parts: combine(parts, [own]),
            settles=True, inline=False, same=same,  # a packet is not answered, and then `total` is not that of all ranks
        )  # fmt: skip
        return OwnPiece(own, work)

    def begin(self, op: str, x: Tensor, arg: Any) -> Callable[[], Tensor]:
        """Start a collective; the returned function waits for it and returns the result."""
        if x.device.type != "cpu":
            return super().begin(op, x, arg)
        n, x = self.size, plain(x)
        m, shape, rest = x.numel(), tuple(x.shape), tuple(x.shape[1:])
        if op in _FOLDS:
            out = x.clone() if op == "psum" else to_order(x.clone(), op == "pmax")
            work = self.channel.reduce_(op, out.view(-1), _FOLDS[op], shape)
            received = Received([work], out)
            return received if op == "psum" else lambda: from_order(received(), x.dtype)
        same: object = shape
        # What each rank gets of `x`. A part that a rank does not get is empty, so that the parts together are the
        # result.
        if op == "pbroadcast":
            out, ranges, same = x.clone(), [(0, m if self.rank == arg else 0)] * n, (arg, shape)
        elif op == "all_gather":
            out, ranges = x.new_empty((n, *shape)), [(0, m)] * n
        elif op == "ppermute":
            out, same = torch.zeros_like(x), (sorted(arg), shape)
            ranges = [(0, given) for given in elements(arg, self.rank, n, m)[0]]
        else:
            give, take = arg or ([1] * n, [1] * n)
            row, same = math.prod(rest), shape if arg is None else rest
            out = x.new_empty(rest if op == "psum_scatter" else (sum(take), *rest))
            ranges = list(itertools.pairwise(row * end for end in itertools.accumulate(give, initial=0)))

        def taken(parts: list[Tensor]) -> None:
            if op == "psum_scatter":
                combine(parts, [out.view(-1)])
                return
            if op == "all_to_all_single" and (got := [len(part) for part in parts]) != [rows * row for rows in take]:
                both = f"the ranks give this rank {got} elements, but it takes {list(take)} rows of {row}"
                remedy = "input_split_sizes and output_split_sizes of two ranks must agree"
                raise DesyncError(f"all_to_all_single: {both}; {remedy}")
            copy_all(out, parts)

        return Received([self.channel.exchange(op, x, ranges, taken, arg=arg, same=same)], out)

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
        return self.channel.exchange("all_gather", own, [(0, len(own))] * self.size, fill, settles=True, same=same)


class OwnPiece(PieceSum):
    """The sum of this rank's piece, which it takes where the piece is."""

    def __init__(self, piece: Tensor, work: Exchange) -> None:
        self._piece, self._work = piece, work

    def arrived(self) -> bool:
        return self._work.arrived()

    def wait(self) -> Tensor:
        self._work.wait()
        self.total = self._work.total
        return self._piece
