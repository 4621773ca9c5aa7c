"""The step's lane: the scalars that each rank sends with its gradients (piggybacked), and their buffer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..groups._consistency import sum_names
from ..groups._mesh import Mesh
from ..transforms._axis_env import Done, Work, bind_axes
from ..transforms._lane import NONFINITE, encode_lane, host_words, lane_dtype, rank_bit, step_lane, words_per_scalar
from ..transforms._tree import to_device
from ..transforms.axes._collectives import axis_index
from ..transforms.layout._buckets import Bucket


class StepLane:
    """The scalars of one rank's steps, summed over some axes.

    Attributes:
        axes: The axes; there may be none.
        ranks: The number of ranks along them.
        names: The names of the scalars in the order in which they travel, once the ranks have agreed on them.
        buffer: The buffer that is sent: the end of a bucket's buffer, or one of its own; None where the hook
            sends the scalars in its own messages.
        dtype: The dtype of the buffer.
        step_id: The number of this step, see `StepIds`; 0 where none travels.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self._mesh, self.axes = mesh, axes
        self.ranks = math.prod(axis.size for axis in mesh.over(axes))
        with bind_axes(mesh.axes):
            self._rank = int(axis_index(axes)) if axes else 0
        self.names = step_lane(self.ranks)
        self.buffer: Tensor | None = None
        self.dtype = torch.float32
        self.step_id = 0.0
        self._device: torch.device | None = None

    def agree(self, values: dict[str, Any]) -> bool:
        """Agree on the names in the first step: only ranks with a batch know the names of aux["sum"].

        Returns:
            Whether any rank knew them.
        """
        own = [name.removeprefix("sum.") for name in values if name.startswith("sum.")]
        found = sum_names(self._mesh, self.axes, own if values["weight"] else None)
        self.names = step_lane(self.ranks, found or ())
        return found is not None

    def fit(self, layout: tuple[Bucket, ...]) -> int:
        """Take the dtype that goes with these buckets; returns the number of words to be sent."""
        self.dtype, self._device = lane_dtype(bucket.dtype for bucket in layout), layout[0].device if layout else None
        return len(self.names) * words_per_scalar(self.dtype)

    def travel_alone(self, words: int) -> None:
        """Make a buffer for a message of its own."""
        self.buffer = torch.zeros(words, dtype=self.dtype, device=self._device)

    def alone(self, layout: tuple[Bucket, ...]) -> Tensor:
        """A buffer for messages beside those of the hook."""
        words = self.fit(layout)
        return torch.zeros(words, dtype=self.dtype, device=self._device)

    @property
    def sent(self) -> Tensor:
        """The buffer that is written and summed."""
        assert self.buffer is not None
        return self.buffer

    def values(
        self, share: float, weight: float, loss: Tensor | None, sums: dict[str, Any], window: dict[str, Any]
    ) -> dict[str, Any]:
        """This rank's values, added to its values in earlier calls of the window."""
        value: Any = 0.0 if loss is None else weight * host_number(loss.detach())
        lane: dict[str, Any] = {"total": share, "weight": weight, "loss": value}
        if isinstance(value, Tensor):
            lane["bad"] = (~torch.isfinite(value)).to(torch.float64)
        else:
            lane["bad"] = float(not math.isfinite(value))
        lane.update({f"sum.{name}": v for name, v in sums.items()})
        if window:
            lane = {name: lane.get(name, 0.0) + window.get(name, 0.0) for name in {**window, **lane}}
            bad = lane["bad"]
            lane["bad"] = torch.clamp(bad, max=1.0) if isinstance(bad, Tensor) else min(bad, 1.0)
        return lane

    def mark(self, values: dict[str, Any], bad: Any) -> dict[str, Any]:
        """The complete values, with this rank's bit also set where its gradients are not finite (`bad` is 1)."""
        name, bit = self._bit()
        if isinstance(bad, Tensor):
            return {
                **values,
                name: torch.maximum(to_device(bad.device, torch.as_tensor(values[name]), bad.dtype), bad * bit),
            }
        return {**values, name: max(float(values[name]), bad * bit)}

    def left_out(self, values: dict[str, Any], bad: Any) -> dict[str, Any]:
        """The complete values; this rank's bit means that it left out the step before, and not that this one is bad.

        Args:
            bad: 1 where this rank has left out the step before, otherwise 0.
        """
        name, _ = self._bit()
        return self.mark({**values, name: 0.0}, bad)

    def _bit(self) -> tuple[str, float]:
        word, bit = rank_bit(self._rank)
        return f"{NONFINITE}{word}", bit

    def check(self, values: dict[str, Any]) -> None:
        """Raise ValueError unless aux["sum"] has the names of the first step."""
        have = sorted(n.removeprefix("sum.") for n in values if n.startswith("sum."))
        want = sorted(n.removeprefix("sum.") for n in self.names if n.startswith("sum."))
        if values["weight"] and have != want:
            raise ValueError(
                f"aux['sum'] has the names {have}, but in the first step it had {want}; they must stay the same"
            )

    def complete(self, values: dict[str, Any], has_next: bool = False) -> dict[str, Any]:
        """The values of all names in their order, taken from `values`; 0 for names that it lacks."""
        name, bit = self._bit()
        known = {**values, "has_next": float(has_next), "step_id": self.step_id, name: values["bad"] * bit}
        return {name: known.get(name, 0.0) for name in self.names}

    def send(self, buffer: Tensor | None = None) -> Work:
        """Start summing a buffer, by default the lane's own."""
        return self._mesh.reduce_(self.sent if buffer is None else buffer, self.axes) if self.axes else Done()

    def once(self, sums: dict[str, Any]) -> dict[str, Any]:
        """The sums of one reduction, where a later one has summed them again over ranks that already had them."""
        if not self.step_id:
            return sums
        times = sums["step_id"] / (self.ranks * self.step_id)
        times = torch.round(times).clamp(min=1) if isinstance(times, Tensor) else max(round(times), 1)
        # `step_id` stays as it is: it shows where the ranks have called different steps.
        return {name: value if name == "step_id" else value / times for name, value in sums.items()}

    def write(self, values: dict[str, Any], buffer: Tensor | None = None) -> None:
        """Write the values into a buffer, by default the lane's own."""
        buffer = self.sent if buffer is None else buffer
        if buffer.device.type == "cpu" and not any(isinstance(value, Tensor) for value in values.values()):
            buffer.copy_(torch.tensor(host_words(values, buffer.dtype, self.ranks), dtype=buffer.dtype))
        else:
            buffer.copy_(encode_lane(values, buffer.dtype, self.ranks, buffer.device))


def host_number(value: Tensor) -> Any:
    """A 0-d tensor on the CPU as a number; any other, whose value would have to be awaited, as a float64 tensor."""
    return float(value.item()) if value.device.type == "cpu" else value.detach().to(torch.float64)
