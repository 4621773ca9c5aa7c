"""Who trains together: records in a store that outlives all ranks."""

from __future__ import annotations

import contextlib
import datetime
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .._errors import PeerLost
from ..groups import Processes, Store, poll

SILENT_S = 5.0  # a process on another host has ended if it gives no sign of life for so long
_LOOK_S = 0.01  # between two looks at the records
_WATCH_S = 0.2  # between two looks of the thread
_BEAT_S = 1.0  # between two signs of life


class RunStore(Store):
    """The store of a run, at an address.

    Raises:
        PeerLost: it does not answer.
    """

    def __init__(self, address: str, store: Any) -> None:
        super().__init__(store)
        self._address, self.store = address, store

    def ask(self, seconds: float, call: Callable[[], Any]) -> Any:
        try:
            return super().ask(seconds, call)
        except RuntimeError as error:
            raise PeerLost(
                f"the process that holds the store at {self._address} does not answer: it has ended or is stopped, or the network to it "
                f"is cut; without it no rank can be replaced. {error}"
            ) from error

    @classmethod
    def at(cls, address: str, timeout_s: float) -> RunStore:
        """A connection of its own to the store at host:port."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"the store of elastic must be given as host:port, got {address!r}")
        limit = datetime.timedelta(seconds=timeout_s)
        try:
            return cls(address, TCPStore(host, int(port), None, False, limit, wait_for_workers=False))
        except RuntimeError as error:
            raise PeerLost(f"no store answers at {address} within {timeout_s:g} s; start it first. {error}") from error


class Membership:
    """The processes that train together, in generations, as one of them sees them.

    Processes have numbers, in the order in which they came. An error is only a hint: it lets a member ask for the next
    generation. Its record is written once, and whoever is not in it asks for the one after it. In the store:

    processes         how many have come
    process/<n>       which process it is, see `Processes`
    asks/<n>          the newest generation that it asks for; -1 once it has left
    beat/<n>          a count that grows while it lives
    wanted/<g>        somebody asks for this generation
    members/<g>       the numbers of its members, in the order of their ranks
    here/<g>/<n>      the member is ready to connect
    ended             why the run has ended: "" if the training is complete, else a failure

    Attributes:
        number: That of this process.
        generation: The generation that this process is in, from 1; 0 before.
        members: Its members.

    Args:
        store, watched: Connections to the store, of this thread and of the one that watches.
        ranks: How many are wanted; more of them wait.
        at_least: How many go on where some are lost.
        timeout_s: How long members that live are waited for, and newcomers where there are none.
    """

    def __init__(self, store: RunStore, watched: RunStore, ranks: int, at_least: int, timeout_s: float) -> None:
        self.store, self._watched, self._timeout_s = store, watched, timeout_s
        self._ranks, self._at_least = ranks, at_least
        self.generation, self.members = 0, list[int]()
        self._processes = Processes(store)
        self._beats = dict[int, tuple[Any, float]]()  # the last sign of life of those on other hosts, and its time
        self.number = store.add(timeout_s, "processes")
        self._set(f"process/{self.number}", self._processes.own)
        self._set(f"asks/{self.number}", 0)

    def _set(self, key: str, value: Any) -> None:
        self.store.set(self._timeout_s, key, value)

    def _get(self, *keys: str) -> list[Any]:
        return self.store.get_all(self._timeout_s, list(keys))

    def silent(self) -> set[int]:
        """The numbers of the processes on other hosts that give no sign of life."""
        return {number for number, (_, since) in list(self._beats.items()) if time.monotonic() - since > SILENT_S}

    def _ended(self, numbers: list[int]) -> set[int]:
        return self._processes.ended(numbers) | (self.silent() & set(numbers))

    def watch(self, look: Callable[[bool], None], closed: threading.Event) -> None:
        """Give signs of life, and take those of others, until closed or the store is lost.

        Args:
            look: Called several times a second with whether somebody waits for the next generation, which has room.
        """
        beat, last, store, limit_s = 0, -math.inf, self._watched, self._timeout_s
        with contextlib.suppress(PeerLost):
            while not closed.wait(_WATCH_S):
                if time.monotonic() - last > _BEAT_S:
                    beat, last, others = beat + 1, time.monotonic(), self._processes.elsewhere()
                    store.set(limit_s, f"beat/{self.number}", beat)
                    beats = store.get_all(limit_s, [f"beat/{number}" for number in others])
                    for number, found in zip(others, beats, strict=True):
                        if number not in self._beats or self._beats[number][0] != found:
                            self._beats[number] = found, time.monotonic()
                waits = store.get(limit_s, f"wanted/{self.generation + 1}")
                look(bool(waits) and len(self.members) < self._ranks)

    def form(self) -> bool:
        """Wait for the next generation that this process is in; False if the training is complete.

        Only members of the last generation propose the next one as long as one of them lives, so that no newcomer
        trains beside them.

        Raises:
            PeerLost: the run has failed; too few are left; the store is lost.
        """
        wanted, before, since, asked = self.generation + 1, self.members, time.monotonic(), 0
        while True:
            members, ended, count = self._get(f"members/{wanted}", "ended", "processes")
            if ended is not None:
                if ended:
                    raise PeerLost(ended)
                return False
            if members is None:
                if asked != wanted:
                    asked = wanted
                    self._set(f"asks/{self.number}", wanted)
                    self._set(f"wanted/{wanted}", True)
                self._propose(wanted, before, count, time.monotonic() - since > self._timeout_s)
                time.sleep(_LOOK_S)
            elif self.number in members:
                self.generation, self.members = wanted, members
                return True
            else:
                wanted, before, since = wanted + 1, members, time.monotonic()

    def _propose(self, wanted: int, before: list[int], count: int, late: bool) -> None:
        """Write the record of the next generation, where it is time and this process may."""
        numbers = list(range(1, count + 1))
        asks = dict(zip(numbers, self._get(*(f"asks/{number}" for number in numbers)), strict=True))
        left = self._ended(numbers) | {number for number in numbers if asks[number] == -1}
        ready = [number for number in numbers if number not in left and (asks[number] or 0) >= wanted]
        living = [number for number in before if number not in left]
        if living and self.number not in living:
            return
        if (late or set(living) <= set(ready)) and len(ready) >= (self._at_least if living or late else self._ranks):
            ready.sort(key=lambda number: (*before, number).index(number))  # members keep their order
            self.store.set_first(self._timeout_s, f"members/{wanted}", ready[: self._ranks])
        elif late:
            raise PeerLost(f"{len(ready)} of at least {self._at_least} ranks have come within {self._timeout_s:g} s")

    def arrive(self) -> None:
        """Wait until all members are here, since a process that connects looks at nothing else.

        Raises:
            PeerLost: one of them has ended, or does not come in time.
        """
        self._set(f"here/{self.generation}/{self.number}", True)
        keys = [f"here/{self.generation}/{number}" for number in self.members]

        def check() -> None:
            if self._ended(self.members):
                raise PeerLost("a member of the generation has ended before it was connected")

        if not poll(lambda: all(self._get(*keys)), self._timeout_s, check, _LOOK_S, _LOOK_S):
            raise PeerLost(f"not all members have come to connect within {self._timeout_s:g} s")

    def end_run(self, failure: str) -> None:
        """Write that the run has ended, for all, unless the store is lost: "" if the training is complete."""
        with contextlib.suppress(PeerLost):
            self.store.set_first(self._timeout_s, "ended", failure)

    def leave(self) -> None:
        """Write that this process takes part no more, though it may live on."""
        with contextlib.suppress(PeerLost):
            self._set(f"asks/{self.number}", -1)
