"""The step's lane: what each rank says along with its gradients, and where that is written."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._agree import sum_names
from ._loss import host_number
from ._mesh import Mesh
from .transforms._layout import Bucket
from .transforms._tree import on
from .transforms.sync._lane import encode_lane, host_words, lane_dtype, rank_bit, step_lane, words_per_scalar


class StepLane:
    """The scalars of one rank's steps.

    Attributes:
        names: The scalars in the order in which they travel, once the ranks have agreed on them.
        wire: Where they are written to be sent: behind the gradients of a bucket, or a buffer of its
            own; None where the hook takes them along by itself.
        dtype: Of what is sent.
        step_id: Which step of its mesh this is.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...], ranks: int, rank: int) -> None:
        self._mesh, self._axes, self._ranks, self._rank = mesh, axes, ranks, rank
        self.names: tuple[str, ...] = ()
        self.wire: Tensor | None = None
        self.dtype = torch.float32
        self.step_id = 0.0
        self._device: torch.device | None = None

    def agree(self, values: dict[str, Any]) -> bool:
        """Settle the names in the first step: only ranks with a batch know those of aux["sum"].

        Returns:
            Whether any rank knew them.
        """
        own = [name.removeprefix("sum.") for name in values if name.startswith("sum.")]
        found = sum_names(self._mesh, self._axes, own if values["weight"] else None)
        self.names = step_lane(self._ranks, found or ())
        return found is not None

    def fit(self, layout: tuple[Bucket, ...]) -> int:
        """Take the dtype that goes with these buckets; the number of words to be sent."""
        self.dtype, self._device = lane_dtype(bucket.dtype for bucket in layout), layout[0].device if layout else None
        return len(self.names) * words_per_scalar(self.dtype)

    def travel_alone(self, words: int) -> None:
        """Be sent in a message of its own."""
        self.wire = torch.zeros(words, dtype=self.dtype, device=self._device)

    @property
    def sent(self) -> Tensor:
        """What is written and summed."""
        assert self.wire is not None
        return self.wire

    def values(
        self, share: float, weight: float, loss: Tensor | None, sums: dict[str, Any], window: dict[str, Any]
    ) -> dict[str, Any]:
        """What this rank has to say, added to what it had to say in earlier calls of the window."""
        value: Any = 0.0 if loss is None else weight * host_number(loss.detach())
        lane: dict[str, Any] = {"total": share, "weight": weight, "loss": value}
        if isinstance(value, Tensor):
            bad: Any = (~torch.isfinite(value)).to(torch.float64)
        else:
            bad = float(not math.isfinite(value))
        mask, bit = self._bit()
        lane[mask] = bad * bit
        lane.update({f"sum.{name}": v for name, v in sums.items()})
        if window:
            lane = {name: lane.get(name, 0.0) + window.get(name, 0.0) for name in {**window, **lane}}
            lane[mask] = torch.clamp(lane[mask], max=bit) if isinstance(lane[mask], Tensor) else min(lane[mask], bit)
        return lane

    def mark(self, values: dict[str, Any], bad: Any) -> dict[str, Any]:
        """Say that this rank's gradients are not finite, if they are not."""
        mask, bit = self._bit()
        if isinstance(bad, Tensor):
            return {**values, mask: torch.maximum(on(bad.device, torch.as_tensor(values[mask]), bad.dtype), bad * bit)}
        return {**values, mask: max(float(values[mask]), bad * bit)}

    def _bit(self) -> tuple[str, float]:
        word, bit = rank_bit(self._rank)
        return f"nonfinite{word}", bit

    def complete(self, values: dict[str, Any], has_next: bool) -> dict[str, Any]:
        """All names, in their order.

        Raises:
            ValueError: aux["sum"] has not the names of the first step.
        """
        have = sorted(n.removeprefix("sum.") for n in values if n.startswith("sum."))
        want = sorted(n.removeprefix("sum.") for n in self.names if n.startswith("sum."))
        if values["weight"] and have != want:
            raise ValueError(
                f"aux['sum'] has the names {have}, but in the first step it had {want}; they must stay the same"
            )
        values["has_next"], values["step_id"] = float(has_next), self.step_id
        return {name: values.get(name, 0.0) for name in self.names}

    def write(self, values: dict[str, Any]) -> None:
        wire = self.sent
        if wire.device.type == "cpu" and not any(isinstance(value, Tensor) for value in values.values()):
            wire.copy_(torch.tensor(host_words(values, wire.dtype, self._ranks), dtype=wire.dtype))
        else:
            wire.copy_(encode_lane(values, wire.dtype, self._ranks, wire.device))
