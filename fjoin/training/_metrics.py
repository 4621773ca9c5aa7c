"""The metrics of a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from ..buckets import Storage
from ..groups import Communicator
from ..step import HookState
from ..transforms.combinators import NormState, label_of
from ..transforms.optimizers import InjectState, value_at


class Metrics:
    """The scalars that were summed with the gradients of one step; made by each call of a `TrainStep`.

    They are the same on all ranks, except `aux`.

    Reading a number waits for the device, on this rank only. It never raises for a step that was not finite, whose loss
    may be NaN: all ranks raise for it at the same place, in a later step or at the end of the loop. In the calls of an
    accumulation window before the last one nothing is sent: `stepped` is False and the numbers are NaN.

    Attributes:
        step: The step's number, from 0; the state after it has `state.step` one higher.
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
        """The sum of all ranks' weights; 0 if no rank had input."""
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

        - Of all ranks: `loss`, `weight`, `ranks` (their number), in `fjoin.elastic` the `generation`, and the sums of
          `loss_fn` by their names, behind `sum/` where another number has that name; `lr/<label>` for each label of a
          partition, which is its pattern, or its first pattern and the number of the others, as in `lr/head.*+2`; `lr`,
          where all have one rate;
          `grad_norm`, the norm of the reduced gradients before they are clipped, where the step computes it
          (`clip_by_global_norm` or `record_norm` after the reduction); for pipelines that leave steps out `skipped`,
          the number of those so far, and `loss_scale`.
        - Of this rank, each since the step before: `rank/step_s`, the seconds in calls of the step; `rank/sent_bytes`,
          as `explain` counts them; `rank/waited_s`, the seconds for which the host has waited for messages. Simulated
          ranks have only the first.

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
        rates = {value for name, value in others.items() if name.startswith("lr/")}
        numbers |= {"lr": rates.pop()} if len(rates) == 1 else {}
        numbers |= {f"sum/{name}" if name in numbers else name: value for name, value in self.sums.items()}
        return {f"{prefix}{name}": value for name, value in numbers.items()}

    def __repr__(self) -> str:
        return f"Metrics(step={self.step}, loss={self.loss:.6g}, weight={self.weight:g})"


class Meter:
    """Measures the calls of this rank that make up a step."""

    def __init__(self, mesh: Communicator) -> None:
        self._traffic, self._seconds = mesh.traffic, 0.0
        self._simulated = any(axis.simulated for axis in mesh.axes.values())  # whose messages are not counted

    def begin(self, within: bool) -> None:
        """A call begins.

        Args:
            within: Whether its window has begun already.
        """
        self._start = time.perf_counter()
        if not within:
            self._seconds = 0.0
            self._sent, self._waited = self._traffic.sent_bytes, self._traffic.waited_ns

    def end(self) -> dict[str, float]:
        """A call ends; name -> the numbers of its window so far."""
        self._seconds += time.perf_counter() - self._start
        if self._simulated:
            return {"rank/step_s": self._seconds}
        return {
            "rank/step_s": self._seconds,
            "rank/sent_bytes": float(self._traffic.sent_bytes - self._sent),
            "rank/waited_s": (self._traffic.waited_ns - self._waited) / 1e9,
        }


class LearningRates:
    """The learning rates of a step, to be looked up when they are shown."""

    def __init__(self) -> None:
        self._slots: Any = None
        self._parts: dict[str, tuple[Any, Any]] = {}  # name -> the argument lr, and a state that counts the steps

    def __call__(self, storage: Storage, step: int, skipped: Any) -> dict[str, Callable[[], Any]]:
        """The rates of the next step: "lr", or "lr/<label>" for each part of a partition; functions of no argument.

        Args:
            step: The number of steps so far, for optimizers that count them on a device.
            skipped: How many of these were left out; a number, or a 0-d tensor that nothing writes into.
        """
        if self._slots is not storage.slots:
            states, self._slots, self._parts = storage.states_of_parts(), storage.slots, {}
            for path in storage.shapes:
                part = storage.optimizer.at(path)
                if id(part) in states and (hyper := _hyper(part)) is not None:
                    self._parts["/".join(["lr", *_labels(storage.optimizer, path)])] = hyper, states[id(part)]
        return {name: _rate(hyper, state, step, skipped) for name, (hyper, state) in self._parts.items()}


def _labels(optimizer: Any, path: str) -> Iterator[str]:
    """The labels of a parameter in a partition, and in those inside it and inside wrappers."""
    for _, value in optimizer.spec.args:
        if optimizer.select is not None and isinstance(value, Mapping):
            patterns = label_of(value, path)
            rest = "" if isinstance(patterns, str) or len(patterns) == 1 else f"+{len(patterns) - 1}"
            yield patterns if isinstance(patterns, str) else f"{patterns[0]}{rest}"
            yield from _labels(value[patterns], path)
        elif hasattr(value, "step_param"):
            yield from _labels(value, path)


def _hyper(part: Any) -> Any:
    """The argument lr of an optimizer, or of the one inside it; None if it has none."""
    inside = (_hyper(value) for _, value in part.spec.args if hasattr(value, "step_param"))
    return next((value for name, value in part.spec.args if name == "lr"), next(inside, None))


def _rate(hyper: Any, state: Any, step: int, skipped: Any) -> Callable[[], Any]:
    """The rate of an optimizer that is no partition."""
    while not isinstance(state, InjectState) and hasattr(state, "inner"):
        state = state.inner
    if isinstance(state, InjectState) and "lr" in state.hyperparameters:
        rate = state.hyperparameters["lr"]
        return lambda: rate
    count = getattr(state, "step", None)
    if isinstance(count, Tensor) and count.device.type == "cpu":
        step, skipped = int(count), 0
    return lambda: value_at(hyper, torch.tensor(float(step - int(skipped)), device="cpu"))


class RecordedNorms:
    """Reads the norms that stages keep in their states. Pipelines without such stages are looked at once."""

    def __init__(self) -> None:
        self._kept: bool | None = None

    def __call__(self, hook: Any, after: Any) -> dict[str, Tensor]:
        """Name -> norm.

        Args:
            hook: The state of the hook, as a step stores it.
            after: The state of the transform after the optimizer.
        """
        if self._kept is False:
            return {}
        states: Any = [hook.rest if isinstance(hook, HookState) else hook, after]
        nodes = optree.tree_leaves(states, is_leaf=lambda node: isinstance(node, NormState))
        norms = [node.norm for node in nodes if isinstance(node, NormState)]
        self._kept = bool(norms)
        return {"grad_norm": norms[-1]} if norms else {}
