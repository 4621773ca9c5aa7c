"""A device that is behind its host, on CPU tensors: an abort cuts off whatever it has not reached.

Kernels run at once, as the host launches them. What is late are the events, so that fjoin reads, waits and
marks states as it does beside a real device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import optree
import torch
from torch import Tensor

from fjoin.groups import _axis, _group_mesh
from fjoin.groups._message import PendingMessage
from fjoin.step._verdict import GradCheck
from fjoin.training._run import Run
from fjoin.transforms.base import devices

# How long a message may take to arrive after its sender has gone.
GRACE_S = 0.2


class Event:
    """A place in the device's stream. Each question lets the device go on by one place."""

    def __init__(self, device: Device, place: int) -> None:
        self._device, self.place = device, place

    def query(self) -> bool:
        self._device.go_on()
        return self._device.done >= self.place

    def synchronize(self) -> None:
        while not self.query():
            pass


class Stream(contextlib.nullcontext):  # type: ignore[type-arg]
    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


class Device:
    """The device of one rank.

    Args:
        gone: Whether the other rank has stopped sending.

    Attributes:
        done: The place that it has reached, at most `given`.
        stalled: Whether it waits for a message that never comes.
    """

    def __init__(self, gone: Callable[[], bool]) -> None:
        self._gone, self.given, self.done, self.stalled = gone, 0, 0, False
        self._written: list[tuple[int, list[Tensor]]] = []  # by steps, with the places of their ends
        self._under_way: dict[Any, Tensor] = {}  # gathers into parameters that no stream waits for yet

    def here(self, device: Any = None) -> Event:
        self.given += 1
        return Event(self, self.given)

    def to_host(self, x: Tensor) -> tuple[Tensor, Event]:
        return x.clone(), self.here()

    def go_on(self) -> None:
        if not self.stalled:
            self.done = min(self.done + 1, self.given)

    def step_ends(self, place: int, tensors: list[Tensor]) -> None:
        self._written.append((place, tensors))

    def gather(self, work: Any, flat: Tensor) -> None:
        self._under_way[work] = flat

    def cut(self) -> None:
        """Messages are aborted: the kernels behind them run on with what is there."""
        lost = [x for place, tensors in self._written if place > self.done for x in tensors]
        for x in [*lost, *self._under_way.values()]:
            if x.is_floating_point():
                x.detach().copy_(torch.randn(x.shape))
        self.done, self.stalled, self._written, self._under_way = self.given, False, [], {}

    def arrives(self, work: Any) -> bool:
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
    def used(self) -> Iterator[None]:
        """The steps of this process are on this device."""
        on = mock.patch.object
        found: Any = (
            GradCheck.__init__,
            PendingMessage.wait,
            Run.ends_here,
            _group_mesh.destroy,
            _axis.GroupAxis.begin_gather,
        )
        init, wait, ends_here, destroy, begin_gather = found

        def on_device(check: Any, *args: Any, **kwargs: Any) -> None:
            init(check, *args, **kwargs)
            check.on_device = True

        def wait_late(message: Any) -> None:
            work, message._work = message._work, None
            if (flat := self._under_way.pop(message, None)) is not None:
                self.step_ends(self.here().place, [flat])
            if work is not None and not self.arrives(work):
                self.stalled = True
                # Sums that are wrong and look right: as if the other rank had sent what this one has.
                message._after = lambda: message.sent.mul_(2) if message.sent.is_floating_point() else None
            wait(message)

        def made(message: Any, axis: Any, work: Any, op: str, sent: Tensor, *args: Any, **kwargs: Any) -> None:
            message.sent = sent
            make(message, axis, work, op, sent, *args, **kwargs)

        def gathers(axis: Any, flat: Tensor, *args: Any) -> Any:
            work = begin_gather(axis, flat, *args)
            self.gather(work, flat)
            return work

        def ends(run: Any, body: Any) -> None:
            ends_here(run, body)
            leaves = optree.tree_leaves([body.storage.flats, body.storage.slots, body.hook], none_is_leaf=False)  # type: ignore[arg-type]
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            self.step_ends(body.ended.event.place if body.ended is not None else 0, tensors)

        def cut(axes: Any, failure: str, process: int) -> None:
            if failure:
                self.cut()
            destroy(axes, failure, process)

        make: Any = PendingMessage.__init__
        is_one = lambda device: device.type == "cpu"  # noqa: E731
        with contextlib.ExitStack() as stack:
            for patch in (
                on(GradCheck, "__init__", on_device), on(PendingMessage, "__init__", made), on(PendingMessage, "wait", wait_late),
                on(Run, "ends_here", ends), on(_group_mesh, "destroy", cut), on(_group_mesh, "_SETTLE_S", 0.3),
                on(_axis.GroupAxis, "begin_gather", gathers), on(devices, "is_accelerator", is_one),
                on(devices, "to_host", self.to_host), on(devices, "here", self.here),
                on(devices, "new_stream", lambda device: Stream()), on(devices, "current_stream", lambda device: Stream()),
                on(devices, "is_host", lambda device: False),
            ):  # fmt: skip
                stack.enter_context(patch)
            yield
