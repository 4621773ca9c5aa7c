"""Meetings of ranks in the rendezvous store: for values that differ in size, and ranks that may not arrive."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import torch.distributed as dist

from .._errors import CollectiveTimeout, DesyncError, PeerLost
from ._failures import CHECK_S, Store, Unanswered
from ._message import poll

_LONGEST_S = 0.05  # the longest pause between two reads of a key
_APART = 5  # the number of checks in a row that must find the other rank at another meeting
LEAVES = "the end of a loop that is left"  # the occasion of ranks that leave a loop before its end

Combine: TypeAlias = Callable[[list[Any]], Any]  # of the JSON values of some ranks, in their order


class Meetings:
    """The meetings of one rank. Ranks are numbered here as in the default process group.

    Args:
        store: The ranks' store.
        name: The name of the mesh, the same on all its ranks.
        timeout_s: The time limit of a meeting, in seconds.
        check: Raises where any rank has reported a failure, or where the given rank is gone.
    """

    def __init__(self, store: Store, name: str, timeout_s: float, check: Callable[[int], None]) -> None:
        self._store, self._rank = store, dist.get_rank()
        self._name, self._timeout_s, self.check = name, timeout_s, check

    def exchange(
        self, occasion: str, value: Any, combine: Combine, members: Sequence[int], limit_s: float | None = None
    ) -> Any:
        """`combine` of the members' JSON values in the members' order: computed by the first member, the same on all.

        Args:
            occasion: The place in the program, in words.
            limit_s: A time limit that is shorter than that of all meetings, in seconds.

        Raises:
            DesyncError: a member is at another place in the program.
            PeerLost: a member has left a loop in which others go on.
            CollectiveTimeout: a member does not come in time, or the store does not answer.
        """
        limit_s = self._timeout_s if limit_s is None else min(limit_s, self._timeout_s)
        end, here = time.monotonic() + limit_s, False
        try:
            place = self._arrive(end, occasion, value, members)
            if self._rank == members[0]:
                found = self._collect(end, place, combine, members)
                self._store.set(_left(end), f"{place}/result", found)
            else:  # the first member waits as long, and then names the absent rank
                found = self._get(end + CHECK_S, place, "result", members[0]) or {"absent": members[0]}
        except Unanswered:
            asked = f"rank {self._rank} in {occasion} within {limit_s:g} s"
            text = f"the host of the rendezvous store has not answered {asked}"
            raise CollectiveTimeout(f"{text}: it is stopped, or the network to it is cut") from None
        except DesyncError:
            here = True  # the other rank still has to read where this one was
            raise
        finally:
            if not here:
                with contextlib.suppress(RuntimeError):
                    self._store.set(CHECK_S, f"waiting/{self._rank}", None)
        if "absent" in found:
            where = f"{occasion}, where the ranks compare their programs, within {limit_s:g} s"
            ask = "is it running the same program, and is no part of it under `if rank == 0:`?"
            raise CollectiveTimeout(f"rank {found['absent']} did not come to {where}; {ask}", rank=found["absent"])
        if "places" in found:
            _refuse(dict(zip(members, found["places"], strict=True)))
        return found["result"]

    def _arrive(self, end: float, occasion: str, value: Any, members: Sequence[int]) -> str:
        """Arrive at the next meeting of these members; returns its name in the store."""
        # The store counts the meetings, so another mesh over the same group continues the count.
        ranks = f"{self._name}/{','.join(map(str, members))}"
        number = self._store.add(_left(end), f"{ranks}/count/{self._rank}")
        place = f"{ranks}/{number}"
        self._store.set(_left(end), f"{place}/{self._rank}", [occasion, value])
        if _alone():
            where = {"place": place, "occasion": occasion, "members": list(members)}
            self._store.set(_left(end), f"waiting/{self._rank}", where)
        return place

    def _collect(self, end: float, place: str, combine: Combine, members: Sequence[int]) -> dict[str, Any]:
        """The outcome for the first member: the result, the first absent rank, or the places of all members."""
        given = []
        for rank in members:
            if (one := self._get(end, place, str(rank), rank)) is None:
                return {"absent": rank}
            given.append(one)
        places = [occasion for occasion, _ in given]
        return {"places": places} if len(set(places)) > 1 else {"result": combine([value for _, value in given])}

    def _get(self, end: float, place: str, key: str, rank: int) -> Any:
        """The value that a rank puts under a key of a meeting; None if it does not do so in time.

        The key is polled: the store's own wait prints a warning twice a second, and does not look at failures.
        """
        apart, seen = 0, ""

        def ask() -> Any:
            return self._store.get(_left(end), f"{place}/{key}")

        def check() -> None:
            nonlocal apart, seen
            left = False
            try:
                self.check(rank)  # first: a rank that has failed may be at another place already
            except (PeerLost, DesyncError):
                if ask():
                    return  # it gave its value before it failed, and that value says more than the failure
                if not seen:
                    raise
                left = True  # it has left that other place, for the same reason
            elsewhere = self._elsewhere(end, place, rank)
            apart, seen = apart + 1 if elsewhere else 0, elsewhere or seen
            if left or apart == _APART:
                own, _ = self._store.get(_left(end), f"{place}/{self._rank}")
                _refuse({self._rank: own, rank: seen})

        return poll(ask, end - time.monotonic(), check, CHECK_S, _LONGEST_S)

    def _elsewhere(self, end: float, place: str, rank: int) -> str:
        """The meeting in which a rank waits for this one, where this one has not arrived at it; otherwise ""."""
        if not _alone():
            return ""
        there = self._store.get(_left(end), f"waiting/{rank}")
        if there is None or there["place"] == place or self._rank not in there["members"]:
            return ""
        came = self._store.get(_left(end), f"{there['place']}/{self._rank}") is not None
        return "" if came else f"{there['occasion']}"


def _alone() -> bool:
    """Whether this is the main thread, which is at one place of the program at a time."""
    return threading.current_thread() is threading.main_thread()


def _refuse(places: dict[int, str]) -> NoReturn:
    for rank, place in places.items():
        if place == LEAVES:
            left = f"rank {rank} left the loop over its batches, and others have not; to end it on all ranks at once"
            raise PeerLost(f"{left}, call stop() on the loop, or leave it on all ranks after the same step", rank=rank)
    first = next(iter(places.values()))
    odd = next((rank for rank, place in places.items() if place != first), next(reversed(places)))
    where = ", ".join(f"rank {rank} in {place}" for rank, place in places.items())
    text = f"the ranks are at different places in the program: {where}; run the same program on all ranks"
    raise DesyncError(text, rank=odd)


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.1)
