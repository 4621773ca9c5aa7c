"""One fake device, on CPU tensors or on tensors without data, with what is unlike the CPU as an option.

LateDevice      events come late, and an abort cuts off whatever the device has not reached
OrderedDevice   kernels run in streams; accesses to memory that nothing orders are reported
CountingDevice  kernels and bytes are counted
"""

from __future__ import annotations

import collections
import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Self
from unittest import mock

import optree
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import fjoin
from fjoin import transforms as tx
from fjoin.buckets import BucketQueue
from fjoin.groups import Communicator, GroupAxis, _group_mesh
from fjoin.groups._message import PendingMessage
from fjoin.records import DeviceReads
from fjoin.step import _interleave, _stages
from fjoin.step._verdict import GradCheck
from fjoin.training._passes import GradOutput, Passes
from fjoin.training._run import Run
from fjoin.transforms.axes import Axis
from fjoin.transforms.base import devices

HOST, MAIN, LEAF = "host", "main", "leaf"
Make = Callable[[], tx.Pipeline]


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]


def is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


@contextlib.contextmanager
def quietly(x: Tensor) -> Iterator[None]:
    """Messages of torch write into memory without a new version."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(x):
        yield


# -- two ranks in one process ------------------------------------------------------------------------------------------


class EchoAxis(Axis):
    """An axis of two ranks, of which the other one sends what this one sends.

    Args:
        message: Told the operation of each message, what it reads and writes; what it returns is called to wait.
    """

    size = 2

    def __init__(self, message: Callable[..., Callable[[], object]] = lambda op, reads, writes: lambda: None) -> None:
        self._message = message

    def index(self) -> Tensor:
        return torch.tensor(0)

    def begin(self, op: str, x: Tensor, arg: Any) -> Callable[[], Tensor]:
        x = x.contiguous()
        with _disable_current_modes():
            out = self._value(op, x.detach(), arg)
        arrive = self._message(op, [x], [out])

        def wait() -> Tensor:
            arrive()
            return out

        return wait

    def _value(self, op: str, x: Tensor, arg: Any) -> Tensor:
        if op == "all_gather":
            return torch.stack([x, x])
        if op == "psum_scatter":
            return x[0] * 2
        if op == "all_to_all":
            return torch.stack([x[0], x[0]])
        if op == "all_to_all_single":
            rows = x[: arg[1][0]] if len(x) >= arg[1][0] else x.new_zeros(arg[1][0], *x.shape[1:])
            others = x.new_zeros(arg[1][1], *x.shape[1:])
            others[: len(rows)] = rows[: len(others)]
            return torch.cat([rows, others])
        return x * 2 if op == "psum" else x.clone()

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        return self.begin(op, x, arg)()

    def run_(self, x: Tensor) -> Tensor:
        self.begin_reduce(x).wait()
        return x

    def begin_reduce(self, buffer: Tensor) -> Any:
        with _disable_current_modes(), quietly(buffer):
            buffer.mul_(2)
        return SimpleNamespace(wait=self._message("psum", [], [buffer]))

    def begin_gather(self, flat: Tensor, sizes: Sequence[int], rank: int) -> Any:
        """The other rank's piece stays as it is."""
        return SimpleNamespace(wait=self._message("gather", [flat[: sizes[0]]], [flat[sizes[0] :]]))


class EchoMesh(Communicator):
    def __init__(self, axis: EchoAxis | None = None) -> None:
        super().__init__({"data": 2}, {"data": axis or EchoAxis()}, 0)

    def _exchange(self, occasion: str, value: Any, combine: Callable[[list[Any]], Any], axes: tuple[str, ...]) -> Any:
        return combine([value, value])


# -- what all have -----------------------------------------------------------------------------------------------------


class Stream(NamedTuple):
    device: Device
    name: str

    def wait_event(self, event: Event) -> None:
        self.device.wait(self.name, event.seen)

    def wait_stream(self, other: Stream) -> None:
        self.device.wait(self.name, self.device.seen[other.name])

    def __enter__(self) -> None:
        self.device.names.append(self.name)

    def __exit__(self, *error: object) -> None:
        self.device.names.pop()


