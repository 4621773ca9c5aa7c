"""The choices for the blocks of a function that take the least time within a number of bytes."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

_STATES = 2048  # partial plans that are followed at once


class Choice(enum.Enum):
    """What happens to a block."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


class Cost(NamedTuple):
    """What a choice for a block costs.

    held: Bytes that are kept from the forward to the backward pass.
    extra: Bytes more in the block's backward pass.
    seconds: Time more than with KEEP.
    """

    held: int
    extra: int
    seconds: float


def plan(blocks: Sequence[dict[Choice, Cost]], budget: int) -> list[Choice] | None:
    """The choice for each block, in the order of the forward pass, that takes the least time.

    In the backward pass of a block what the blocks before it keep is there, and what the blocks after it kept is gone.

    Args:
        blocks: What each choice costs.
        budget: The bytes that may be there at any time.

    Returns:
        None if nothing is within the budget.
    """
    states: list[tuple[int, float, Any]] = (
        [(0, 0.0, None)] if budget >= 0 else []
    )  # bytes held so far, seconds, (choice, the state before)
    for block in blocks:
        new = [
            (held + cost.held, seconds + cost.seconds, (choice, chosen))
            for held, seconds, chosen in states
            for choice, cost in block.items()
            if held + cost.held + cost.extra <= budget
        ]
        states = _best(new, budget)
    if not states:
        return None
    chosen, out = min(states, key=lambda state: state[1])[2], []
    while chosen is not None:
        choice, chosen = chosen
        out.append(choice)
    return out[::-1]


def _best(states: list[tuple[int, float, Any]], budget: int) -> list[tuple[int, float, Any]]:
    """The states that no other is better than in both bytes and seconds."""
    found: list[tuple[int, float, Any]] = []
    for state in sorted(states, key=lambda state: state[:2]):
        if not found or state[1] < found[-1][1]:
            found.append(state)
    if len(found) <= _STATES:
        return found
    cells = {state[0] * _STATES // (budget + 1): state for state in found}  # the fastest of each cell
    return list({id(state): state for state in (found[0], *cells.values())}.values())  # and the smallest of all


def least(blocks: Sequence[dict[Choice, Cost]]) -> int:
    """The smallest budget that a plan is within."""
    low, high = 0, sum(max(cost.held + cost.extra for cost in block.values()) for block in blocks)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if plan(blocks, middle) is not None else (middle + 1, high)
    return low
