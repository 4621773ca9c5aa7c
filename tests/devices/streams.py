"""Streams, events and messages of a device, on CPU tensors: whatever a step does is given to the clocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Self
from unittest import mock

import optree
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fjoin.buckets import BucketQueue
from fjoin.step import _interleave, _stages as _bucket_stages
from fjoin.step._verdict import GradCheck
from fjoin.training._passes import GradOutput
from fjoin.transforms.base import devices
from tests.devices.clocks import HOST, Clocks
from tests.devices.echo import EchoAxis

MAIN, LEAF = "main", "leaf"


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self._streams, self.name = streams, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def wait_event(self, event: Event) -> None:
        self._streams.clocks.wait(self.name, event.state)

    def wait_stream(self, other: Stream) -> None:
        self._streams.clocks.wait(self.name, self._streams.clocks.state(other.name))

    def __enter__(self) -> Self:
        self._streams.names.append(self.name)
        return self

    def __exit__(self, *error: object) -> None:
        self._streams.names.pop()


class Event:
    """An event; the host knows that it has come once it has waited for it."""

    def __init__(self, clocks: Clocks, stream: str) -> None:
        self._clocks, self.state = clocks, clocks.state(stream)

    def query(self) -> bool:
        return False  # a device may always be later than it is

    def synchronize(self) -> None:
        self._clocks.wait(HOST, self.state)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]


class Streams(TorchDispatchMode):
    """Kernels run in the stream that is current when they are launched.

    Attributes:
        names: The streams of the with blocks that are open, the current one last.
        leaf_stream: The name of the stream in which the gradient of a leaf arrives, given its bucket and place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clocks, self.names, self._count = Clocks(), [MAIN], 0
        self.leaf_stream: Any = lambda bucket, leaf: LEAF

    @property
    def current(self) -> str:
        return self.names[-1]

    def fresh(self, kind: str) -> str:
        self._count += 1
        return f"{kind} {self._count}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        schema, name = func._schema, func.name()
        if name == "aten::_local_scalar_dense":
            # Of other memory only code for the CPU reads values, or code that may wait for the device.
            if args[0].untyped_storage()._cdata in self.clocks.pinned:
                self.clocks.host_reads(args[0])
            return out
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):  # a view
            return out
        reads, writes, own = [], [], set()
        for i, spec in enumerate(schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(spec.name)
            tensors = _tensors(value)
            own |= {id(x) for x in tensors}
            (writes if spec.alias_info is not None and spec.alias_info.is_write else reads).extend(tensors)
        made = [x for x in _tensors(out) if id(x) not in own]
        for x in made:
            self.clocks.allocated(x, self.current)
        if "empty" not in name:
            self.clocks.launch(self.current, name, reads, [*writes, *made])
        return out

    # -- what transforms/base/devices.py gives -------------------------------------------------------

    def new_stream(self, device: Any) -> Stream:
        return Stream(self, self.fresh("side"))

    def current_stream(self, device: Any) -> Stream:
        return Stream(self, self.current)

    def here(self, device: Any) -> Event:
        return Event(self.clocks, self.current)

    def to_host(self, x: Tensor) -> tuple[Tensor, Event]:
        host = x.clone()
        storage = host.untyped_storage()
        self.clocks.pinned[storage._cdata] = self.clocks.allocated(host, HOST).storage
        return host, self.here(x.device)

    def mesh_axis(self) -> EchoAxis:
        return StreamAxis(self)

    @contextlib.contextmanager
    def used(self) -> Iterator[Self]:
        """The steps of this thread are on this device."""
        init, arrived, backward, travel = (
            GradCheck.__init__, BucketQueue.arrived, GradOutput.backward, _interleave.travel,
        )  # fmt: skip
        leaves: set[str] = set()

        def on_device(check: Any, *args: Any, **kwargs: Any) -> None:
            init(check, *args, **kwargs)
            check.on_device = True

        def in_leaf_stream(queue: Any, bucket: int, i: int | None) -> None:
            out = queue.buckets[bucket]
            for j in range(len(out.leaves)) if i is None else (i,):
                name, grad = self.leaf_stream(bucket, j), out.leaves[j].grad
                leaves.add(name)
                self.clocks.wait(
                    name, self.clocks.state(self.current)
                )  # autograd waits for the stream of the gradient's kernel
                if grad is not None:
                    self.clocks.record(grad, name)  # as autograd does where it hands a gradient to another stream
            with Stream(self, self.leaf_stream(bucket, out.last if i is None else i)):
                arrived(queue, bucket, i)

        def and_joined(start: Any, loss: Tensor) -> None:
            backward(start, loss)
            for name in leaves:  # autograd does so at its end
                self.clocks.wait(self.current, self.clocks.state(name))

        yes, on = lambda device: True, mock.patch.object
        patches = [
            on(module, name, new)
            for modules, name, new in (
                ((devices,), "is_accelerator", yes),
                ((devices,), "is_host", lambda device: False),
                ((devices,), "here", self.here), ((devices,), "to_host", self.to_host),
                ((devices,), "new_stream", self.new_stream),
                ((devices,), "current_stream", self.current_stream),
                ((_bucket_stages,), "travel", lambda axes, layout, in_streams: in_streams and travel(axes, layout, True)),
                ((GradCheck,), "__init__", on_device), ((BucketQueue,), "arrived", in_leaf_stream),
                ((GradOutput,), "backward", and_joined),
            )
            for module in modules
        ]  # fmt: skip
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            stack.enter_context(_HostReads(self.clocks))
            stack.enter_context(self)
            yield self


class _HostReads(TorchFunctionMode):
    """Lists of values do not pass the dispatcher."""

    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self._clocks = clocks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("tolist", "numpy"):
            self._clocks.host_reads(args[0])
        return func(*args, **(kwargs or {}))


class StreamAxis(EchoAxis):
    """Each message has a stream of its own, which begins behind the current one; a wait makes the current one wait."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def _sends(self, op: str, reads: Sequence[Tensor], writes: Sequence[Tensor], result: Any = None) -> Any:
        streams, clocks = self._streams, self._streams.clocks
        name = streams.fresh("message")
        for x in writes:
            clocks.allocated(x, streams.current)
        clocks.wait(name, clocks.state(streams.current))
        clocks.launch(name, op, list(reads), list(writes))
        done, held = clocks.state(name), [reads, writes]  # torch holds them until the wait

        def wait() -> Any:
            clocks.wait(streams.current, done)
            held.clear()
            return result

        return wait
