"""The metrics that a step reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


class Metrics:
    """The scalars that were summed with the gradients of one step, the same on all ranks except `aux`.

    Reading a number reads it from the device. In the calls of an accumulation window before the last
    one nothing is sent: `stepped` is False and the numbers are NaN.

    Attributes:
        step: The step's number, from 0.
        stepped: Whether this call ended a window, so that messages were sent.
        aux: The auxiliary output of this rank's own `loss_fn`; None without a batch.

    Raises:
        NonFinite: on a device, when a number is read: this step was not finite and changed nothing.

    >>> from fjoin import transforms as tx
    >>> def loss_fn(params, batch):
    ...     return (params["w"] * batch).mean(), {"sum": {"samples": len(batch)}}
    >>> step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.5)), weight=len)
    >>> state, metrics = step(step.init({"w": torch.tensor(2.0)}), torch.tensor([1.0, 3.0]))
    >>> metrics.loss, metrics.weight, metrics.sums
    (4.0, 2.0, {'samples': 2.0})
    """

    __slots__ = ("_check", "_sums", "aux", "step", "stepped")

    def __init__(
        self, step: int, stepped: bool, aux: Any, sums: Callable[[], dict[str, float]], check: Callable[[], None]
    ) -> None:
        self.step, self.stepped, self.aux, self._sums, self._check = step, stepped, aux, sums, check

    def _read(self) -> dict[str, float]:
        self._check()
        return self._sums()

    @property
    def weight(self) -> float:
        """The sum of all ranks' weights; 0 where no rank had input."""
        return self._read().get("weight", math.nan)

    @property
    def loss(self) -> float:
        """The loss over all ranks, weighted: sum w_r loss_r / sum w_r; NaN where no rank had input."""
        sums = self._read()
        weight = sums.get("weight", 0.0)
        return sums["loss"] / weight if weight else math.nan

    @property
    def sums(self) -> dict[str, float]:
        """The sums over all ranks of the values that `loss_fn` returned under aux["sum"]."""
        return {k.removeprefix("sum."): v for k, v in self._read().items() if k.startswith("sum.")}

    def __repr__(self) -> str:
        return f"Metrics(step={self.step}, loss={self.loss:.6g}, weight={self.weight:g})"
