"""The record of a step: the scalars that each rank sends with its gradients, or beside them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..groups._mesh import Mesh
from ..transforms.layout._buckets import Bucket
from ..transforms.transform._lane import NONFINITE, lane_dtype, step_lane
from ._consistency import sum_names
from ._record import Record


class StepRecord(Record):
    """The record of the steps of one rank, summed over some axes; see `step_lane` for its names."""

    dtype: torch.dtype
    device: torch.device
    names: tuple[str, ...]

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        super().__init__(mesh, axes, ())
        self.names, self._sums = step_lane(self.ranks), list[str]()  # the names in aux["sum"], sorted

    def agree(self, values: dict[str, Any]) -> bool:
        """Agree on the names in the first step: only ranks with a batch know the names of aux["sum"].

        Returns:
            Whether any rank knew them.
        """
        found = sum_names(self.mesh, self.axes, _sums_in(values) if values["weight"] else None)
        self.names, self._sums = step_lane(self.ranks, found or ()), list(found or ())
        return found is not None

    def fit(self, layout: tuple[Bucket, ...]) -> None:
        """Take the dtype and the device that go with these buckets."""
        self.dtype = lane_dtype(bucket.dtype for bucket in layout)
        self.device = layout[0].device if layout else torch.device("cpu")

    def check(self, values: dict[str, Any]) -> None:
        """Raise ValueError unless aux["sum"] has the names of the first step."""
        if not values["weight"]:
            return
        have, want = sorted(_sums_in(values)), self._sums
        if have != want:
            raise ValueError(
                f"aux['sum'] has the names {have}, but in the first step it had {want}; they must stay the same"
            )

    def complete(self, values: dict[str, Any], step_id: float, has_next: float = 0.0) -> dict[str, Any]:
        """This rank's record, from its `own_values`.

        Args:
            step_id: The number of the step, see `StepIds`.
            has_next: See `Requests.write`.
        """
        known, bad = {**values, "has_next": has_next, "step_id": step_id}, values.get("bad", 0.0)
        own = {name: known.get(name, 0.0) for name in self.names}
        return own if type(bad) is float and not bad else self.flagged(own, NONFINITE, bad)

    def left_out(self, values: dict[str, Any], left_out: Any) -> dict[str, Any]:
        """A record whose bit means that this rank left out the step before, and not that the present one is bad.

        Args:
            left_out: 1 where this rank has left it out, otherwise 0.
        """
        own = {name: value for name, value in values.items() if not name.startswith(NONFINITE)}
        return self.flagged(own, NONFINITE, left_out)

    def once(self, sums: dict[str, Any], step_id: float) -> dict[str, Any]:
        """The sums of one reduction.

        Several reductions in a row may have added up the record several times; `step_id` tells how often, and all other sums
        are divided by that.
        """
        times = sums["step_id"] / (self.ranks * step_id)
        times = torch.round(times).clamp(min=1) if isinstance(times, Tensor) else max(round(times), 1)
        # `step_id` stays as it is: it shows where the ranks have called different steps.
        return {name: value if name == "step_id" else value / times for name, value in sums.items()}


def own_values(
    share: float, weight: float, loss: Tensor | None, sums: dict[str, Any], window: dict[str, Any]
) -> dict[str, Any]:
    """What a rank knows before its gradients, added to that of earlier calls of the window.

    Args:
        share: Its share in the mean.
        sums: The user's sums.
        window: The values of the earlier calls.
    """
    value: Any = 0.0 if loss is None else weight * host_number(loss.detach())
    own: dict[str, Any] = {"total": share, "weight": weight, "loss": value}
    if isinstance(value, Tensor):
        own["bad"] = (~torch.isfinite(value)).to(torch.float64)
    else:
        own["bad"] = float(not math.isfinite(value))
    own.update({f"sum.{name}": v for name, v in sums.items()})
    if window:
        own = {name: own.get(name, 0.0) + window.get(name, 0.0) for name in {**window, **own}}
        bad = own["bad"]
        own["bad"] = torch.clamp(bad, max=1.0) if isinstance(bad, Tensor) else min(bad, 1.0)
    return own


def host_number(value: Tensor) -> Any:
    """A 0-d tensor on the CPU as a number; any other, whose value would have to be awaited, as a float64 tensor."""
    return float(value.item()) if value.device.type == "cpu" else value.detach().to(torch.float64)


def _sums_in(names: Any) -> list[str]:
    return [name.removeprefix("sum.") for name in names if name.startswith("sum.")]
