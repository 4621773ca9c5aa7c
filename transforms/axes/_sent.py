"""Messages, and the bytes that a rank sends in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Message(NamedTuple):
    """One message of one rank in one step."""

    collective: str  # its name in transforms: "psum", "all_gather", ...
    axis: str  # the axis, or several joined by " x "
    dtype: torch.dtype  # of the message
    payload_bytes: int  # the input of the collective on one rank
    sent_bytes: int  # the bytes that one rank sends in a ring


# In units of the rank's payload, on an axis of n ranks, of which each sends to its neighbour in a ring.
_SHARES: dict[str, Callable[[int], float]] = {
    "psum": lambda n: 2 * (n - 1) / n,
    "pmax": lambda n: 2 * (n - 1) / n,
    "pmin": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "psum_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "pbroadcast": lambda n: (n - 1) / n,
    "ppermute": lambda n: 1,
}


def sent_bytes(op: str, payload: int, ranks: int, arg: Any = None, rank: int = 0) -> int:
    """The bytes that one rank sends.

    Args:
        op: The name of the collective.
        payload: The bytes of its input on this rank.
        arg: Of all_to_all_single: the rows to each rank, and those from each.
        rank: This rank, whose rows for itself are not sent.
    """
    if op == "all_to_all_single":
        give, _ = arg
        return round(payload * (1 - give[rank] / max(sum(give), 1)))
    return round(payload * _SHARES[op](ranks))
