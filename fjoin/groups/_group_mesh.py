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
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .._errors import CollectiveTimeout, DesyncError, FjoinError, JoinError, PeerLost, closed, described
from ..shared_memory import HostLinks
from ..transforms.base import devices
from ._axis import GroupAxis
from ._failures import Failures, Store, is_backend_error
from ._host_axis import HostAxis
from ._meetings import LEAVES, Meetings
from ._mesh import Communicator
from ._message import comes
from ._teardown import destroy
from ._traffic import Traffic

# How long closing a mesh waits for the device.
_LAST_S = 10.0
# How long a rank that fails waits for messages that it has begun. Others come for them within one step.
_SETTLE_S = 5.0
# Stores of meshes that have failed: the rank that hosts one must keep it, since other ranks still look up the failure.
_KEPT: list[Any] = []
# The failures after which the default group was taken down; calls that need it must not quietly make another one.
ENDED: list[str] = []
# All meshes. They release a group together: a group that one mesh still held would keep its connections open.
MESHES: weakref.WeakSet[GroupMesh] = weakref.WeakSet()


class GroupMesh(Communicator):
    """A mesh over process groups. It takes the groups down when a rank fails.

    Args:
        owned: Whether the groups were made for this mesh, so that they are destroyed with it.
        links: The connections to the ranks of this host; None where all messages use the groups.
    """

    def __init__(
        self,
        shape: dict[str, int],
        groups: dict[str, Any],
        world_mesh: Any,
        timeout_s: float,
        ordered: bool,
        owned: bool = True,
        links: HostLinks | None = None,
    ) -> None:
        self._store, name = Store(), world_mesh.group_name  # a name that is the same on all ranks
        self._ranks = ranks = dist.get_process_group_ranks(world_mesh)
        me = weakref.ref(self)

        def calls() -> int:
            return 0 if (mesh := me()) is None else mesh.calls()

        self._failures = failures = Failures(self._store, name, world_mesh.rank(), ranks, calls)

        def look(group: Any) -> Callable[[], None]:
            """A check for failures, for ranks that wait for a message over a group."""
            others = [ranks.index(rank) for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
            return lambda: failures.raise_if_any(others)

        traffic = Traffic()

        def cause(error: BaseException) -> BaseException:
            return failures.root_cause(error, None)

        def axis(
            name: str, group: Any, number: int, joint: Callable[[Any], Any], check: Callable[[], None]
        ) -> GroupAxis:
            members = dist.get_process_group_ranks(group)
            if links is not None and links.reach(members):
                return HostAxis(links, number, members, group, ordered, joint, check, cause, traffic, name)
            return GroupAxis(group, ordered, joint, check, cause, traffic, name)

        self._look, self._links = look(world_mesh), links
        self._everyone = axis("", world_mesh, 0, lambda axes: None, self._look)
        # No reference cycle through this mesh: its groups must be freed with it, not at a garbage collection or exit.
        names, whole = tuple(shape), self._everyone

        def joint(axes: tuple[str, ...]) -> GroupAxis | None:
            return whole if axes == names else None

        axes = {name: axis(name, group, i + 1, joint, look(group)) for i, (name, group) in enumerate(groups.items())}
        super().__init__(shape, axes, self._everyone.rank)
        self.traffic = traffic
        self._meetings = Meetings(self._store, name, timeout_s, lambda rank: failures.raise_if_any([ranks.index(rank)]))
        self._timeout_s = timeout_s
        backends = dict(pair.split(":") for pair in dist.get_backend_config(world_mesh).split(","))
        # Values for the host are sent from CPU memory where the backend can, so they do not wait for kernels.
        self._elsewhere = backends.get("cpu", "nccl") == "nccl"
        self._down = False
        self._all = {id(axis): axis for axis in (*axes.values(), whole)}.values()
        self._owned, self._process = owned, os.getpid()
        if links is not None:
            links.report = lambda error: failures.report(error, None)
            weakref.finalize(self, links.close).atexit = False
        if owned:
            weakref.finalize(self, destroy, list(self._all), _every_axis, "", self._process).atexit = False
            weakref.finalize(self, failures.closes).atexit = False
        MESHES.add(self)

    @property
    def group(self) -> Any:
        return self._everyone.group

    @property
    def device(self) -> torch.device:
        return devices.current() if self._elsewhere else torch.device("cpu")

    def sent(self) -> int:
        shared = 0 if self._links is None else self._links.count
        with contextlib.suppress(RuntimeError):  # not every backend counts its collectives
            return shared + self.group._get_sequence_number_for_group()  # type: ignore[no-any-return]
        return shared

    def calls(self) -> int:
        groups = {id(axis.group): axis.group for axis in self._all if axis.group is not None}
        calls = 0 if self._links is None else self._links.count
        for group in groups.values():
            with contextlib.suppress(RuntimeError):  # not every backend counts its collectives
                calls += group._get_sequence_number_for_group()
        return calls

    def _exchange(self, occasion: str, value: Any, combine: Callable[[list[Any]], Any], axes: tuple[str, ...]) -> Any:
        if self._down:
            raise closed(self._everyone.failure)
        members = [self._ranks[rank] for rank in self._members(axes)]
        return self._meetings.exchange(occasion, value, combine, members)

    def await_event(self, event: Any) -> None:
        """Wait for a device, and check at intervals whether a rank has failed, since NCCL's kernels would then not end.

        Raises:
            PeerLost: a rank has failed.
            CollectiveTimeout: the device has not reached the event within the mesh's time-out.
        """
        seconds = self._timeout_s
        if not comes(event, seconds, self._look):
            raise CollectiveTimeout(
                f"the device of rank {self.rank} has not ended a step within {seconds:g} s: a message in it may wait for a rank "
                f"that was killed or stopped; for steps that take longer pass fjoin.mesh(..., timeout_s=...)"
            )

    def report(self, error: BaseException, step: int | None) -> BaseException:
        error = self.root_cause(error, step)
        if not self._down:
            _KEPT.append(self._store)
            self._failures.report(error, step)
        return error

    def report_failure(self, error: BaseException, step: int | None) -> None:
        if self._down or self._process != os.getpid():
            return
        try:
            if self._links is not None and not isinstance(error, (CollectiveTimeout, DesyncError)):
                self._links.settle(_SETTLE_S)
        finally:
            self.report(error, step)
            failed_in = getattr(error, "step", None)
            self.use.unfinished.settle(_SETTLE_S, step if failed_in is None else failed_in)
            if self.size > 1 and any(axis.group is not None and axis.group is dist.group.WORLD for axis in self._all):
                ENDED.append(described(error))
            self._take_down(described(error))

    def leave(self, text: str, step: int | None, limit_s: float = math.inf) -> BaseException | None:
        # While the interpreter ends, no thread can start to ask the store; the others learn that this process has ended.
        if self.size == 1 or self._down or self._process != os.getpid() or sys.is_finalizing():
            return None
        if self.lost() is None and self._all_leave(text, limit_s):
            return None
        failure = self.lost() or JoinError(text, rank=self.rank, step=step)
        self.report_failure(failure, step)
        return failure

    def _all_leave(self, text: str, limit_s: float) -> bool:
        try:
            with self._failures.leaving(text) as calls:
                counts = self._meetings.within(limit_s).exchange(LEAVES, calls, list, self._ranks)
                return all(count == calls for count in counts)
        except KeyboardInterrupt:
            _thread.interrupt_main()
        except (FjoinError, RuntimeError):  # of a rank that goes on or has failed, or of the store
            pass
        return False

    def close(self) -> None:
        if not self._owned or self._down or self._process != os.getpid():
            return
        failed = False
        if devices.in_use():
            event = devices.here(devices.current())
            failed = not comes(event, _LAST_S)  # a peer may have ended before it reached the same message
        if self._links is not None:
            self._links.settle(_SETTLE_S)
        self._failures.closes()
        self._take_down("a message to a rank that has ended was under way" if failed else "")

    def _take_down(self, failure: str) -> None:
        self._down = True
        if self._links is not None:
            self._links.close(failure)
        end = functools.partial(destroy, list(self._all), _every_axis, failure, self._process)
        if not failure:
            return end()
        # gloo waits for the messages under way, of which it may keep one until its time-out though the peer is gone.
        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        thread.join(_SETTLE_S)

    def is_backend_error(self, error: BaseException) -> bool:
        return is_backend_error(error)

    def root_cause(self, error: BaseException, step: int | None) -> BaseException:
        cause = self._failures.root_cause(error, step)
        if isinstance(cause, (PeerLost, CollectiveTimeout)) and cause.step is None:
            cause.step = step
        return cause

    def lost(self) -> BaseException | None:
        lost = any(axis.broken for axis in self._all) or self._failures.gone()
        failure = self._failures.lost(None, "") if lost else None
        return self._failures.reported() or failure


def _every_axis() -> list[GroupAxis]:
    """The axes of all meshes."""
    return [axis for mesh in list(MESHES) for axis in mesh._all]


TIMEOUT_S = 600.0


def mesh_from_group(group: Any) -> Communicator:
    """A mesh of one axis, "data", over the user's process group, which it takes down when a rank fails."""
    return GroupMesh({"data": group.size()}, {"data": group}, group, timeout_of(group), False, owned=False)


def timeout_of(group: Any) -> float:
    with contextlib.suppress(RuntimeError, AttributeError):  # not every backend has the option
        for device in group._device_types:
            return float(group._get_backend(device).options._timeout.total_seconds())
    return TIMEOUT_S
