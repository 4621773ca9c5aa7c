"""Reports of failed ranks: through the store, and by processes that end."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import re
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from .._errors import CollectiveTimeout, DesyncError, FjoinError, PeerLost, described
from ..shared_memory import Late, PeerGone, host_name
from ._message import poll
from ._traffic import Traffic

T = TypeVar("T")
# Calls with a longer limit also wait for the answer to an earlier call.
_PATIENT_S = 1.0
CHECK_S = 0.2  # time between two checks for failures
ANSWER_S = 0.5  # the time limit for the store's answers after a failure
# Threads of calls that have not returned, and how long the end of the program waits for them.
_LEFT: list[threading.Thread] = []
_LAST_S = 1.0


class Unanswered(RuntimeError):
    """A call did not return within its limit."""


def within(seconds: float, call: Callable[[], T], check: Callable[[], None] | None = None) -> T:
    """The result of `call()`, which runs in a thread of its own.

    Args:
        check: Raises where nobody needs to wait any more; called several times a second.

    Raises:
        Unanswered: it has not returned within `seconds`. Its thread keeps running; the end of the program waits for it
            for a while, since a thread that returns from C++ while the interpreter ends would abort the process.
    """
    answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put((True, call()))
        except BaseException as error:
            answer.put((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        if check is not None:
            poll(lambda: not answer.empty(), seconds, check, CHECK_S, 0.01)
        fine, value = answer.get(timeout=max(seconds, 0.0) if check is None else 0.0)
    except (queue.Empty, FjoinError) as error:
        if not _LEFT:
            atexit.register(_await_left)
        _LEFT.append(thread)
        if isinstance(error, FjoinError):
            raise
        raise Unanswered(f"no answer within {seconds:g} s") from None
    if not fine:
        try:
            raise value
        finally:  # a frame that refers to its own exception is freed only by the garbage collector
            del value
    return value  # type: ignore[no-any-return]


def _await_left() -> None:
    end = time.monotonic() + _LAST_S
    for thread in _LEFT:
        thread.join(max(0.0, end - time.monotonic()))


class Store:
    """JSON values in a store of torch, by default that of torch.distributed, under keys of fjoin's own.

    The first argument of each call is the time limit for the answer, in seconds. While an earlier call is unanswered,
    calls with a limit of at most 1 s fail at once; after a broken connection all calls fail.

    Raises:
        Unanswered: no answer in time.
        RuntimeError: torch's errors, such as a refused connection; DistNetworkError after a broken one.
    """

    def __init__(self, store: Any = None) -> None:
        store = store or dist.distributed_c10d._get_default_store()
        self._store: Any = dist.distributed_c10d.PrefixStore("fjoin", store)
        self._unanswered: threading.Event | None = None
        self._broken: str = ""

    def set(self, seconds: float, key: str, value: Any) -> None:
        self.ask(seconds, lambda: self._store.set(key, json.dumps(value)))

    def get(self, seconds: float, key: str) -> Any:
        """The value under a key; None if the key is not set yet."""
        return self.get_all(seconds, [key])[0]

    def get_all(self, seconds: float, keys: list[str]) -> list[Any]:
        """The values under some keys: in one request where the store can and all of them are set."""

        def get() -> list[bytes | None]:
            if len(keys) > 1 and self._store.has_extended_api() and self._store.check(keys):
                return self._store.multi_get(keys)  # type: ignore[no-any-return]
            return [self._store.get(key) if self._store.check([key]) else None for key in keys]

        return [None if text is None else json.loads(text) for text in self.ask(seconds, get)]

    def add(self, seconds: float, key: str) -> int:
        """Increment a key by one; returns the new value."""
        return int(self.ask(seconds, lambda: self._store.add(key, 1)))

    def set_first(self, seconds: float, key: str, value: Any) -> None:
        """Set a key that nobody has set."""
        self.ask(seconds, lambda: self._store.compare_set(key, "", json.dumps(value)))

    def ask(self, seconds: float, call: Callable[[], Any]) -> Any:
        """The result of a call of torch's store."""
        if self._broken:  # each attempt would make torch print a warning
            raise dist.DistNetworkError(self._broken)
        if self._unanswered is not None and not self._unanswered.wait(seconds if seconds > _PATIENT_S else 0.0):
            raise Unanswered("the store has not answered an earlier call")
        answered = self._unanswered = threading.Event()

        def asked() -> Any:
            try:
                return call()
            finally:
                answered.set()

        try:
            return within(seconds, asked)
        except dist.DistNetworkError as error:
            self._broken = f"the connection to the host of the rendezvous store has ended: {error}"
            raise


_EXITING = 4  # a flag of the kernel, set before the process's connections end


