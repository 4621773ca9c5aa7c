"""The metrics that a step reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


class Metrics:
    """The scalars that were summed with the gradients of one step; made by each call of a `TrainStep`.

    They are the same on all ranks, except `aux`.

    Reading a number waits for the device, on this rank only. It never raises for a step that was not finite, whose loss may be
    NaN: all ranks raise for it at the same place, in a later step or at the end of the loop. In the calls of an accumulation
    window before the last one nothing is sent: `stepped` is False and the numbers are NaN.

    Attributes:
        step: The step's number, from 0.
        stepped: Whether this call ended a window, so that messages were sent.
        rank: This rank.
        aux: The auxiliary output of this rank's own `loss_fn`; None without a batch.

    Raises:
        PeerLost, CollectiveTimeout: on a device, when a number is read: the step's messages do not arrive.

    >>> from fjoin import transforms as tx
    >>> def loss_fn(params, batch):
    ...     return (params["w"] * batch).mean(), {"sum": {"samples": len(batch)}}
    >>> step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.5)), weight=len)
    >>> state, metrics = step(step.init({"w": torch.tensor(2.0)}), torch.tensor([1.0, 3.0]))
    >>> metrics.loss, metrics.weight, metrics.sums
    (4.0, 2.0, {'samples': 2.0})
    """

    aux: Any
    rank: int
    step: int
    stepped: bool

    __slots__ = ("_comes", "_others", "_sums", "aux", "rank", "step", "stepped")

    def __init__(
        self,
        step: int,
        stepped: bool,
        aux: Any,
        sums: Callable[[], dict[str, float]],
        comes: Callable[[], None],
        others: Mapping[str, Any] | None = None,
        rank: int = 0,
    ) -> None:
        self.step, self.stepped, self.aux, self._sums, self._comes = step, stepped, aux, sums, comes
        self._others, self.rank = others or {}, rank

    def _read(self) -> dict[str, float]:
        self._comes()
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

    def as_dict(self, prefix: str = "") -> dict[str, float]:
        """All numbers of the step, as wandb, TensorBoard, MLflow and tqdm take them. It sends nothing.

        - Of all ranks: `loss`, `weight`, `ranks` (their number), and the sums of `loss_fn` by their names, behind `sum/` where another
          number has that name; `lr`, or `lr/<label>` for each label of a partition; `grad_norm`, the norm of the reduced gradients
          before they are clipped, where the step computes it (`clip_by_global_norm` or `record_norm` behind the reduction); for
          pipelines that leave steps out `skipped`, the number of those so far, and `loss_scale`.
        - Of this rank, each since the step before: `rank/step_s`, the seconds in calls of the step; `rank/sent_bytes`, as
          `explain` counts them; `rank/waited_s`, the seconds for which the host has waited for messages. Simulated ranks have
          only the first.

        Args:
            prefix: Put in front of each name, such as "train/".

        Returns:
            Name -> number; empty in a call that has not stepped.

        >>> from fjoin import transforms as tx
        >>> pipeline = tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), tx.sgd(0.5))
        >>> step = fjoin.train_step(lambda p, x: (p["w"] * x).sum(), pipeline)
        >>> _, metrics = step(step.init({"w": torch.tensor([2.0])}), torch.tensor([3.0]))
        >>> numbers = metrics.as_dict("train/")
        >>> numbers["train/loss"], numbers["train/lr"], numbers["train/grad_norm"], numbers["train/rank/sent_bytes"]
        (6.0, 0.5, 3.0, 0.0)
        """
        if not self.stepped:
            return {}
        others = {name: float(value() if callable(value) else value) for name, value in self._others.items()}
        numbers = {"loss": self.loss, "weight": self.weight, **others}
        numbers |= {f"sum/{name}" if name in numbers else name: value for name, value in self.sums.items()}
        return {f"{prefix}{name}": value for name, value in numbers.items()}

    def __repr__(self) -> str:
        return f"Metrics(step={self.step}, loss={self.loss:.6g}, weight={self.weight:g})"
