"""An axis over a process group."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from .._errors import closed
from ..transforms.axes import Axis, Done, Work, from_order, to_order
from ..transforms.base import sum_in_order
from ._message import Copied, Message, Received, plain
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
    """A collective of a group, of which this rank is one, in operations that torch.compile traces."""
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
    if op == "all_to_all":
        return functional.wait_tensor(functional.all_to_all_single(x, None, None, group))
    if op == "all_to_all_single":
        give, take = arg
        return functional.wait_tensor(functional.all_to_all_single(x, list(take), list(give), group))
    send = dict(arg).get(rank)
    receive = {target: source for source, target in arg}.get(rank)
    flat = x.reshape(-1)
    inputs = [flat.numel() if r == send else 0 for r in range(size)]
    outputs = [flat.numel() if r == receive else 0 for r in range(size)]
    out = functional.all_to_all_single(flat if send is not None else flat[:0], outputs, inputs, group)
    out = functional.wait_tensor(out)
    return out.view(x.shape) if receive is not None else torch.zeros_like(x) + out.sum()


def refuse_traced_vmap(op: str, x: Tensor) -> None:
    """Raise where torch.compile traces a vmap around a collective.

    Dynamo drops the vmap rule of an autograd.Function, and torch's functional collectives have none:
    the result would silently be an unreduced or partly reduced tensor. A tensor that is wrapped twice
    cannot be inspected while tracing, so a derivative of a derivative is refused as well.
    """
    if torch._C._functorch.is_batchedtensor(x) or _transform_level() > 1:
        raise RuntimeError(
            f"{op} inside torch.func.vmap, or inside nested torch.func transforms, inside torch.compile: the compiler "
            f"would drop the batching rule and return wrong sums. Call {op} outside the vmap (it takes batched tensors "
            f"as they are), or do not compile this part."
        )


def _transform_level() -> int:
    """How many torch.func transforms are active, in calls that Dynamo traces."""
    if not torch._C._are_functorch_transforms_active():
        return 0
    return retrieve_current_functorch_interpreter().level()


T = TypeVar("T")
_REDUCE = {"pmax": dist.ReduceOp.MAX, "pmin": dist.ReduceOp.MIN}
# Up to this size two gloo ranks swap buffers and add: one hop instead of all_reduce's several, the same
# bytes, 3 to 4 times faster at 40 to 320 kB (docs/decisions/006-two-gloo-ranks-swap-small-messages.md). From about 1 MB on there is
# no gain.
_SWAP_BYTES = 512 * 1024
# gloo fills a link only while several messages are under way: two ranks exchange pieces of at most this size.
_PIECE_BYTES = 512 * 1024


def _named(new: str, old: str) -> Any:
    """A function of torch.distributed under its name from torch 2.13 on, or under its earlier name."""
    return getattr(dist, new if hasattr(dist, new) else old)


class GroupAxis(Axis):
    """An axis over a process group, which a real rank binds to one axis name.

    Args:
        group: The process group.
        ordered: Sum in rank order, bit for bit as the lockstep simulator does. For tests only, since it
            gathers every rank's value.
        joint: Maps axis names to the one axis that covers them all, if there is one.
        check: Raises where another rank has failed; called at intervals while a message is under way.
        cause: The typed error for an error of the backend.
        traffic: Counts the messages.
        name: The name of the axis, in what is counted.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ordered: bool = False,
        joint: Callable[[tuple[str, ...]], GroupAxis | None] = lambda axes: None,
        check: Callable[[], None] = lambda: None,
        cause: Callable[[BaseException], BaseException] = lambda error: error,
        traffic: Traffic | None = None,
        name: str = "",
    ) -> None:
        self.group: Any = group
        self.size, self.rank = group.size(), group.rank()
        self.ordered, self._joint, self.check, self._cause = ordered, joint, check, cause
        self.broken = False  # a collective has failed
        self.failure = ""  # that after which the mesh was taken down
        self.traffic, self.name = traffic or Traffic(), name
        self._swaps = self.size == 2 and "gloo" in dist.get_backend_config(group)

    def index(self) -> Tensor:
        return torch.tensor(self.rank)

    def joint(self, axes: tuple[str, ...]) -> GroupAxis | None:
        return self._joint(axes)

    def _open(self) -> Any:
        if self.group is None:  # to torch that would mean all ranks
            raise closed(self.failure)
        return self.group

    def begin_reduce(self, buffer: Tensor) -> Work:
        """Start summing a contiguous buffer in place."""
        group = self._open()
        if self.ordered:
            buffer.copy_(self.run("psum", buffer, None))
            return Done()
        if buffer.is_conj() or buffer.is_neg():
            return Copied(self.begin_reduce(values := plain(buffer)), values, buffer)
        if self._swaps and buffer.device.type == "cpu" and buffer.numel() * buffer.element_size() <= _SWAP_BYTES:
            received = torch.empty_like(buffer)
            # a + b = b + a, to the bit: both ranks have the same sum.
            return Message(self, self._swap(buffer, received), "psum", buffer, lambda: buffer.add_(received))
        return Message(self, dist.all_reduce(buffer, group=group, async_op=True), "psum", buffer)

    def _swap(self, given: Tensor, taken: Tensor) -> Any:
        """Start sending the other of two ranks a flat buffer, and receiving its buffer."""
        sizes = [0, given.numel()] if self.rank == 0 else [given.numel(), 0]
        return dist.all_to_all_single(taken, given, sizes, sizes, group=self.group, async_op=True)

    def _gather(self, x: Tensor, out: Tensor) -> list[tuple[Any, Tensor]]:
        """Start filling `out`, (n, ...), with the ranks' values of `x`; returns works with the parts that they send."""
        flat, rows = x.view(-1), out.view(self.size, x.numel())
        if x.device.type != "cpu":  # NCCL gathers into one tensor, and copies from there into a list of several
            gather = _named("all_gather_single", "all_gather_into_tensor")
            return [(gather(rows.view(-1), flat, group=self.group, async_op=True), flat)]
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
        del rank
        start, cpu = sum(sizes[: self.rank]), flat.device.type == "cpu"
        stop = start + sizes[self.rank]
        own = flat[start:stop]
        if not cpu and len(set(sizes)) == 1:
            gather = _named("all_gather_single", "all_gather_into_tensor")
            return Message(self, gather(flat, own, group=self.group, async_op=True), "all_gather", own)
        # Not isend and irecv, although no rank would need a copy: a wait for these that times out breaks the connection.
        give, take = [own.numel()] * self.size, list(sizes)
        give[self.rank] = take[self.rank] = 0
        outer = self.rank in (0, self.size - 1)  # the parts of the others are adjacent
        out = (flat[stop:] if self.rank == 0 else flat[:start]) if outer else flat.new_empty(sum(take))
        sent = own if self.size == 2 else own.repeat(self.size - 1)
        work = dist.all_to_all_single(out, sent, take, give, group=self.group, async_op=True)

        def spread() -> None:
            flat[:start].copy_(out[:start])
            flat[stop:].copy_(out[start:])

        return Message(self, work, "all_gather", own, (lambda: None) if outer else spread)

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
            cause = self._cause(error)
            self.broken |= cause is not error
            try:
                if cause is error:
                    raise
                raise cause from error
            finally:  # a frame that refers to its exception lives until a garbage collection, with connections in it
                del cause

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        keep_freed()
        return super().empty(numel, dtype, device)

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        if torch.compiler.is_compiling():
            value = plain(x)
            refuse_traced_vmap(op, value)
            return traced(op, value, arg, self._open(), self.rank, self.size)
        return self.typed(lambda: self.begin(op, x, arg)())

    def _after(self, out: Tensor, op: str, *works: tuple[Any, Tensor], arg: Any = None) -> Callable[[], Tensor]:
        """A function that waits for messages and returns the tensor that they fill.

        Args:
            works: Each with what it sends.
        """
        messages = [Message(self, work, op, sent, arg=arg) for work, sent in works]

        def wait() -> Tensor:
            for message in messages:
                message.wait()
            return out

        return wait

    def begin(self, op: str, x: Tensor, arg: Any) -> Callable[[], Tensor]:
        """Start a collective; the returned function waits for it and returns the result."""
        n, group = self.size, self._open()
        x = plain(x)
        if self.ordered and op in ("psum", "psum_scatter"):
            parts = self.begin("all_gather" if op == "psum" else "all_to_all", x, None)
            return lambda: sum_in_order(parts().unbind(0))
        if op == "psum":
            out = x.clone()
            work = self.begin_reduce(out)

            def total() -> Tensor:
                work.wait()
                return out

            return total
        if op in _REDUCE:
            out = to_order(x, op == "pmax")
            out = out.clone() if out is x else out
            wait = self._after(out, op, (dist.all_reduce(out, _REDUCE[op], group=group, async_op=True), out))
            return lambda: from_order(wait(), x.dtype)
        if op == "pbroadcast":
            out = x.clone()
            return self._after(out, op, (dist.broadcast(out, group=group, group_src=arg, async_op=True), out))
        if op == "all_gather":
            out = x.new_empty((n, *x.shape))
            return self._after(out, op, *self._gather(x, out))
        if op == "psum_scatter":
            if x.device.type == "cpu":  # gloo's reduce_scatter takes twice as long as its all_reduce
                parts = self.begin("all_to_all", x, None)
                return lambda: sum_in_order(parts().unbind(0))
            out = x.new_empty(x.shape[1:])
            scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")
            return self._after(out, op, (scatter(out, x, group=group, async_op=True), x))
        if op == "all_to_all":
            out = torch.empty_like(x)
            return self._after(out, op, (dist.all_to_all_single(out, x, group=group, async_op=True), x))
        if op == "all_to_all_single":
            give, take = arg
            out = x.new_empty((sum(take), *x.shape[1:]))
            work = dist.all_to_all_single(out, x, list(take), list(give), group=group, async_op=True)
            return Received(Message(self, work, op, x, arg=arg), out)
        send = dict(arg).get(self.rank)
        receive = {target: source for source, target in arg}.get(self.rank)
        flat = x.reshape(-1)
        out = torch.zeros_like(flat)
        to_get, to_give = ([flat.numel() if r == peer else 0 for r in range(n)] for peer in (receive, send))
        given, got = flat if send is not None else flat[:0], out if receive is not None else out[:0]
        work = dist.all_to_all_single(got, given, to_get, to_give, group=group, async_op=True)
        return self._after(out.view(x.shape), op, (work, given))