def _start_of(pid: int) -> str | None:
    """When a process has started, which tells it from a later one of the same number; "" where it has ended.

    None if that cannot be read, as where no descriptor is left.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()  # the name before may have spaces
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:
        return None
    return "" if fields[0] in "ZX" or int(fields[6]) & _EXITING else fields[19]


class Processes:
    """The processes that have introduced themselves in a store, under their numbers.

    Of one on another host nothing is known but that.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        numbered = os.path.exists("/proc/self") and os.readlink("/proc/self") == str(os.getpid())
        # The host and its numbering of processes, the number, and the start; None where /proc shows other processes.
        self.own = [host_name("pid"), os.getpid(), _start_of(os.getpid()) if numbered else None]
        self._known: dict[int, list[Any]] = {}

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that made this object."""
        return bool(self.own[1] != os.getpid())

    def introduce(self, number: int) -> None:
        """Tell the others which process this one is."""
        with contextlib.suppress(RuntimeError):
            self._store.set(ANSWER_S, f"process/{number}", self.own)

    def ended(self, numbers: Iterable[int]) -> set[int]:
        """Those of these numbers whose processes have surely ended."""
        numbers = list(numbers)
        with contextlib.suppress(RuntimeError):
            if unknown := [number for number in numbers if number not in self._known]:
                found = self._store.get_all(ANSWER_S, [f"process/{number}" for number in unknown])
                self._known.update({number: one for number, one in zip(unknown, found, strict=True) if one})
        return {number for number in numbers if number in self._known and self._has_ended(*self._known[number])}

    def _has_ended(self, host: str, pid: int, start: str | None) -> bool:
        return bool(start) and host == self.own[0] and _start_of(pid) not in (start, None)

    def elsewhere(self) -> list[int]:
        """The numbers of the known processes that are on other hosts."""
        return [number for number, (host, *_) in list(self._known.items()) if host != self.own[0]]


# How long the last messages of a rank that has ended may take to arrive.
_GONE_S = 0.8
# The texts of gloo's errors, which have no class of their own; NCCL's and the store's errors have one.
BACKEND_ERROR = re.compile(r"gloo/\S*:\d+|^Application timeout caused pair closure")
LATE = re.compile(r"timed out|timeout", re.IGNORECASE)
# Stores of meshes that have failed: the rank that hosts one must keep it, since other ranks still look up the failure.
_KEPT: list[Store] = []
_KINDS = {kind.__name__: kind for kind in (PeerLost, CollectiveTimeout, DesyncError)}


class Failures:
    """The failures of a mesh's ranks.

    Args:
        store: The ranks' store.
        name: The name of the mesh, the same on all its ranks.
        rank: This rank in the mesh.
        ranks: The mesh's ranks, as the default process group numbers them.
        traffic: Counts the messages of this rank.
    """

    def __init__(self, store: Store, name: str, rank: int, ranks: Sequence[int], traffic: Traffic) -> None:
        self._store, self._name, self._rank, self._ranks, self._size = store, name, rank, ranks, len(ranks)
        self._traffic = traffic
        self._processes = Processes(store)  # by their numbers in the default process group
        self._gone: dict[int, float] = {}  # rank -> the time of the first check, of those in a row, that found it gone
        self.leaves = False  # whether this rank waits for the others to leave a loop
        self.silent = False  # whether a rank has been lost without the end of its connections
        self._processes.introduce(ranks[rank])

    def _publish(self, key: str, value: Any) -> None:
        """Put a value into the store, whose host may have failed."""
        with contextlib.suppress(RuntimeError):
            self._store.set(ANSWER_S, f"{self._name}/{key}", value)

    def _published(self, key: str) -> Any:
        """A value in the store; None if there is none, or the store does not answer."""
        with contextlib.suppress(RuntimeError):
            return self._store.get(ANSWER_S, f"{self._name}/{key}")
        return None

    def report(self, error: BaseException, step: int | None) -> None:
        """Report the root cause of a failure to the other ranks, unless another report came first."""
        error = self.root_cause(error, step)
        if isinstance(error, (PeerLost, CollectiveTimeout)):
            failed, text = error.rank, str(error)
        else:
            where = "" if step is None else f" in step {step}"
            failed, text = self._rank, f"rank {self._rank} failed{where}: {described(error)}"
        kind = type(error).__name__ if type(error).__name__ in _KINDS else "PeerLost"
        _KEPT.append(self._store)
        self._publish_first({"by": self._rank, "rank": failed, "step": step, "kind": kind, "text": text})

    def report_silent(self, rank: int, text: str) -> None:
        """Report the failure of a rank that cannot say so itself."""
        report = {"by": rank, "rank": rank, "step": None, "kind": "PeerLost", "text": text, "silent": True}
        self._publish_first(report)

    def _publish_first(self, report: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the store's host may have failed
            if self._store.add(ANSWER_S, f"{self._name}/failures") == 1:
                self._publish("failure", report)

    def reported(self) -> FjoinError | None:
        """The failure that another rank reported, or an error if one left a loop that this rank is in; otherwise None."""
        report = self._published("failure")
        if report and report["by"] != self._rank and (self.leaves or report["rank"] != self._rank):
            self.silent = "silent" in report
            return _KINDS[report["kind"]](report["text"], rank=report["rank"], step=report["step"])
        notice = self._published("leaving")
        if notice and notice["messages"] < self._traffic.messages:
            return PeerLost(f"rank {notice['rank']} failed: JoinError: {notice['text']}", rank=notice["rank"])
        return None

    def closes(self) -> None:
        """Tell the other ranks that this one has closed its mesh, while its process may live on."""
        if not self._processes.forked:
            self._publish(f"closed/{self._rank}", True)
            self._publish("closed", True)

    def gone(self) -> set[int]:
        """The ranks whose processes on this host have ended; if none has, those that have closed their mesh."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        found = self._processes.ended(self._ranks[rank] for rank in others)
        ended = {rank for rank in others if self._ranks[rank] in found}
        return (
            ended if ended or not self._published("closed") else {r for r in others if self._published(f"closed/{r}")}
        )

    def leaving(self, text: str) -> None:
        """Announce that this rank leaves a loop, and waits for the others to do so; `text` is the error of those that
        go on.
        """
        self.leaves = True
        self._publish("leaving", {"rank": self._rank, "messages": self._traffic.messages, "text": text})

    def left_together(self) -> None:
        """All ranks have come to leave the loop, and none has left it yet: the announcement has had its use."""
        self._publish("leaving", None)

    def root_cause(self, error: BaseException, step: int | None) -> BaseException:
        """The typed error for an error of the backend: a failure that another rank has reported, or a lost or late
        rank.

        Other errors are returned as they are. An error that knows no step is told this one.
        """
        cause = self._cause(error, step) if is_backend_error(error) else error
        if isinstance(cause, (PeerLost, CollectiveTimeout)) and cause.step is None:
            cause.step = step
        return cause

    def _cause(self, error: BaseException, step: int | None) -> FjoinError:
        # A message's handle left in a frame of the failed call would keep connections open.
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, PeerGone):
            failure: FjoinError = self.lost(step, str(error), self._ranks.index(error.rank))
        else:
            failure = (self.late if LATE.search(str(error)) else self.lost)(step, str(error))
        # A rank that fails reports before it ends, so read the report afterwards.
        return self.reported() or failure

    def lost(self, step: int | None, reason: str, known: int | None = None) -> PeerLost:
        """The error of a connection that has ended without a report; `known` is the rank at its other end.

        That rank may have closed it since it has lost another one, so ranks that have ended are named first.
        """
        gone = sorted(self.gone()) if self._size > 2 else [1 - self._rank]
        gone = gone or ([] if known is None else [known])
        rank = gone[0] if len(gone) == 1 else None
        where = "" if step is None else f"step {step}: "
        to = f"to rank {rank}" if rank is not None else f"to one of the ranks {gone}" if gone else "to a peer"
        text = f"{where}rank {self._rank} lost the connection {to}, which has ended, was killed or has closed its mesh"
        remedy = "if ranks have different numbers of batches, loop over step.join(loader)"
        return PeerLost(f"{text}; {remedy}. {reason}", rank=rank, step=step)

    def late(self, step: int | None, reason: str) -> CollectiveTimeout:
        """The error of a message that has timed out."""
        other = 1 - self._rank if self._size == 2 else None
        peer, where = "a peer" if other is None else f"rank {other}", "" if step is None else f"step {step}: "
        text = f"{where}a collective of rank {self._rank} timed out: {peer} is stopped, or not in this step. {reason}"
        return CollectiveTimeout(text, rank=other, step=step)

    def raise_if_any(self, awaited: Collection[int]) -> None:
        """Raise where another rank has reported a failure, or where all awaited ranks are gone.

        They must be gone for a while, since their last messages may still arrive. If only some have ended, these may
        have done their part.

        Args:
            awaited: As the default process group numbers them, this rank or not.
        """
        now = time.monotonic()
        self._gone = {rank: self._gone.get(rank, now) for rank in self.gone()}
        # A report precedes the end of its rank, so read the report afterwards.
        if (failure := self.reported()) is not None:
            raise failure
        others = {self._ranks.index(rank) for rank in awaited} - {self._rank}
        if others and all(now - self._gone.get(rank, now) > _GONE_S for rank in others):
            raise self.lost(None, "")


def is_backend_error(error: BaseException) -> bool:
    """Whether the backend raised this error, as it does when a peer is gone."""
    if isinstance(error, (PeerGone, Late)):
        return True
    if isinstance(error, FjoinError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or bool(BACKEND_ERROR.search(str(error)))


def raise_from(cause: BaseException, error: BaseException) -> NoReturn:
    """Raise the root cause of an error, which may be the error itself."""
    try:
        if cause is error:
            raise error
        raise cause from error
    finally:  # a frame that refers to its exception lives until a garbage collection, with connections in it
        del cause, error
