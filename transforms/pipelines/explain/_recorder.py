"""An axis that sends nothing and records the messages."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..._axis_env import Axis
from ...axes._order import to_order
from ...axes._sent import Message, sent_bytes


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
            self._notes.append(Message(op, self.name, x.dtype, payload, sent_bytes(op, payload, self.size, arg)))
            return x.new_zeros(sum(arg[1]), *x.shape[1:])
        self._notes.append(Message(op, self.name, sent.dtype, payload, sent_bytes(op, payload, self.size)))
        if op == "all_gather":
            return x.new_zeros(self.size, *x.shape)
        return x.new_zeros(x.shape[1:]) if op == "psum_scatter" else torch.zeros_like(x)

    def joint(self, axes: tuple[str, ...]) -> Recorder | None:
        if axes != tuple(self._whole):
            return None
        return type(self)(" x ".join(axes), math.prod(self._whole.values()), self._notes, self._whole)
