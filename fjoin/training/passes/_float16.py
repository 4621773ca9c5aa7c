"""The power of two that makes sums of weight * gradient fit float16."""

from __future__ import annotations

import math

from ...agreement._step_check import StepCheck
from ...buckets._flat_params import Storage
from ...groups._mesh import Mesh
from ...reducer._all_reduce import power_near
from ...reducer._step_hook import StepHook


class Units:
    """The factor that scales gradients in messages, for each accumulation window.

    Sums of weight * gradient overflow float16 from weights of thousands on. For float16 the unit is near
    1 / (sum of the weights). This is the sum of the newest step for which all ranks know it; before the first such step
    the ranks exchange their weights in the store. So the unit is the same on all ranks, and changes no bit of results
    that float16 holds in full precision.

    Args:
        hook: Its unit serves all other dtypes.
        weighs: Whether batches have weights.
        calls: The number of calls in a window.
    """

    def __init__(
        self, hook: StepHook, step_check: StepCheck, mesh: Mesh, axes: tuple[str, ...], weighs: bool, calls: int
    ) -> None:
        self._usual, self._scales, self._step_check = hook.unit, hook.by_weight and weighs, step_check
        self._mesh, self._axes, self._calls = mesh, axes, calls
        self._first = 0.0  # the sum of the weights that the ranks have exchanged

    def of_window(self, storage: Storage, weight: float) -> float:
        """The unit of a window.

        Args:
            weight: This rank's weight in the window's first call.
        """
        if not (storage.float16 and self._scales):
            return self._usual
        total = self._step_check.weight
        if total is None:
            if not self._first:
                self._first = self._mesh.exchange("the first step", weight * self._calls, sum, self._axes)
            total = self._first
        return power_near(total) if 0 < total < math.inf else self._usual
