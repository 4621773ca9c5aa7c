"""Meshes over process groups, which they take down where a rank fails."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.nn.parallel import DistributedDataParallel

from ._axis import GroupAxis
from ._errors import CollectiveTimeout, FjoinError, PeerLost
from ._mesh import Mesh
from ._sockets import Connections, shut

TIMEOUT_S = 600.0
# How long a rank whose connection broke waits for the failed rank's own account of it.
_ACCOUNT_S = 1.0
# How long a program that ends waits for its device.
_LAST_S = 10.0
# What gloo's errors look like, which have no class of their own; NCCL's and the store's have.
_GLOO = re.compile(r"gloo/\S*:\d+|^Application timeout caused pair closure")
_LATE = re.compile(r"timed out|timeout", re.IGNORECASE)
# Stores of meshes that were taken down: the rank that hosts one must keep it, since others still look up what happened.
_KEPT: list[Any] = []


class GroupMesh(Mesh):
    """A mesh over process groups, which it takes down where a rank fails.

    Args:
        connections: Those of these groups, where they are known.
    """

    def __init__(
        self,
        shape: dict[str, int],
        groups: dict[str, Any],
        everyone: Any,
        timeout_s: float,
        ordered: bool,
        connections: Connections | None = None,
    ) -> None:
        self._everyone = GroupAxis(everyone, ordered)
        # Without a cycle through this mesh: groups must go with it, not when Python looks for cycles or ends.
        names, whole = tuple(shape), self._everyone

        def joint(axes: tuple[str, ...]) -> GroupAxis | None:
            return whole if axes == names else None

        axes = {name: GroupAxis(group, ordered, joint) for name, group in groups.items()}
        super().__init__(shape, axes, self._everyone.rank)
        # The group's name is the same on all ranks.
        self._store: Any = dist.distributed_c10d.PrefixStore(
            f"fjoin/{everyone.group_name}", dist.distributed_c10d._get_default_store()
        )
        self._timeout = datetime.timedelta(seconds=timeout_s)
        backends = dict(pair.split(":") for pair in dist.get_backend_config(everyone).split(","))
        # What the host wants to know travels between hosts where it can, and does not wait behind kernels.
        self._cuda = backends.get("cpu", "nccl") == "nccl"
        self._connections = connections or Connections()
        self._down = False

    @property
    def group(self) -> Any:
        return self._everyone.group

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self._cuda else torch.device("cpu")

    def broken(self) -> bool:
        return any(axis.broken for axis in (*self.axes.values(), self._everyone))

    def sent(self) -> int:
        with contextlib.suppress(RuntimeError):  # not every backend counts
            return self.group._get_sequence_number_for_group()
        return 0

    def exchange(self, value: Any, combine: Callable[[list[Any]], Any], axes: tuple[str, ...] = ()) -> Any:
        members = self._members(axes)
        who = ",".join(map(str, members))
        # Counted in the store: another mesh over the same group goes on where this one has ended.
        place = f"meeting/{who}/{self._store.add(f'meetings/{who}/{self.rank}', 1)}"
        self._store.set(f"{place}/{self.rank}", json.dumps(value))
        if self.rank == members[0]:
            values = []
            for rank in members:
                try:
                    self._await(f"{place}/{rank}", rank)
                except CollectiveTimeout:
                    self._store.set(f"{place}/absent", json.dumps(rank))
                    raise
                values.append(json.loads(self._store.get(f"{place}/{rank}")))
            self._store.set(f"{place}/result", json.dumps(combine(values)))
        try:
            self._await(f"{place}/result", members[0])
        except CollectiveTimeout:  # of whom the first member, which has waited as long, knows more
            absent = members[0]
            with contextlib.suppress(RuntimeError):
                self._store.wait([f"{place}/absent"], datetime.timedelta(seconds=_ACCOUNT_S))
                absent = json.loads(self._store.get(f"{place}/absent"))
            self._absent(absent)
        return json.loads(self._store.get(f"{place}/result"))

    def _await(self, key: str, rank: int) -> None:
        """Wait for a key, looking up now and then whether a rank has failed meanwhile."""
        end = time.monotonic() + self._timeout.total_seconds()
        while True:
            left = end - time.monotonic()
            try:
                self._store.wait([key], datetime.timedelta(seconds=max(0.01, min(left, 0.5))))
                return
            except RuntimeError as error:  # stores differ in what they raise when time is up
                if "imeout" not in str(error) and "imed out" not in str(error):
                    raise
                self._raise_account()
                if left <= 0.5:
                    self._absent(rank)

    def await_event(self, event: Any) -> None:
        """Wait for a device, looking up now and then whether a rank has failed meanwhile: NCCL's kernels would not end.

        Raises:
            PeerLost: one has.
            CollectiveTimeout: the device has not come so far within the mesh's time-out.
        """
        seconds = self._timeout.total_seconds()
        if not _comes(event, seconds, self._raise_account):
            raise CollectiveTimeout(
                f"the device of rank {self.rank} has not ended a step within {seconds:g} s: a message in it may wait for a rank "
                f"that was killed or stopped; for steps that take longer pass fjoin.mesh(..., timeout_s=...)"
            )

    def _absent(self, rank: int) -> NoReturn:
        raise CollectiveTimeout(
            f"rank {rank} did not come to the check before the first message within "
            f"{self._timeout.total_seconds():g} s; is it running the same program?",
            rank=rank,
        ) from None

    def failed(self, error: BaseException, step: int | None) -> None:
        if self._down:
            return
        _KEPT.append(self._store)
        if not isinstance(error, (PeerLost, CollectiveTimeout)):
            with contextlib.suppress(RuntimeError):  # the store's own host may be gone
                account = {"rank": self.rank, "step": step, "error": f"{type(error).__name__}: {error}"}
                if self._store.add("failures", 1) == 1:
                    self._store.set("failure", json.dumps(account))
        opened = self._connections.opened()
        self.take_down()
        # Only now: gloo lets the messages that are under way end first, and may not notice if they are cut.
        shut(opened)

    def close(self) -> None:
        """Take the groups down at the end of a program, once its device has done what it was given, or seems never to."""
        failed = False
        if torch.cuda.is_initialized():
            event = torch.cuda.Event()
            event.record()
            failed = not _comes(event, _LAST_S)  # a peer may have ended before it came to the same message
        self.take_down(failed)

    def take_down(self, failed: bool = True) -> None:
        """Destroy the groups of this mesh.

        Args:
            failed: Whether messages may be under way that will never end: peers that wait in them get an error at once.
                Else NCCL's are waited for.
        """
        self._down = True
        groups = {id(axis.group): axis for axis in [*self.axes.values(), self._everyone] if axis.group is not None}
        for axis in groups.values() if failed else ():  # all of them first: to destroy one waits for its stream
            with contextlib.suppress(RuntimeError):
                if axis.group.name() == "nccl":
                    axis.group.abort()
        for axis in groups.values():
            group, axis.group = axis.group, None
            for other in [*self.axes.values(), self._everyone]:
                if other.group is group:
                    other.group = None
            _forget(group)
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                if group is dist.group.WORLD:
                    del group
                    dist.destroy_process_group()
                else:
                    dist.destroy_process_group(group)

    def is_echo(self, error: BaseException) -> bool:
        if isinstance(error, FjoinError) or not isinstance(error, RuntimeError):
            return False
        return isinstance(error, dist.DistError) or bool(_GLOO.search(str(error)))

    def account(self, error: BaseException, step: int | None) -> BaseException:
        if not self.is_echo(error):
            return error
        # A message's handle that is left in a frame of the failed call would keep connections open.
        traceback.clear_frames(error.__traceback__)
        if _LATE.search(str(error)):
            lost: FjoinError = CollectiveTimeout(
                f"step {step}: a collective of rank {self.rank} timed out: a peer is stopped, or not in this step. {error}",
                step=step,
            )
        else:
            lost = PeerLost(f"step {step}: rank {self.rank} lost the connection to a peer. {error}", step=step)
        return self._look_up(_ACCOUNT_S) or lost

    def _look_up(self, patience_s: float) -> PeerLost | None:
        """The failed rank's account of itself, if there is one within some time."""
        with contextlib.suppress(RuntimeError):
            self._store.wait(["failure"], datetime.timedelta(seconds=patience_s))
            told = json.loads(self._store.get("failure"))
            if told["rank"] != self.rank:
                where = "" if told["step"] is None else f" in step {told['step']}"
                return PeerLost(
                    f"rank {told['rank']} failed{where}: {told['error']}", rank=told["rank"], step=told["step"]
                )
        return None

    def _raise_account(self) -> None:
        if self._store.check(["failure"]) and (lost := self._look_up(0.05)):
            raise lost


