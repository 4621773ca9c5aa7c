"""Meshes over process groups."""

from __future__ import annotations

import _thread
import contextlib
import functools
import math
import os
import sys
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist

from .._errors import CollectiveTimeout, DesyncError, FjoinError, JoinError, PeerLost, closed, described
from ..shared_memory import HostLinks
from ..transforms.axes import Grid
from ..transforms.base import devices
from ._axis import GroupAxis, backend_of
from ._failures import Failures, Store, raise_from
from ._host_axis import HostAxis
from ._meetings import LEAVES, Combine, Meetings
from ._mesh import Communicator
from ._message import poll
from ._teardown import destroy
from ._traffic import Traffic

# How long closing a mesh waits for the device.
_LAST_S = 10.0
# How long a rank that fails waits for messages that it has begun. Others come for them within one step.
_SETTLE_S = 5.0
# The failures after which the default group was taken down; calls that need it must not quietly make another one.
ENDED: list[str] = []
# All meshes.
MESHES: weakref.WeakSet[GroupMesh] = weakref.WeakSet()


class GroupMesh(Communicator):
    """A mesh over process groups. It takes the groups down when a rank fails.

    Args:
        shape: Axis name -> size.
        groups: Axis name -> its process group, and "" -> the group of all ranks, where there are several axes.
        timeout_s: The time limit of meetings and devices, in seconds; by default that of the group of all ranks.
        ordered: See `mesh`.
        owned: Whether the groups were made for this mesh, so that they are destroyed with it.
        links: The connections to the ranks of this host; None if all messages use the groups.
    """

    def __init__(
        self,
        shape: dict[str, int],
        groups: dict[str, Any],
        timeout_s: float | None = None,
        ordered: bool = False,
        owned: bool = False,
        links: HostLinks | None = None,
    ) -> None:
        group = groups["" if len(shape) > 1 else next(iter(shape))]
        name = group.group_name  # the same on all ranks
        self._ranks, store, traffic = dist.get_process_group_ranks(group), Store(), Traffic()
        self._failures = failures = Failures(store, name, group.rank(), self._ranks, traffic)

        def axis(number: int, name: str, group: Any) -> GroupAxis:
            if links is not None and group.size() > 1 and links.reach(dist.get_process_group_ranks(group)):
                return HostAxis(links, number, name, group, ordered, failures, traffic)
            return GroupAxis(name, group, ordered, failures, traffic)

        # No reference cycle through this mesh: its groups must be freed with it, not at a garbage collection or exit.
        self._everyone = axis(0, " x ".join(shape), group)
        axes = {name: axis(i + 1, name, groups[name]) for i, name in enumerate(shape)}
        for one in axes.values():
            one.joined[tuple(shape)] = self._everyone
        super().__init__(shape, axes, self._everyone.rank)
        self.traffic, self._links = traffic, links
        self._timeout_s = timeout_of(group) if timeout_s is None else timeout_s
        self._meetings = Meetings(store, name, self._timeout_s, lambda rank: failures.raise_if_any([rank]))
        # Values for the host are sent from CPU memory where the backend can, so they do not wait for kernels.
        self._elsewhere = backend_of(group, "cpu") in ("", "nccl")
        self._all = [*axes.values(), self._everyone]
        self._owned, self._process, self._down = owned, os.getpid(), False
        if links is not None:
            links.report = lambda error: failures.report(error, None)
            weakref.finalize(self, links.close).atexit = False
        if owned:
            weakref.finalize(self, destroy, self._all, "", self._process).atexit = False
            weakref.finalize(self, failures.closes).atexit = False
        MESHES.add(self)

    @property
    def group(self) -> Any:
        return self._everyone.group

    @property
    def device(self) -> torch.device:
        return devices.current() if self._elsewhere else torch.device("cpu")

    def exchange(self, occasion: str, value: Any, combine: Combine, axes: tuple[str, ...] = ()) -> Any:
        if self._down:
            raise closed(self._everyone.failure)
        try:
            members = Grid(self.shape).members(self.rank, axes or self.shape)
            return self._meetings.exchange(occasion, value, combine, [self._ranks[rank] for rank in members])
        except Exception as error:
            raise_from(self.root_cause(error, None), error)

    def await_event(self, event: Any) -> None:
        """Wait for a device, and check at intervals whether a rank has failed, since NCCL's kernels would then not end.

        Raises:
            PeerLost: a rank has failed.
            CollectiveTimeout: the device has not reached the event within the mesh's time-out.
        """
        seconds = self._timeout_s
        if not poll(event.query, seconds, self._everyone.check):
            late = f"the device of rank {self.rank} has not ended a step within {seconds:g} s"
            why = "a message in it may wait for a rank that was killed or stopped"
            raise CollectiveTimeout(f"{late}: {why}; for steps that take longer pass fjoin.mesh(..., timeout_s=...)")

    def report(self, error: BaseException, step: int | None) -> None:
        if not self._down:
            self._failures.report(error, step)

    def report_silent(self, rank: int, text: str) -> None:
        self._failures.report_silent(rank, text)

    def report_failure(self, error: BaseException, step: int | None) -> None:
        if self._down or self._process != os.getpid():
            return
        try:
            if self._links is not None and not isinstance(error, (CollectiveTimeout, DesyncError)):
                failed = error.rank if isinstance(error, PeerLost) else None  # it may wait for this report
                self._links.settle(_SETTLE_S, () if failed is None else self._ranks[failed : failed + 1])
        finally:
            self.report(error, step)
            failed_in = getattr(error, "step", None)
            self.unfinished.settle(_SETTLE_S, step if failed_in is None else failed_in)
            if self.size > 1 and any(axis.group is not None and axis.group is dist.group.WORLD for axis in self._all):
                ENDED.append(described(error))
            self._take_down(described(error))

    def leave(self, text: str, step: int | None, limit_s: float = math.inf) -> BaseException | None:
        # While the interpreter ends, no thread can start to ask the store; the others learn that this process has
        # ended.
        if self.size == 1 or self._down or self._process != os.getpid() or sys.is_finalizing():
            return None
        if self.lost() is None and self._all_leave(text, limit_s):
            return None
        failure = self.lost() or JoinError(text, rank=self.rank, step=step)
        self.report_failure(failure, step)
        return failure

    def _all_leave(self, text: str, limit_s: float) -> bool:
        def same(messages: list[int]) -> bool:
            if len(set(messages)) == 1:
                self._failures.left_together()
            return len(set(messages)) == 1

        try:
            self._failures.leaving(text)
            return bool(self._meetings.exchange(LEAVES, self.traffic.messages, same, self._ranks, limit_s))
        except KeyboardInterrupt:
            _thread.interrupt_main()
        except (FjoinError, RuntimeError):  # of a rank that goes on or has failed, or of the store
            pass
        finally:
            self._failures.leaves = False
        return False

    def close(self) -> None:
        if not self._owned or self._down or self._process != os.getpid():
            return
        # A peer may have ended before it reached a message that the device waits for.
        failed = devices.in_use() and not poll(devices.here(devices.current()).query, _LAST_S)
        if self._links is not None:
            self._links.settle(_SETTLE_S)
        self._failures.closes()
        self._take_down("a message to a rank that has ended was under way" if failed else "")

    def _take_down(self, failure: str) -> None:
        self._down = True
        if self._links is not None:
            self._links.close(failure)
        if self._failures.silent:  # whoever frees a group with a message to such a rank waits until its time-out
            groups = [axis.group for axis in self._all]
            keeper = threading.Timer(self._timeout_s, groups.clear)
            keeper.daemon = True
            keeper.start()
        end = functools.partial(destroy, self._all, failure, self._process)
        if not failure:
            return end()
        # gloo waits for the messages under way, of which it may keep one until its time-out though the peer is gone.
        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        thread.join(_SETTLE_S)

    def root_cause(self, error: BaseException, step: int | None) -> BaseException:
        return self._failures.root_cause(error, step)

    def lost(self) -> BaseException | None:
        lost = any(axis.broken for axis in self._all) or self._failures.gone()
        failure = self._failures.lost(None, "") if lost else None
        return self._failures.reported() or failure


TIMEOUT_S = 600.0


def timeout_of(group: Any) -> float:
    with contextlib.suppress(RuntimeError, AttributeError):  # not every backend has the option
        for device in group._device_types:
            return float(group._get_backend(device).options._timeout.total_seconds())
    return TIMEOUT_S
