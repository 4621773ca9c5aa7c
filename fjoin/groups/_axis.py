"""An axis over a process group."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from .._errors import closed
from ..transforms.axes import Axis, Done, One, Work, from_order, to_order
from ..transforms.base import devices
from ._failures import Failures, is_backend_error, raise_from
from ._message import PendingMessage, Received, plain
from ._traffic import Traffic


@functools.cache
def keep_freed() -> None:
    """Make glibc keep the memory that threads free, instead of returning it and faulting it in again in each step.

    glibc sets its mmap and trim thresholds by the largest mapped block, of up to 32 MiB, that was ever freed; so this
    allocates and frees one (benchmarks/alone.py shows the difference). The effect lasts for the whole process. Where
    MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_ is set, or the C library is not glibc, it has no effect.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")


def traced(op: str, x: Tensor, arg: Any, group: dist.ProcessGroup, rank: int, size: int) -> Tensor:
    """A collective of a group, of which this rank is one, in operations that torch.compile traces.

    Raises:
        RuntimeError: a vmap is around it. Dynamo drops the vmap rule of an autograd.Function, and torch's functional
            collectives have none: the result would silently be an unreduced or partly reduced tensor. A tensor that is
            wrapped twice cannot be inspected while tracing, so a derivative of a derivative is refused as well.
    """
    transforms = torch._C._are_functorch_transforms_active()
    if torch._C._functorch.is_batchedtensor(x) or (transforms and retrieve_current_functorch_interpreter().level() > 1):
        raise RuntimeError(
            f"{op} inside torch.func.vmap, or inside nested torch.func transforms, inside torch.compile: the compiler "
            f"would drop the batching rule and return wrong sums. Call {op} outside the vmap (it takes batched tensors "
            f"as they are), or do not compile this part."
        )
    if op == "psum":
        return functional.wait_tensor(functional.all_reduce(x, "sum", group))
    if op in ("pmax", "pmin"):
        order = functional.all_reduce(to_order(x, op == "pmax"), op.removeprefix("p"), group)
        return from_order(functional.wait_tensor(order), x.dtype)
    if op == "pbroadcast":
        return functional.wait_tensor(functional.broadcast(x, arg, group))
    if op == "all_gather":
        return functional.wait_tensor(functional.all_gather_tensor(x.unsqueeze(0), 0, group))
    if op == "psum_scatter":
        return functional.wait_tensor(functional.reduce_scatter_tensor(x, "sum", 0, group)).squeeze(0)
    if op == "ppermute":
        give, take = elements(arg, rank, size, x.numel())
        out = functional.all_to_all_single(x.reshape(-1)[: sum(give)], take, give, group)
        out = functional.wait_tensor(out)
        return out.view(x.shape) if any(rank == target for _, target in arg) else torch.zeros_like(x) + out.sum()
    rows, others = arg or (None, None)
    return functional.wait_tensor(functional.all_to_all_single(x, others and list(others), rows and list(rows), group))


def elements(pairs: Sequence[tuple[int, int]], rank: int, size: int, numel: int) -> tuple[list[int], list[int]]:
    """How many elements of `numel` a rank gives each rank in a ppermute, and takes from each."""
    give = [numel if (rank, other) in pairs else 0 for other in range(size)]
    return give, [numel if (other, rank) in pairs else 0 for other in range(size)]


T = TypeVar("T")
_REDUCE = {"pmax": dist.ReduceOp.MAX, "pmin": dist.ReduceOp.MIN}
# Up to this size two gloo ranks swap buffers and add: one hop instead of all_reduce's several, the same
# bytes, 3 to 4 times faster at 40 to 320 kB (docs/decisions/006-two-gloo-ranks-swap-small-messages.md). From about 1 MB
# on there is no gain.
_SWAP_BYTES = 512 * 1024
# gloo fills a link only while several messages are under way: two ranks exchange pieces of at most this size.
_PIECE_BYTES = 512 * 1024


AXES: weakref.WeakSet[GroupAxis] = weakref.WeakSet()  # all of them


