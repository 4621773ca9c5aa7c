"""How the ranks of a run with a fault end, and everything that is wrong with it."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import fjoin
from tests.ranks import Ranks

from .faulty_run import SHORT_S, SURVIVED, Fault, run

HANG_S = 25.0  # for time-outs of 2 s, on a busy machine
GONE = ("kill", "exit", "sys.exit", "stop")  # kinds after which the rank itself reports nothing
ALIKE = {"nonfinite": fjoin.NonFinite, "other settings": fjoin.DesyncError}  # raised by all ranks


class End(NamedTuple):
    """How a rank ended.

    Attributes:
        seconds: Since the fault.
        kind, text, rank, step: Of the error, or None and "".
        digests, last: Of the parameters after each step, and at the end.
    """

    seconds: float
    kind: Any
    text: str
    rank: Any
    step: Any
    digests: list[str]
    last: str


class Outcome(NamedTuple):
    """How the ranks of one run ended.

    Attributes:
        hit: Whether the fault happened.
        hung: The ranks that have not reported in time.
    """

    hit: bool
    ends: dict[int, End]
    hung: list[int]


def inflict(fault: Fault) -> Outcome:
    silent = {fault.rank} if fault.kind in GONE else set()
    ends: dict[int, Any] = {}
    at = None
    with Ranks(fault.ranks, run, fault) as ranks:
        limit = time.monotonic() + fault.timeout_s + HANG_S
        awaited = set(range(fault.ranks)) - silent
        while awaited - ends.keys():
            try:
                rank, when, value = ranks.next(max(0.0, limit - time.monotonic()))
            except AssertionError:
                break
            if value == "fault":
                at = when
            else:
                ends[rank] = (when, *value)
                if rank in silent:  # the fault's place was not reached
                    break
    start = at if at is not None else 0.0
    return Outcome(
        at is not None,
        {rank: End(when - start, *rest) for rank, (when, *rest) in ends.items()},
        sorted(awaited - ends.keys()),
    )


def problems(fault: Fault, outcome: Outcome) -> list[str]:
    """Everything that is wrong with the end of a run, in words."""
    found = [f"rank {rank} hangs" for rank in outcome.hung]
    ends = outcome.ends
    longest = max((end.digests for end in ends.values()), key=len, default=[])
    for rank, (_, kind, text, blamed, _, digests, last) in ends.items():
        if digests != longest[: len(digests)]:
            found.append(f"the states of rank {rank} differ from those of other ranks")
        if digests and last != digests[-1]:
            found.append(f"the state that rank {rank} is left with, {last!r}, is not that of a completed step")
        if fault.kind in ALIKE:
            fine = kind is ALIKE[fault.kind]
        elif fault.kind in SURVIVED:
            fine = kind is None
        elif rank == fault.rank:
            own = {"exception": ValueError, "interrupt": KeyboardInterrupt, "step twice": fjoin.JoinError}
            fine = kind is own.get(fault.kind)
        else:
            fine = kind is not None and issubclass(kind, (fjoin.PeerLost, fjoin.CollectiveTimeout))
        # Of two ranks with different settings neither is known to be the odd one.
        if rank != fault.rank and blamed not in (None, fault.rank) and (fault.ranks > 2 or fault.kind not in ALIKE):
            found.append(f"rank {rank} blames rank {blamed}: {text[:200]}")
        if not fine:
            found.append(f"rank {rank} ends with {kind and kind.__name__}: {text[:200]}")
    return found


def times_of_notice(fault: Fault, outcome: Outcome) -> list[float]:
    """The seconds after which the other ranks have ended, where a fault ends them before a time-out.

    Torch's reducer holds the group of a module, so it stays open after an error: there a rank that exchanges nothing with the lost
    one waits until the others end, which they do not in these runs.
    """
    if not outcome.hit or fault.kind in ("stop", *SURVIVED) or fault.timeout_s <= SHORT_S:
        return []
    ends = {rank: end for rank, end in outcome.ends.items() if rank != fault.rank}
    if fault.program == "ddp.register" and fault.ranks > 3:
        ends = {rank: end for rank, end in ends.items() if end.kind is not fjoin.CollectiveTimeout}
    return [end.seconds for end in ends.values()]