class Event:
    """A place in the current stream."""

    def __init__(self, device: Device) -> None:
        self._device, self.seen = device, device.seen[device.current].copy()
        device.given += 1
        self.place = device.given

    def query(self) -> bool:
        return self._device.has_reached(self.place)

    def synchronize(self) -> None:
        self._device.reach(self)


class Device(TorchDispatchMode):
    """A device with streams and events, in the place of the CPU.

    Attributes:
        seen: Of each stream, and of the host: the last kernel of each stream that it is ordered behind.
        names: The streams of the with blocks that are open, the current one last.
        given: The number of events.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = collections.defaultdict[str, dict[str, int]](dict)
        self.names, self.given, self._count = [MAIN], 0, 0

    @property
    def current(self) -> str:
        return self.names[-1]

    def fresh(self, kind: str) -> str:
        self._count += 1
        return f"{kind} {self._count}"

    def wait(self, stream: str, seen: dict[str, int]) -> None:
        """What a stream or the host does from now on is ordered behind what an event, or another stream, has seen."""
        own = self.seen[stream]
        for other, kernel in list(seen.items()):
            own[other] = max(own.get(other, 0), kernel)

    def has_reached(self, place: int) -> bool:
        return False  # a device may always be later than it is

    def reach(self, event: Event) -> None:
        self.wait(HOST, event.seen)

    def to_host(self, x: Tensor) -> tuple[Tensor, Event]:
        return x.clone(), Event(self)

    @contextlib.contextmanager
    def used(self, *patches: tuple[Any, str, Any]) -> Iterator[Self]:
        """The steps of this process are on this device."""
        init, travel = GradCheck.__init__, _interleave.travel

        def on_device(check: Any, *args: Any, **kwargs: Any) -> None:
            init(check, *args, **kwargs)
            check.on_device = True

        everywhere: list[tuple[Any, str, Any]] = [
            (devices, "is_accelerator", lambda device: device.type == "cpu"),
            (devices, "is_host", lambda device: False),
            (devices, "here", lambda device: Event(self)),
            (devices, "to_host", self.to_host),
            (devices, "new_stream", lambda device: Stream(self, self.fresh("side"))),
            (devices, "current_stream", lambda device: Stream(self, self.current)),
            (_stages, "travel", lambda axes, layout, in_streams: in_streams and travel(axes, layout, True)),
            (GradCheck, "__init__", on_device),
        ]
        with contextlib.ExitStack() as stack:
            for owner, name, new in [*everywhere, *patches]:
                stack.enter_context(mock.patch.object(owner, name, new))
            yield self


# -- late events -------------------------------------------------------------------------------------------------------

# How long a message may take to arrive after its sender has gone.
GRACE_S = 0.2


class LateDevice(Device):
    """The device of one rank, which is behind its host. Kernels run at once; what is late are the events.

    Args:
        gone: Whether the other rank has stopped sending.

    Attributes:
        done: The event that it has reached, at most `given`. Each question lets it go on by one.
        stalled: Whether it waits for a message that never comes.
    """

    def __init__(self, gone: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._gone, self.done, self.stalled = gone, 0, False
        self._written: list[tuple[int, list[Tensor]]] = []  # by steps, with the places of their ends
        self._under_way: dict[Any, Tensor] = {}  # gathers into parameters that no stream waits for yet

    def has_reached(self, place: int) -> bool:
        if not self.stalled:
            self.done = min(self.done + 1, self.given)
        return self.done >= place

    def reach(self, event: Event) -> None:
        while not event.query():
            pass

    def cut(self) -> None:
        """Messages are aborted: the kernels behind them run on with what is there."""
        lost = [x for place, written in self._written if place > self.done for x in written]
        for x in [*lost, *self._under_way.values()]:
            if x.is_floating_point():
                x.detach().copy_(torch.randn(x.shape))
        self.done, self.stalled, self._written, self._under_way = self.given, False, [], {}

    def _arrives(self, work: Any) -> bool:
        """Wait as a stream does: the host goes on, also where the message never arrives."""
        until = None
        while not work.is_completed():
            if until is None and self._gone():
                until = time.monotonic() + (0.0 if self.stalled else GRACE_S)
            if until is not None and time.monotonic() > until:
                return False
            time.sleep(1e-4)
        try:
            work.wait()
        except RuntimeError:  # the connection was cut
            return False
        return True

    @contextlib.contextmanager
    def used(self, *patches: tuple[Any, str, Any]) -> Iterator[Self]:
        make: Any = PendingMessage.__init__
        wait, ends_here, destroy = PendingMessage.wait, Run.ends_here, _group_mesh.destroy
        begin_gather = GroupAxis.begin_gather

        def wait_late(message: Any) -> None:
            work, message._work = message._work, None
            if (flat := self._under_way.pop(message, None)) is not None:
                self._written.append((Event(self).place, [flat]))
            if work is not None and not self._arrives(work):
                self.stalled = True
                # Sums that are wrong and look right: as if the other rank had sent what this one has.
                message._after = lambda: message.sent.mul_(2) if message.sent.is_floating_point() else None
            wait(message)

        def made(message: Any, axis: Any, work: Any, op: str, sent: Tensor, *args: Any, **kwargs: Any) -> None:
            message.sent = sent
            make(message, axis, work, op, sent, *args, **kwargs)

        def gathers(axis: Any, flat: Tensor, *args: Any) -> Any:
            work = begin_gather(axis, flat, *args)
            self._under_way[work] = flat
            return work

        def ends(run: Any, body: Any) -> None:
            ends_here(run, body)
            written = tensors([body.storage.flats, body.storage.slots, body.hook])
            self._written.append((body.ended.event.place if body.ended is not None else 0, written))

        def cut(axes: Any, failure: str, process: int) -> None:
            if failure:
                self.cut()
            destroy(axes, failure, process)

        late: list[tuple[Any, str, Any]] = [
            (PendingMessage, "__init__", made), (PendingMessage, "wait", wait_late), (Run, "ends_here", ends),
            (_group_mesh, "destroy", cut), (_group_mesh, "_SETTLE_S", 0.3), (GroupAxis, "begin_gather", gathers),
        ]  # fmt: skip
        with super().used(*late, *patches):
            yield self


# -- the order of accesses to memory -----------------------------------------------------------------------------------


class Access(NamedTuple):
    """Of the bytes from `low` to `high`, by the kernel number `time` of a stream."""

    low: int
    high: int
    stream: str
    time: int
    writes: bool
    op: str


class Block:
    """Memory that is in use. When it is free, the allocator gives it to the next kernel of its stream."""

    def __init__(self, x: Tensor, stream: str) -> None:
        self.storage, self.stream, self.accesses = StorageWeakRef(x.untyped_storage()), stream, list[Access]()
        self.recorded: set[str] = set()  # streams for which the allocator waits before it gives the memory away
        self.pinned = False  # memory of the host, to which a device writes


def extent(x: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the byte behind its last."""
    if not x.numel():
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.storage_offset() * x.element_size(), (x.storage_offset() + last + 1) * x.element_size()