def backend_of(group: Any, kind: str) -> str:
    """The backend of a group for a kind of devices; "" where it has none."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(",")).get(kind, "")


class GroupAxis(Axis):
    """An axis over a process group, which a real rank binds to one axis name.

    Args:
        name: The name of the axis, in what is counted.
        group: The process group.
        ordered: Sum in rank order, bit for bit as the lockstep simulator does. For tests only, since it
            gathers every rank's value.
        failures: The failures of the ranks: they are looked for while a message is under way.
        traffic: Counts the messages.

    Attributes:
        joined: Names of several axes -> the one axis that covers them all.
        broken: Whether a collective has failed.
        failure: The failure after which the mesh was taken down, in words.
    """

    def __init__(self, name: str, group: Any, ordered: bool, failures: Failures, traffic: Traffic) -> None:
        self.name, self.group, self.size, self.rank = name, group, group.size(), group.rank()
        self.ordered, self.traffic, self._cause = ordered, traffic, failures.root_cause
        self.check = functools.partial(failures.raise_if_any, dist.get_process_group_ranks(group))
        self.joined: dict[tuple[str, ...], GroupAxis] = {}
        self.broken, self.failure = False, ""
        self._swaps = self.size == 2 and backend_of(group, "cpu") == "gloo"
        AXES.add(self)

    def index(self) -> Tensor:
        return torch.tensor(self.rank)

    def joint(self, axes: tuple[str, ...]) -> GroupAxis | None:
        return self.joined.get(axes)

    def _open(self) -> Any:
        if self.group is None:  # to torch that would mean all ranks
            raise closed(self.failure)
        return self.group

    def begin_reduce(self, buffer: Tensor) -> Work:
        """Start summing a contiguous buffer in place."""
        group = self._open()
        if self.size == 1:
            return Done()
        if self.ordered:
            buffer.copy_(self.run("psum", buffer, None))
            return Done()
        values = plain(buffer)
        if self._swaps and buffer.device.type == "cpu" and buffer.numel() * buffer.element_size() <= _SWAP_BYTES:
            received = torch.empty_like(values)
            # a + b = b + a, to the bit: both ranks have the same sum.
            return PendingMessage(self, self._swap(values, received), "psum", values, lambda: buffer.add_(received))
        back = (lambda: None) if values is buffer else (lambda: buffer.copy_(values))
        return PendingMessage(self, dist.all_reduce(values, group=group, async_op=True), "psum", values, back)

    def _swap(self, given: Tensor, taken: Tensor) -> Any:
        """Start sending the other of two ranks a flat buffer, and receiving its buffer."""
        sizes = [0, given.numel()] if self.rank == 0 else [given.numel(), 0]
        return dist.all_to_all_single(taken, given, sizes, sizes, group=self.group, async_op=True)

    def _gather(self, x: Tensor, out: Tensor) -> list[tuple[Any, Tensor]]:
        """Start filling `out`, (n, ...), with the ranks' values of `x`; returns works with the parts that they send."""
        flat, rows = x.view(-1), out.view(self.size, x.numel())
        if x.device.type != "cpu":  # NCCL gathers into one tensor, and copies from there into a list of several
            return [(dist.all_gather_single(rows.view(-1), flat, group=self.group, async_op=True), flat)]
        if not self._swaps:
            return [(dist.all_gather(list(rows.unbind(0)), flat, group=self.group, async_op=True), flat)]
        # gloo's all_gather copies the received data once more.
        pieces = max(1, math.ceil(flat.numel() * flat.element_size() / _PIECE_BYTES))
        both = zip(flat.chunk(pieces), rows[1 - self.rank].chunk(pieces), strict=True)
        works = [(self._swap(piece, to), piece) for piece, to in both]
        rows[self.rank].copy_(flat)
        return works

    def begin_gather(self, flat: Tensor, sizes: Sequence[int], rank: int) -> Work:
        """Start filling a flat buffer from all ranks' parts of it, of these sizes in rank order; each has its own."""
        self._open()
        start, cpu = sum(sizes[: self.rank]), flat.device.type == "cpu"
        stop = start + sizes[self.rank]
        own = flat[start:stop]
        if not cpu and len(set(sizes)) == 1:
            work = dist.all_gather_single(flat, own, group=self.group, async_op=True)
            return PendingMessage(self, work, "all_gather", own)
        # Not isend and irecv, although no rank would need a copy: a wait for these that times out breaks the
        # connection.
        give, take = [own.numel()] * self.size, list(sizes)
        give[self.rank] = take[self.rank] = 0
        outer = self.rank in (0, self.size - 1)  # the parts of the others are adjacent
        out = (flat[stop:] if self.rank == 0 else flat[:start]) if outer else flat.new_empty(sum(take))
        sent = own if self.size == 2 else own.repeat(self.size - 1)
        work = dist.all_to_all_single(out, sent, take, give, group=self.group, async_op=True)

        def spread() -> None:
            flat[:start].copy_(out[:start])
            flat[stop:].copy_(out[start:])

        return PendingMessage(self, work, "all_gather", own, (lambda: None) if outer else spread)

    def run_(self, x: Tensor) -> Tensor:
        """psum in place."""
        self.start_(x)()
        return x

    def start_(self, x: Tensor) -> Callable[[], object]:
        work = self.typed(lambda: self.begin_reduce(x))
        return lambda: self.typed(work.wait)

    def typed(self, call: Callable[[], T]) -> T:
        """The result of a call of the backend, whose errors become typed ones."""
        try:
            return call()
        except RuntimeError as error:
            self.broken |= is_backend_error(error)
            raise_from(self._cause(error, None), error)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        keep_freed()
        return super().empty(numel, dtype, device)

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return traced(op, plain(x), arg, self._open(), self.rank, self.size)
        return self.typed(lambda: self.begin(op, x, arg)())

    def begin(self, op: str, x: Tensor, arg: Any) -> Callable[[], Tensor]:
        """Start a collective; the returned function waits for it and returns the result."""
        group, x = self._open(), plain(x)
        if self.size == 1:
            alone = One().run(op, x, arg)
            return lambda: alone
        if op == "psum" and not self.ordered:
            out = x.clone()
            return Received([self.begin_reduce(out)], out)
        # gloo's reduce_scatter takes twice as long as its all_reduce.
        if op == "psum" or (op == "psum_scatter" and (self.ordered or x.device.type == "cpu")):
            parts = self.begin("all_gather" if op == "psum" else "all_to_all", x, None)
            return lambda: devices.sum_in_order(parts().unbind(0))
        if op in _REDUCE:
            out = to_order(x.clone(), op == "pmax")
            works = [(dist.all_reduce(out, _REDUCE[op], group=group, async_op=True), out)]
        elif op == "pbroadcast":
            out = x.clone()
            works = [(dist.broadcast(out, group=group, group_src=arg, async_op=True), out)]
        elif op == "all_gather":
            out = x.new_empty((self.size, *x.shape))
            works = self._gather(x, out)
        elif op == "psum_scatter":
            out = x.new_empty(x.shape[1:])
            works = [(dist.reduce_scatter_single(out, x, group=group, async_op=True), x)]
        elif op == "ppermute":
            give, take = elements(arg, self.rank, self.size, x.numel())
            given, out = x.view(-1)[: sum(give)], torch.zeros_like(x)
            taken = out.view(-1)[: sum(take)]
            works = [(dist.all_to_all_single(taken, given, take, give, group=group, async_op=True), given)]
        else:
            rows, others = (list(sizes) for sizes in arg) if arg else (None, None)
            out = x.new_empty((sum(others or x.shape[:1]), *x.shape[1:]))
            works = [(dist.all_to_all_single(out, x, others, rows, group=group, async_op=True), x)]
        received = Received([PendingMessage(self, work, op, sent, arg=arg) for work, sent in works], out)
        return (lambda: from_order(received(), x.dtype)) if op in _REDUCE else received
