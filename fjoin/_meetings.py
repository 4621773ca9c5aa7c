"""Meetings of ranks in the rendezvous store: for values that differ in size, and ranks that may not come."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ._errors import CollectiveTimeout, DesyncError
from ._store import Store, Unanswered

_SHORTEST_S, _LONGEST_S = 1e-3, 0.05  # pauses between two looks at a key
_CHECK_S = 0.2  # between two looks at failures


class Meetings:
    """The meetings of one rank.

    Args:
        store: The ranks' store.
        rank: This rank, as `members` counts it.
        timeout_s: The limit on a meeting.
        check: Raises where another rank has failed.
    """

    def __init__(self, store: Store, rank: int, timeout_s: float, check: Callable[[], None]) -> None:
        self._store, self._rank, self._timeout_s, self._check = store, rank, timeout_s, check

    def exchange(self, occasion: str, value: Any, combine: Callable[[list[Any]], Any], members: Sequence[int]) -> Any:
        """`combine` of the members' JSON values in their order: computed by the first member, the same on all.

        Args:
            occasion: The place in the program, in words.

        Raises:
            DesyncError: a member is at another place in the program.
            CollectiveTimeout: a member does not come in time, or the store does not answer.
        """
        end = time.monotonic() + self._timeout_s
        ranks = ",".join(map(str, members))
        try:
            # Counted in the store: the meetings of another mesh over the same ranks continue the count.
            number = self._store.add(_left(end), f"meetings/{ranks}/{self._rank}")
            place = f"meeting/{ranks}/{number}"
            self._store.set(_left(end), f"{place}/{self._rank}", json.dumps([occasion, value]))
            if self._rank == members[0]:
                found = self._collect(end, place, combine, members)
                self._store.set(_left(end), f"{place}/result", json.dumps(found))
            else:  # the first member waits as long, and then says who is absent
                found = self._get(end + _CHECK_S, f"{place}/result") or {"absent": members[0]}
        except Unanswered:
            raise CollectiveTimeout(
                f"the host of the rendezvous store has not answered rank {self._rank} in {occasion} within "
                f"{self._timeout_s:g} s: it is stopped, or the network to it is cut"
            ) from None
        if "result" not in found:
            self._refuse(occasion, found)
        return found["result"]

    def _collect(
        self, end: float, place: str, combine: Callable[[list[Any]], Any], members: Sequence[int]
    ) -> dict[str, Any]:
        """What the first member finds: the result, the first rank that is absent, or the places of all."""
        given = []
        for rank in members:
            if (one := self._get(end, f"{place}/{rank}")) is None:
                return {"absent": rank}
            given.append(one)
        places = [occasion for occasion, _ in given]
        if len(set(places)) > 1:
            return {"places": places, "members": list(members)}
        return {"result": combine([value for _, value in given])}

    def _get(self, end: float, key: str) -> Any:
        """The value that a rank puts under a key; None if it does not in time."""
        pause, checked = _SHORTEST_S, time.monotonic()
        while (text := self._store.get(_left(end), key)) is None:
            now = time.monotonic()
            if now > end:
                return None
            if now - checked > _CHECK_S:
                self._check()
                checked = now
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
        return json.loads(text)

    def _refuse(self, occasion: str, found: dict[str, Any]) -> NoReturn:
        if "absent" in found:
            raise CollectiveTimeout(
                f"rank {found['absent']} did not come to {occasion}, where the ranks compare their programs, within "
                f"{self._timeout_s:g} s; is it running the same program?",
                rank=found["absent"],
            )
        where = dict(zip(found["members"], found["places"], strict=True))
        odd = next(rank for rank, place in where.items() if place != found["places"][0])
        raise DesyncError(
            f"the ranks are at different places in the program: {', '.join(f'rank {r} in {p}' for r, p in where.items())}; run "
            f"the same program on all ranks",
            rank=odd,
        )


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.1)
