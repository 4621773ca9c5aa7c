"""An axis that sends nothing and records the messages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._axis_env import Axis
from ...axes._order import to_order
from ._explanation import Message

# The bytes that one rank sends, in units of its payload, on an axis of n ranks.
_SENT: dict[str, Callable[[int], float]] = {
    "psum": lambda n: 2 * (n - 1) / n,
    "pmax": lambda n: 2 * (n - 1) / n,
    "pmin": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "psum_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "pbroadcast": lambda n: (n - 1) / n,
    "ppermute": lambda n: 1,
}


class Recorder(Axis):
    """An axis that records messages and returns values of the right shape."""

    def __init__(self, name: str, size: int, notes: list[Message], whole: dict[str, int]) -> None:
        self.name, self.size, self._notes, self._whole = name, size, notes, whole

    def index(self) -> Tensor:
        return torch.tensor(0, device="cpu")

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        sent = to_order(x, op == "pmax") if op in ("pmax", "pmin") else x
        payload = sent.numel() * sent.element_size()
        if op == "all_to_all_single":
            give, take = arg
            share = 1 - give[0] / max(sum(give), 1)  # the rank's part for itself is not sent
            self._notes.append(Message(op, self.name, x.dtype, payload, round(payload * share)))
            return x.new_zeros(sum(take), *x.shape[1:])
        self._notes.append(Message(op, self.name, sent.dtype, payload, round(payload * _SENT[op](self.size))))
        if op == "all_gather":
            return x.new_zeros(self.size, *x.shape)
        return x.new_zeros(x.shape[1:]) if op == "psum_scatter" else torch.zeros_like(x)

    def joint(self, axes: tuple[str, ...]) -> Recorder | None:
        if axes != tuple(self._whole):
            return None
        return type(self)(" x ".join(axes), math.prod(self._whole.values()), self._notes, self._whole)
