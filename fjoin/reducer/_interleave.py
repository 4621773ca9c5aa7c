"""Functions that run in turns, each until its next message is on its way.

The hook of a bucket may send several messages, one after the other's result. Run in waves, all
buckets' first messages travel while backward goes on; after it come all second messages, and so on. One
function runs at a time and the turns follow a fixed order, so that all ranks send the same messages in the
same order. One that asks for the first bucket's result gives up its turns until that is there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..groups._axis import GroupAxis
from ..transforms._axis_env import Axis, bind_axes, bound
from ..transforms.plan._buckets import Bucket


class _Abandon(BaseException):
    """Unwinds a function whose step has failed elsewhere."""


class Coroutine:
    """A function on its way through the waves."""

    def __init__(self, waves: Interleaver, function: Callable[[Callable[[], None]], Any]) -> None:
        self._interleaver, self._function = waves, function
        self.done = False
        self._error: BaseException | None = None
        self._abandoned = False
        self._thread: threading.Thread | None = None
        # Both are held while the task runs or waits; freeing one passes the turn.
        self._turn, self._back = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._back.acquire()

    def go_on(self) -> None:
        """Run until the next message is on its way, or to the end."""
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
        """Let the others have their turn; called by the function itself."""
        self.check()
        self._back.release()
        self._turn.acquire()
        self.check()

    def check(self) -> None:
        """Unwind, if the step has failed elsewhere: nothing more is to be sent."""
        if self._abandoned:
            raise _Abandon

    def _run(self) -> None:
        try:
            axes: dict[str, Any] = {name: _Pausing(axis, self) for name, axis in self._interleaver.axes.items()}
            with torch.no_grad(), bind_axes({**self._interleaver.outer, **axes}):
                self._function(self.pause)
        except _Abandon:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.done = True
            del self._function  # which knows this task
            if not self._abandoned:  # else nobody waits, and an interrupted `go_on` may have left it free
                self._back.release()

    def abandon(self) -> None:
        if self._thread is not None and not self.done:
            self._abandoned = True
            if self._turn.locked():  # else an interrupted `go_on` has freed it, and the task is about to take it
                self._turn.release()

    def wait(self) -> None:
        """Take part in waves until this function has returned."""
        while not self.done:
            self._interleaver.wave()


class _Pausing(Axis):
    """An axis for a task: it gives up its turn while a message is on its way."""

    def __init__(self, axis: Any, task: Coroutine) -> None:
        self._axis, self._task = axis, task
        self.size = axis.size

    def index(self) -> Tensor:
        return self._axis.index()

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        out: Tensor
        self._task.check()
        if torch.compiler.is_compiling():  # a compiled hook waits inside
            out = self._axis.run(op, x, arg)
            return out
        finish = self._axis.begin(op, x, arg)
        self._task.pause()
        out = finish()
        return out

    def run_(self, x: Tensor) -> Tensor:
        """psum in place."""
        self._task.check()
        work = self._axis.reduce_(x)
        self._task.pause()
        work.wait()
        return x

    def joint(self, axes: tuple[str, ...]) -> _Pausing | None:
        joint = self._axis.joint(axes)
        return None if joint is None else _Pausing(joint, self._task)


class Interleaver:
    """The tasks of one step.

    Args:
        axes: What the tasks' messages cross.
    """

    def __init__(self, axes: dict[str, Any]) -> None:
        keep_freed()
        self.axes, self.outer = axes, bound()
        self._tasks: list[Coroutine] = []

    def start(self, function: Callable[[Callable[[], None]], Any]) -> Coroutine:
        """Run a function until its first message is on its way; `wait` of what is returned goes on.

        Args:
            function: It is given what it may call to let the others have their turn.
        """
        task = Coroutine(self, function)
        self._tasks.append(task)
        task.go_on()
        return task

    def wave(self) -> None:
        """Let every task that is not done go on by one message."""
        for task in self._tasks:
            if not task.done:
                task.go_on()

    def clear(self) -> None:
        """Forget all tasks, and unwind those that are not done."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.abandon()


@functools.cache
def keep_freed() -> None:
    """Let glibc keep what the threads free: it would give it back to the kernel, to fault the same pages in again in every step.

    What it keeps, and what it does not map by itself, it measures by the largest block up to 32 MiB that was ever mapped
    and freed; so this frees one (benchmarks/alone.py shows the difference). It holds for the whole process. Where
    MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_ are set, or the library is another, it does nothing.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")


# One thread each: with more buckets than this they run one after the other.
MOST = 128


def travel(axes: dict[str, Any], layout: tuple[Bucket, ...], device: str) -> bool:
    """Whether messages of buckets that lie on such a device go on while others are made ready.

    Not where there is no other rank, nor in the simulator, nor with one bucket, which is ready last.
    """
    real = any(isinstance(axis, GroupAxis) and axis.size > 1 for axis in axes.values())
    return real and 1 < len(layout) <= MOST and all(bucket.device.type == device for bucket in layout)
