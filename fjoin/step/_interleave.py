"""Stages of several buckets in turns, and side streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..groups import keep_freed
from ..transforms.axes import Axis, bind_axes, bound
from ..transforms.base import devices
from ..transforms.layout import Bucket


class Started:
    """The end of a function's work in a stream."""

    def __init__(self, device: torch.device, event: Any) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        """Make the current stream wait for it; the host does not."""
        devices.current_stream(self._device).wait_event(self._event)


class SideStreams:
    """Runs functions on two streams in turn, each after all work that the caller's stream has so far; the host does not
    wait.

    While one stream waits for a bucket's message the next bucket is encoded in the other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[Any] = [devices.new_stream(device) for _ in range(2)]
        self._first: Any = None  # the end of the first function of a step

    def begin(self) -> None:
        """Begin a step."""
        self._first = None

    def start(self, function: Callable[[], Any]) -> Started:
        """Start a function. All but the first of a step may read what the first has made."""
        stream = self._streams[0]
        self._streams.reverse()
        stream.wait_stream(devices.current_stream(self._device))
        if self._first is not None:
            stream.wait_event(self._first)
        with stream:
            function()
            end = devices.here(self._device)
        self._first = self._first or end
        return Started(self._device, end)


class _AbandonStep(BaseException):
    """Unwinds a function whose step has failed elsewhere."""


class Coroutine:
    """A function that runs in turns with those of other buckets."""

    def __init__(self, interleaver: Interleaver, function: Callable[[], Any]) -> None:
        self._interleaver, self._function = interleaver, function
        self.done: bool = False
        self._error: BaseException | None = None
        self._abandoned = False
        self._thread: threading.Thread | None = None
        # Both locks are held while the function runs or waits; releasing one passes the turn.
        self._turn, self._back = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._back.acquire()

    def go_on(self) -> None:
        """Run until the next message is under way, or to the end."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        else:
            self._turn.release()
        self._back.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def pause(self) -> None:
        """Pass the turn to the others; called by the function itself."""
        self.check()
        self._back.release()
        self._turn.acquire()
        self.check()

    def check(self) -> None:
        """Unwind if the step has failed elsewhere: no further message may be sent."""
        if self._abandoned:
            raise _AbandonStep

    def _run(self) -> None:
        try:
            axes: dict[str, Any] = {name: _Pausing(axis, self) for name, axis in self._interleaver.axes.items()}
            with torch.no_grad(), bind_axes({**self._interleaver.outer, **axes}):
                self._function()
        except _AbandonStep:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.done = True
            del self._function  # it refers to this object
            if not self._abandoned:  # otherwise no thread waits, and an interrupted `go_on` may have left the lock free
                self._back.release()

    def abandon(self) -> None:
        if self._thread is not None and not self.done:
            self._abandoned = True
            if self._turn.locked():  # otherwise an interrupted `go_on` has released it, and `_run` is about to take it
                self._turn.release()

    def wait(self) -> None:
        """Run rounds until this function has returned."""
        while not self.done:
            self._interleaver.wave()


class _Pausing(Axis):
    """An axis for a coroutine: it passes the turn while a message is under way."""

    def __init__(self, axis: Axis, task: Coroutine) -> None:
        self._axis, self._task = axis, task
        self.size = axis.size

    def index(self) -> Tensor:
        return self._axis.index()

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        self._task.check()
        if torch.compiler.is_compiling():  # a compiled hook waits for its messages itself
            return self._axis.run(op, x, arg)
        finish = self._axis.begin(op, x, arg)
        self._task.pause()
        return finish()

    def run_(self, x: Tensor) -> Tensor:
        """psum in place."""
        self._task.check()
        work = self._axis.begin_reduce(x)
        self._task.pause()
        work.wait()
        return x

    def joint(self, axes: tuple[str, ...]) -> _Pausing | None:
        joint = self._axis.joint(axes)
        return None if joint is None else _Pausing(joint, self._task)


class Interleaver:
    """The coroutines of one step.

    Args:
        axes: The axes by name that the coroutines communicate over.
    """

    def __init__(self, axes: dict[str, Any]) -> None:
        keep_freed()
        self.axes, self.outer = axes, bound()
        self._tasks: list[Coroutine] = []

    def start(self, function: Callable[[], Any]) -> Coroutine:
        """Run a function until its first message is under way; the returned `wait` continues it."""
        task = Coroutine(self, function)
        self._tasks.append(task)
        task.go_on()
        return task

    def wave(self) -> None:
        """Run one round: continue each unfinished coroutine by one message."""
        for task in self._tasks:
            if not task.done:
                task.go_on()

    def clear(self) -> None:
        """Drop all coroutines and unwind the unfinished ones."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.abandon()


# Each bucket takes one thread: with more buckets than this the hooks run one after the other.
MOST = 128


def travel(axes: dict[str, Any], layout: tuple[Bucket, ...], in_streams: bool) -> bool:
    """Whether messages of buckets travel while other buckets are filled: in streams of an accelerator, or in
    coroutines.

    They do not with a single rank, in the simulator, with more coroutines than `MOST`, or with one bucket, which is
    ready last.
    """
    real = any(axis.size > 1 and not axis.simulated for axis in axes.values()) and len(layout) > 1
    if in_streams:
        return real and all(devices.is_accelerator(bucket.device) for bucket in layout)
    return real and len(layout) <= MOST and all(bucket.device.type == "cpu" for bucket in layout)
