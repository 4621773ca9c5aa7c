"""A backend of torch.distributed, "fjoin": process groups of one host, whose CPU tensors travel through shared memory."""

# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import datetime
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._channel import Fold, HostChannel, combine, copy_all
from ._exchange import Exchange
from ._flat import cat_flat, fill, flat_of, give_back, row_sizes
from ._hosts import Doorway
from ._links import HostLinks
from ._work import SharedWork, Started, Waiter

_FOLDS: dict[Any, Fold] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
_COLLECTIVES, _UP, _DOWN = range(3)  # channels; from lower to higher ranks, and back
Values = list[Tensor]


class HostGroup(dist.ProcessGroup):
    """A process group whose ranks are on one host.

    Its collectives are those of gloo, in rank order, so that all ranks have the same bits on every run. Only CPU
    tensors, and only on Linux.

    Raises:
        ValueError: the ranks are on several hosts, or on one that is not Linux.
        RuntimeError: a tensor on another device, or an operation that the backend lacks.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg,arg-type]
        self._name = self._description = ""
        self._timeout_s = timeout.total_seconds()
        self._links = links = _connect(store, rank, size, self._timeout_s)
        self._channels = [HostChannel(links, number, range(size), rank) for number in range(3)]
        self._passed: dict[tuple[int, int, int], int] = {}  # channel, peer and tag -> messages so far
        self._waiter = Waiter()
        self._ranks, self._me = size, rank
        weakref.finalize(self, _close, links, self._waiter).atexit = False

    def getBackendName(self) -> str:
        return "fjoin"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def _get_sequence_number_for_group(self) -> int:
        return self._links.count

    def _set_sequence_number_for_group(self) -> None:
        pass

    def shutdown(self) -> None:
        _close(self._links, self._waiter)

    abort = shutdown

    # -- sums --------------------------------------------------------------------------------------

    def allreduce(self, tensors: Values, opts: Any = None) -> SharedWork:
        op = _op(opts)
        return self._all([self._reduce_one(x, op) for x in tensors], tensors)

    allreduce_coalesced = allreduce

    def _reduce_one(self, x: Tensor, op: Any) -> Started:
        flat, fold = flat_of(x), _FOLDS[op]

        def done() -> None:
            if op == dist.ReduceOp.AVG:
                flat.div_(self._ranks)
            give_back(flat, x)

        return self._channels[0].reduce_(f"all_reduce {op}", flat, fold), done

    def reduce(self, tensors: Values, opts: Any) -> SharedWork:
        op, root = _op(opts), opts.rootRank
        return self._all([self._reduce_to(x, x, root, op) for x in tensors], tensors)

    def _reduce_to(self, x: Tensor, out: Tensor, root: int, op: Any) -> Started:
        """Combine all ranks' `x` on one rank."""
        flat = flat_of(x)
        n, total = len(flat), torch.empty_like(flat) if self._me == root else flat

        def take(parts: Values) -> None:
            if self._me == root:
                combine(parts, [total], _FOLDS[op])

        ranges = [(0, n if rank == root else 0) for rank in range(self._ranks)]
        work = self._channels[0].exchange(f"reduce {op} {root}", flat, ranges, take, settles=True, size=n)
        average = op == dist.ReduceOp.AVG
        return work, lambda: fill(out, total / self._ranks if average else total) if self._me == root else None

    def reduce_scatter(self, outputs: Values, inputs: list[Values], opts: Any = None) -> SharedWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._all([self._scatter_sum(out, cat_flat(parts), _op(opts)) for out, parts in pairs], outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> SharedWork:
        return self._all([self._scatter_sum(output, flat_of(input), _op(opts))], [output])

    def reduce_scatter_single_coalesced(self, outputs: Values, inputs: Values, opts: Any = None) -> SharedWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._all([self._scatter_sum(out, flat_of(x), _op(opts)) for out, x in pairs], outputs)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scatter_sum(self, out: Tensor, flat: Tensor, op: Any) -> Started:
        row, total = len(flat) // self._ranks, flat_of(out)
        if row * self._ranks != len(flat) or row != len(total):
            raise ValueError(
                f"reduce_scatter among {self._ranks} ranks got {len(flat)} elements for an output of {len(total)}"
            )
        ranges = [(i * row, (i + 1) * row) for i in range(self._ranks)]
        room = torch.empty_like(total)  # the output may be a part of the input
        work = self._channels[0].exchange(
            f"reduce_scatter {op}", flat, ranges, lambda parts: combine(parts, [room], _FOLDS[op]), settles=True, size=row
        )  # fmt: skip
        average = op == dist.ReduceOp.AVG
        return work, lambda: fill(out, room / self._ranks if average else room)

    # -- copies ------------------------------------------------------------------------------------

    def broadcast(self, tensors: Values, opts: Any) -> SharedWork:
        return self._all([self._broadcast_one(x, opts.rootRank) for x in tensors], tensors)

    def _broadcast_one(self, x: Tensor, root: int) -> Started:
        flat = flat_of(x)
        n = len(flat)
        ranges = [(0, n if self._me == root else 0)] * self._ranks

        def take(parts: Values) -> None:
            if self._me != root:
                flat.copy_(parts[root])

        work = self._channels[0].exchange(f"broadcast {root}", flat, ranges, take, settles=True, size=n)
        return work, lambda: give_back(flat, x)

    def allgather(self, outputs: list[Values], inputs: Values, opts: Any = None) -> SharedWork:
        started = [self._gather_one(list(outs), x) for outs, x in zip(outputs, inputs, strict=True)]
        return self._all(started, outputs)

    def allgather_coalesced(self, outputs: list[Values], inputs: Values, opts: Any = None) -> SharedWork:
        turned = list(zip(*outputs, strict=True))  # rank by rank here
        return self._all([self._gather_one(list(o), x) for o, x in zip(turned, inputs, strict=True)], outputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> SharedWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Values, inputs: Values, opts: Any = None) -> SharedWork:
        started = []
        for out, x in zip(outputs, inputs, strict=True):
            flat = flat_of(out)
            work, _ = self._gather_one(list(flat.chunk(self._ranks)) or [flat] * self._ranks, x)
            started.append((work, functools.partial(give_back, flat, out)))
        return self._all(started, outputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_one(self, outs: Values, x: Tensor, root: int | None = None) -> Started:
        """Give all ranks' `x` to all ranks, or to one."""
        flat, receives = flat_of(x), root in (None, self._me)
        n = len(flat)
        if receives and [out.numel() for out in outs] != [n] * self._ranks:
            raise ValueError(
                f"a gather among {self._ranks} ranks of {n} elements got outputs of {[out.numel() for out in outs]}"
            )

        def take(parts: Values) -> None:
            for out, part in zip(outs, parts, strict=True) if receives else ():
                fill(out, part)

        ranges = [(0, n if root in (None, rank) else 0) for rank in range(self._ranks)]
        return self._channels[0].exchange(f"gather {root}", flat, ranges, take, settles=True, size=n), _nothing

    def gather(self, outputs: list[Values], inputs: Values, opts: Any) -> SharedWork:
        outs = outputs[0] if outputs else []
        return self._all([self._gather_one(list(outs), inputs[0], opts.rootRank)], outputs)

    def scatter(self, outputs: Values, inputs: list[Values], opts: Any) -> SharedWork:
        out, root = outputs[0], opts.rootRank
        n = out.numel()
        source = cat_flat(inputs[0]) if self._me == root else out.new_empty(0)
        if self._me == root and len(source) != n * self._ranks:
            raise ValueError(f"a scatter to {self._ranks} ranks of {n} elements each got {len(source)}")
        ranges = [(i * n, (i + 1) * n) if self._me == root else (0, 0) for i in range(self._ranks)]
        work = self._channels[0].exchange(
            f"scatter {root}", source, ranges, lambda parts: fill(out, parts[root]), settles=True, size=n
        )
        return self._all([(work, _nothing)], outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> SharedWork:
        source, flat = flat_of(input), flat_of(output)
        give, take = row_sizes(input, input_sizes, self._ranks), row_sizes(output, output_sizes, self._ranks)
        return self._all([self._exchange_parts(source, give, flat, take, lambda: give_back(flat, output))], [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Values, inputs: Values, opts: Any = None) -> SharedWork:
        give, take = [x.numel() for x in inputs], [x.numel() for x in outputs]
        flat = outputs[0].new_empty(sum(take))

        def done() -> None:
            for out, part in zip(outputs, flat.split(take), strict=True):
                fill(out, part)

        return self._all([self._exchange_parts(cat_flat(inputs), give, flat, take, done)], outputs)

    def _exchange_parts(
        self, source: Tensor, give: list[int], flat: Tensor, take: list[int], done: Callable[[], object]
    ) -> Started:
        got = list[int]()

        def taken(parts: Values) -> None:
            got.extend(len(part) for part in parts)
            if got == take:
                copy_all(flat, parts)

        def ended() -> None:
            if got != take:
                raise ValueError(f"all_to_all: the ranks gave {got} elements where {take} were expected")
            done()

        ranges = [(sum(give[:i]), sum(give[: i + 1])) for i in range(self._ranks)]
        return self._channels[0].exchange("all_to_all", source, ranges, taken, settles=True), ended

    def barrier(self, opts: Any = None) -> SharedWork:
        empty = torch.empty(0)
        work = self._channels[0].exchange("barrier", empty, [(0, 0)] * self._ranks, lambda parts: None)
        return self._all([(work, _nothing)], [])

    # -- from rank to rank -------------------------------------------------------------------------

    def send(self, tensors: Values, rank: int, tag: int) -> SharedWork:
        (x,) = tensors
        flat = flat_of(x)
        return self._all([(self._pass_on(flat, self._me, rank, tag, lambda part: None), _nothing)], tensors)

    def recv(self, tensors: Values, rank: int, tag: int) -> SharedWork:
        (x,) = tensors
        work = self._pass_on(x.new_empty(0), rank, self._me, tag, lambda part: fill(x, part), x.numel())
        return self._all([(work, _nothing)], tensors)

    def recv_anysource(self, tensors: Values, tag: int) -> SharedWork:
        """Receive from the first rank that sends with this tag; blocks until there is one."""
        peers, found = self._links.peers, list[int]()

        def some() -> bool:
            found[:] = [r for r in peers if self._key(r, self._me, tag) in peers[r].parts]
            return bool(found)

        self._links.wait(some, list, lambda: None)
        work = self.recv(tensors, found[0], tag)
        work.source = found[0]
        return work

    def _key(self, source: int, target: int, tag: int) -> tuple[int, int]:
        """The channel and the number of the next message from one rank to another."""
        number = _UP if source < target else _DOWN
        peer = target if source == self._me else source
        return number, (tag << 32) + self._passed.get((number, peer, tag), 0)

    def _pass_on(
        self, flat: Tensor, source: int, target: int, tag: int, take: Callable[[Tensor], object], size: int | None = None
    ) -> Exchange:  # fmt: skip
        if source == target or not 0 <= min(source, target) <= max(source, target) < self._ranks:
            raise ValueError(f"rank {self._me} of {self._ranks} cannot send from rank {source} to rank {target}")
        number, message = self._key(source, target, tag)
        peer = target if source == self._me else source
        self._passed[number, peer, tag] = (message & (2**32 - 1)) + 1
        pair = HostChannel(self._links, number, sorted((source, target)), int(self._me > peer))
        at = int(source > target)
        n = len(flat) if source == self._me else size

        def taken(parts: Values) -> None:
            if source != self._me:
                take(parts[at])

        ranges = [(0, len(flat)), (0, len(flat))] if source == self._me else [(0, 0), (0, 0)]
        return pair.exchange("send", flat, ranges, taken, settles=True, size=n, message=message)

    def _all(self, started: Sequence[Started], result: Any) -> SharedWork:
        return SharedWork(started, result, self._waiter)


def _close(links: HostLinks, waiter: Waiter) -> None:
    links.close()
    waiter.stop()


def _connect(store: Any, rank: int, size: int, timeout_s: float) -> HostLinks:
    with Doorway() as doorway:
        store.set(f"fjoin/{rank}", f"{doorway.host}\n{doorway.address}")
        found = [store.get(f"fjoin/{other}").decode().split("\n") for other in range(size)]
        if len({host for host, _ in found}) > 1:
            raise ValueError("the backend 'fjoin' needs all ranks of a group on one host, with Linux; use gloo")
        addresses = {other: address for other, (_, address) in enumerate(found) if other != rank}
        return HostLinks(doorway.connect(rank, addresses, timeout_s), timeout_s)


def _op(opts: Any) -> Any:
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for known in _FOLDS:
        if op == known:
            return known
    raise ValueError(f"the backend 'fjoin' has no reduction {op}; it has {', '.join(str(k) for k in _FOLDS)}")


def _nothing() -> None:
    return None


if "FJOIN" not in dist.Backend._plugins:
    dist.Backend.register_backend("fjoin", HostGroup, devices=["cpu"])