class OrderedDevice(Device):
    """Kernels run in the stream that is current at their launch, each message in one of its own. Clocks order them.

    Attributes:
        reports: Accesses of two streams to the same memory that nothing orders, one of which writes.
        leaf_stream: The name of the stream in which the gradient of a leaf arrives, given its bucket and place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[str] = []
        self.leaf_stream: Callable[[int, int], str] = lambda bucket, leaf: LEAF
        self._blocks: dict[int, Block] = {}
        self._free: list[Block] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.name() == "aten::_local_scalar_dense":
            # Of other memory only code for the CPU reads values, or code that may wait for the device.
            if self._block(args[0], HOST).pinned:
                self.host_reads(args[0])
        elif not is_view(func):
            reads, writes = list[Tensor](), list[Tensor]()
            for i, spec in enumerate(func._schema.arguments):
                given = tensors(args[i] if i < len(args) else kwargs.get(spec.name))
                (writes if spec.alias_info is not None and spec.alias_info.is_write else reads).extend(given)
            known = {id(x) for x in [*reads, *writes]}
            made = [x for x in tensors(out) if id(x) not in known]
            for x in made:
                self._block(x, self.current)
            if "empty" not in func.name():
                self._launch(self.current, func.name(), reads, [*writes, *made])
        return out

    def _launch(self, stream: str, op: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """A kernel or a message in a stream."""
        self.wait(stream, self.seen[HOST])
        self.seen[stream][stream] = self.seen[stream].get(stream, 0) + 1
        self._collect()
        for block in [block for block in self._free if block.stream == stream]:
            self._free.remove(block)
            for old in block.accesses:
                if old.stream not in block.recorded and not self._ordered(old, stream):
                    self._report("free memory is reused by", op, stream, old)
        for xs, writing in ((reads, False), (writes, True)):
            for x in xs:
                self._access(x, Access(*extent(x), stream, self.seen[stream][stream], writing, op))

    def _access(self, x: Tensor, new: Access) -> None:
        block, kept = self._block(x, new.stream), list[Access]()
        for old in block.accesses:
            ordered = self._ordered(old, new.stream)
            if not ordered and old.low < new.high and new.low < old.high and (old.writes or new.writes):
                self._report("not ordered:", new.op, new.stream, old)
            replaced = ordered and new.low <= old.low and old.high <= new.high
            if not replaced or not (new.writes or old.stream == new.stream and not old.writes):
                kept.append(old)
        block.accesses = [*kept, new]

    def _ordered(self, access: Access, stream: str) -> bool:
        return access.stream == stream or self.seen[stream].get(access.stream, 0) >= access.time

    def _block(self, x: Tensor, stream: str) -> Block:
        """The block of a tensor, which is new where it was not known."""
        key = x.untyped_storage()._cdata
        if key not in self._blocks or self._blocks[key].storage.expired():
            self._collect()
            self._blocks[key] = Block(x, stream)
        return self._blocks[key]

    def _collect(self) -> None:
        for key, block in list(self._blocks.items()):
            if block.storage.expired():
                self._free.append(self._blocks.pop(key))

    def _report(self, how: str, op: str, stream: str, old: Access) -> None:
        did = "write to" if old.writes else "read of"
        self.reports.append(f"{how} {op} in {stream!r}, after the {did} it by {old.op} in {old.stream!r}")

    def host_reads(self, x: Tensor) -> None:
        """The host reads memory to which a device may still be writing."""
        for old in self._block(x, HOST).accesses:
            if old.writes and not self._ordered(old, HOST):
                self._report("not ordered:", "a read", HOST, old)

    def to_host(self, x: Tensor) -> tuple[Tensor, Event]:
        host = x.clone()
        self._block(host, HOST).pinned = True
        return host, Event(self)

    def message(self, op: str, reads: list[Tensor], writes: list[Tensor]) -> Callable[[], None]:
        """It begins behind the current stream; its wait makes the current one wait."""
        name = self.fresh("message")
        for x in writes:
            self._block(x, self.current)
        self.wait(name, self.seen[self.current])
        self._launch(name, op, reads, writes)
        done, held = self.seen[name].copy(), [*reads, *writes]  # torch holds them until the wait

        def wait() -> None:
            self.wait(self.current, done)
            held.clear()

        return wait

    @contextlib.contextmanager
    def used(self, *patches: tuple[Any, str, Any]) -> Iterator[Self]:
        arrived, backward, leaves = BucketQueue.arrived, GradOutput.backward, set[str]()

        def in_leaf_stream(queue: Any, bucket: int, i: int | None) -> None:
            out = queue.buckets[bucket]
            for j in range(len(out.leaves)) if i is None else (i,):
                name, grad = self.leaf_stream(bucket, j), out.leaves[j].grad
                leaves.add(name)
                self.wait(name, self.seen[self.current])  # autograd waits for the stream of the gradient's kernel
                if grad is not None:
                    self._block(grad, name).recorded.add(name)  # as autograd does for a gradient of another stream
            with Stream(self, self.leaf_stream(bucket, out.last if i is None else i)):
                arrived(queue, bucket, i)

        def and_joined(start: Any, loss: Tensor) -> None:
            backward(start, loss)
            for name in leaves:  # autograd does so at its end
                self.wait(self.current, self.seen[name])

        ours = [(BucketQueue, "arrived", in_leaf_stream), (GradOutput, "backward", and_joined)]
        with super().used(*ours, *patches), HostReads(self), self:
            yield self


class HostReads(TorchFunctionMode):
    """Lists of values do not pass the dispatcher."""

    def __init__(self, device: OrderedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("tolist", "numpy"):
            self._device.host_reads(args[0])
        return func(*args, **(kwargs or {}))


# -- counts ------------------------------------------------------------------------------------------------------------


class Kernel(NamedTuple):
    op: str
    shapes: tuple[Any, ...]
    numbers: tuple[Any, ...]


class CountingDevice(TorchDispatchMode):
    """Counts the kernels of this thread on tensors without data, and the bytes of all tensors until they are freed.

    Attributes:
        kernels: Without views, and without those in `quiet`, of the model itself.
        now: Bytes that are alive.
        start: Bytes that were alive at the last `reset`.
        peak: The most of them since then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self._muted = list[Kernel](), False
        self.start = self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def reset(self) -> None:
        self.kernels, self.start, self.peak = [], self.now, self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        leaves: list[Any] = optree.tree_leaves((args, kwargs))  # type: ignore[arg-type]
        given = tensors(leaves)
        if any(x.is_meta for x in [*given, *tensors(out)]) and "empty" not in func.name() and not is_view(func):
            numbers = tuple(x for x in leaves if isinstance(x, (bool, int, float)))
            # A 0-d tensor of the host is a number to a kernel.
            numbers += tuple(x.item() for x in given if not x.is_meta and not x.dim())
            self._launched(func.name(), tuple(tuple(x.shape) if x.is_meta else "host" for x in given), numbers)
        for x in tensors(out):
            self._made(x.untyped_storage())
        return out

    def _launched(self, op: str, shapes: tuple[Any, ...], numbers: tuple[Any, ...] = ()) -> None:
        if not self._muted:
            self.kernels.append(Kernel(op, shapes, numbers))

    def message(self, op: str, reads: list[Tensor], writes: list[Tensor]) -> Callable[[], None]:
        """Each message is a launch too, and none is made on the host."""
        assert all(x.is_meta for x in [*reads, *writes])
        self._launched(f"message {op}", tuple(tuple(x.shape) for x in [*reads, *writes]))
        return lambda: None

    def _made(self, memory: Any) -> None:
        key, size = memory._cdata, memory.nbytes()
        if key in self._known or not size:
            return

        def freed() -> None:
            self.now -= size
            del self._known[key]

        # The Python object of a storage lives as long as the storage itself.
        self._known[key] = weakref.finalize(memory, freed)
        self._known[key].atexit = False
        self.now += size
        self.peak = max(self.peak, self.now)

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        return mock.patch.object(self, "_muted", True)