def _comes(event: Any, seconds: float, look: Callable[[], None] = lambda: None) -> bool:
    """Whether a device comes to an event within some time; `look` is called twice a second meanwhile.

    CUDA's own wait has no end, so the event is asked, ever less often.
    """
    start, pause = time.monotonic(), 2e-5
    looked = start
    while not event.query():
        now = time.monotonic()
        if now - start > seconds:
            return False
        if now - looked > 0.5:
            look()
            looked = now
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    return True


def mesh_over(group: Any, name: str = "data") -> Mesh:
    """A mesh of one axis over a process group of the user's, which it takes down where a rank fails."""
    return GroupMesh({name: group.size()}, {name: group}, group, TIMEOUT_S, ordered=False)


def _forget(group: Any) -> None:
    """Take a group out of all that torch holds it by, which would keep its connections open.

    Modules and model averagers have it as an attribute, and a module's reducer, in C++, too: were that the last to hold
    it, its destructor would wait for threads that wait for Python. The functions of torch.distributed.nn have the
    default group of the moment of their import among their default arguments, and making a DistributedDataParallel
    imports them.
    """
    kinds = (DistributedDataParallel, ModelAverager)
    places = gc.get_referrers(group)  # objects, or their dicts
    owners = [one for place in places if isinstance(place, dict) for one in gc.get_referrers(place)]
    for holder in [one for one in (*places, *owners) if issubclass(type(one), kinds)]:
        held = [name for name, value in vars(holder).items() if value is group]
        vars(holder).update(dict.fromkeys(held))
        if held and isinstance(holder, DistributedDataParallel):
            vars(holder).update(reducer=None, logger=None)
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(module).values() if module else ():
        defaults = getattr(function, "__defaults__", None)
        if defaults and any(value is group for value in defaults):
            function.__defaults__ = tuple(None if value is group else value for value in defaults)
