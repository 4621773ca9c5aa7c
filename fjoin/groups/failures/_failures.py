"""Failures of ranks: reported in the store by the ranks themselves, or detected by ended connections."""

from __future__ import annotations

import contextlib
import json
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NoReturn

import torch.distributed as dist

from ..._errors import CollectiveTimeout, DesyncError, FjoinError, PeerLost, described
from ...shared_memory._packets import Late, PeerGone
from ._connections import Connections
from ._store import Store

# The time limit for the store's answers after a failure.
_ANSWER_S = 0.5
# The texts of gloo's errors, which have no class of their own; NCCL's and the store's errors have one.
BACKEND_ERROR = re.compile(r"gloo/\S*:\d+|^Application timeout caused pair closure")
_LATE = re.compile(r"timed out|timeout", re.IGNORECASE)
_KINDS = {kind.__name__: kind for kind in (PeerLost, CollectiveTimeout, DesyncError)}


class Failures:
    """The failures of a mesh's ranks.

    Args:
        store: The ranks' store.
        name: The name of the mesh, the same on all its ranks.
        rank: This rank in the mesh.
        ranks: The mesh's ranks, as the default process group numbers them.
        connections: The connections of its groups, where these are known.
        calls: The number of collectives that this rank has called, where that is known; otherwise 0.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        ranks: Sequence[int],
        connections: Connections,
        calls: Callable[[], int] = lambda: 0,
    ) -> None:
        self._calls = calls
        self._store, self._name, self._rank, self._ranks, self._size = store, name, rank, ranks, len(ranks)
        # After one broken connection gloo closes the whole group; only a rank without any connection has surely ended.
        self._all, self._own = Connections(), connections
        self._gone_before: set[int] = set()  # the ranks that were gone at the last check
        self._leaves = False  # whether this rank waits for the others to leave a loop
        self._left = 0  # the number of collectives before the last end that all ranks agreed on
        with contextlib.suppress(RuntimeError):
            store.set(_ANSWER_S, f"{self._name}/connections/{rank}", json.dumps(self._all.addresses()))

    def report(self, error: BaseException, step: int | None) -> None:
        """Reports a failure to the other ranks, unless another report came first."""
        if isinstance(error, (PeerLost, CollectiveTimeout)):
            failed, text = error.rank, str(error)
        else:
            where = "" if step is None else f" in step {step}"
            failed, text = self._rank, f"rank {self._rank} failed{where}: {described(error)}"
        kind = type(error).__name__ if type(error).__name__ in _KINDS else "PeerLost"
        report = {"by": self._rank, "rank": failed, "step": step, "kind": kind, "text": text}
        with contextlib.suppress(RuntimeError):  # the store's host may have failed
            if self._store.add(_ANSWER_S, f"{self._name}/failures") == 1:
                self._store.set(_ANSWER_S, f"{self._name}/failure", json.dumps(report))

    def reported(self) -> FjoinError | None:
        """The failure that another rank has reported, or that it has left a loop in which this one goes on, if any."""
        with contextlib.suppress(RuntimeError):
            text = self._store.get(_ANSWER_S, f"{self._name}/failure")
            report = None if text is None else json.loads(text)
            if report and report["by"] != self._rank and (self._leaves or report["rank"] != self._rank):
                return _KINDS[report["kind"]](report["text"], rank=report["rank"], step=report["step"])
        return self._left_alone()

    def gone(self) -> set[int]:
        """The ranks that have ended, judging by connections; if none has, those that have closed their mesh."""
        others = [rank for rank in range(self._size) if rank != self._rank and not self._all.known(rank)]
        with contextlib.suppress(RuntimeError):
            if not self._connections_of(others):  # a late rank must not hide another one
                for rank in others:
                    self._connections_of([rank])
        return self._all.gone() or self._own.gone()

    def _connections_of(self, ranks: list[int]) -> bool:
        """Look up the connections to some ranks; returns whether all of them have made this mesh."""
        texts = self._store.get_all(_ANSWER_S, [f"{self._name}/connections/{rank}" for rank in ranks]) if ranks else []
        for rank, text in zip(ranks, texts or (), strict=False):
            for connections in (self._all, self._own):
                connections.know(rank, json.loads(text))
        return texts is not None

    @contextlib.contextmanager
    def leaving(self, text: str) -> Iterator[int]:
        """Announce that this rank leaves a loop, in a with block that waits for the others to do so.

        Args:
            text: The error of those that go on.

        Yields:
            The number of collectives that this rank has called.
        """
        self._leaves, calls = True, self._calls()
        notice = {"rank": self._rank, "calls": calls, "text": text}
        try:
            with contextlib.suppress(RuntimeError):
                self._store.set(_ANSWER_S, f"{self._name}/leaving", json.dumps(notice))
            yield calls
            self._left = calls
        finally:
            self._leaves = False

    def _left_alone(self) -> FjoinError | None:
        """The error where another rank has left a loop and this one has gone on."""
        with contextlib.suppress(RuntimeError):
            text = self._store.get(_ANSWER_S, f"{self._name}/leaving")
            notice = None if text is None else json.loads(text)
            if notice and self._left < notice["calls"] < self._calls():
                return PeerLost(f"rank {notice['rank']} failed: JoinError: {notice['text']}", rank=notice["rank"])
        return None

    def root_cause(self, error: BaseException, step: int | None) -> BaseException:
        """The typed error for an error of the backend: a failure that another rank has reported, or a lost or late rank.

        Other errors are returned as they are.
        """
        if not is_backend_error(error):
            return error
        # A message's handle left in a frame of the failed call would keep connections open.
        traceback.clear_frames(error.__traceback__)
        failure: FjoinError
        if isinstance(error, PeerGone):
            failure = self.lost(step, str(error), self._ranks.index(error.rank))
        else:
            failure = (self.late if _LATE.search(str(error)) else self.lost)(step, str(error))
        # A rank that fails reports before its connections end, so read the report after the connections.
        return self.reported() or failure

    def lost(self, step: int | None, reason: str, known: int | None = None) -> PeerLost:
        """The error of a connection that has ended without a report; `known` is the rank at its other end.

        That rank may have closed it since it has lost another one, so ranks without any connection are named first.
        """
        gone = sorted(self.gone()) if self._size > 2 else [1 - self._rank]
        gone = gone or ([] if known is None else [known])
        rank = gone[0] if len(gone) == 1 else None
        where = "" if step is None else f"step {step}: "
        to = f"to rank {rank}" if rank is not None else f"to one of the ranks {gone}" if gone else "to a peer"
        return PeerLost(
            f"{where}rank {self._rank} lost the connection {to}, which has ended, was killed or has closed its mesh; where ranks have "
            f"different numbers of batches, loop over step.join(loader). {reason}",
            rank=rank,
            step=step,
        )

    def late(self, step: int | None, reason: str) -> CollectiveTimeout:
        """The error of a message that has timed out."""
        peer = f"rank {1 - self._rank}" if self._size == 2 else "a peer"
        where = "" if step is None else f"step {step}: "
        return CollectiveTimeout(
            f"{where}a collective of rank {self._rank} timed out: {peer} is stopped, or not in this step. {reason}",
            rank=1 - self._rank if self._size == 2 else None,
            step=step,
        )

    def raise_if_any(self, awaited: Collection[int]) -> None:
        """Raise where another rank has reported a failure, or where all awaited ranks are gone.

        They must be gone in two checks in a row, since their last messages may still arrive. If only some of them are
        gone, these may already have done their part.
        """
        before, self._gone_before = self._gone_before, self.gone()
        # A report precedes the end of a connection, so read the report after the connections.
        if (failure := self.reported()) is not None:
            raise failure
        if awaited and set(awaited) <= before & self._gone_before:
            _raise(self.lost(None, ""))


def is_backend_error(error: BaseException) -> bool:
    """Whether the backend raised this error, as it does when a peer is gone."""
    if isinstance(error, (PeerGone, Late)):
        return True
    if isinstance(error, FjoinError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or bool(BACKEND_ERROR.search(str(error)))


def _raise(error: FjoinError) -> NoReturn:
    try:
        raise error
    finally:
        del error