class Loss(torch.autograd.Function):
    """A loss whose gradients are made without kernels that count."""

    @staticmethod
    def forward(ctx: Any, device: CountingDevice, *params: Tensor) -> Tensor:
        ctx.counting = device
        ctx.save_for_backward(*params)
        return torch.empty((), device=params[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with ctx.counting.quiet():
            return None, *(torch.empty_like(p) for p in ctx.saved_tensors)


def counted(
    make: Make, shapes: dict[str, tuple[int, ...]], weights: Sequence[float] = (1.0, 1.0, 1.0), **options: Any
) -> tuple[list[list[Kernel]], CountingDevice]:
    """The kernels of each step of one of two ranks, outside the passes of the model, and the bytes of the last step.

    Tensors without data stand for those of a device. The gradients of the loss are of the parameters' shapes.
    """
    device, out, run = CountingDevice(), list[list[Kernel]](), Passes._run

    def forward(passes: Any, *args: Any) -> Any:
        with device.quiet():
            return run(passes, *args)

    on = mock.patch.object
    with on(DeviceReads, "add", lambda *args: None), on(Passes, "_run", forward), kernels_without_meta(), device:
        params = {path: torch.empty(shape, device="meta") for path, shape in shapes.items()}
        step = fjoin.train_step(
            lambda p, batch: Loss.apply(device, *p.values()), make(), mesh=EchoMesh(EchoAxis(device.message)),
            weight=lambda w: w, **options,
        )  # fmt: skip
        state = step.init(params, sync=None)
        del params
        for weight in weights:
            device.reset()
            state, _ = step(state, weight)
            out.append(device.kernels)
    return out, device


@contextlib.contextmanager
def kernels_without_meta() -> Iterator[None]:
    """Kernels of torch's that it has only for tensors with data."""
    library = torch.library.Library("aten", "IMPL")
    for name in ("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adam_.tensor_lr", "_fused_adamw_.tensor_lr"):
        library.impl(name, lambda *args, **kwargs: None, "Meta")
    try:
        yield
    finally:
        library._destroy()
