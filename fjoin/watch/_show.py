"""The numbers of a run while it trains: a line, a progress bar, or a tracker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from ..training.state._metrics import Metrics

Sink: TypeAlias = Callable[[dict[str, float], int], object]


class Show:
    """Gives the numbers of every so many steps to sinks, on rank 0; made by `show`."""

    def __init__(self, every: int, sinks: list[Sink], prefix: str) -> None:
        self._every, self._sinks, self._prefix = every, sinks, prefix
        self._last: tuple[int, float] | None = None

    def __call__(self, metrics: Metrics, more: Mapping[str, float] | None = None) -> None:
        """Show a step, where one is due.

        Reading numbers waits for a device, so nothing is read in other steps.

        Args:
            metrics: Those of the last call.
            more: Other numbers to show with them, such as those of an evaluation.

        Raises:
            NonFinite: on a device: this step was not finite and changed nothing.
        """
        if metrics.rank or not metrics.stepped or (metrics.step + 1) % self._every:
            return
        numbers, now = metrics.as_dict(self._prefix), time.perf_counter()
        if self._last is not None:
            steps, seconds = metrics.step - self._last[0], now - self._last[1]
            numbers[f"{self._prefix}steps_per_s"] = steps / seconds if seconds > 0 else 0.0
        self._last = metrics.step, now
        numbers |= {f"{self._prefix}{name}": float(value) for name, value in (more or {}).items()}
        for sink in self._sinks:
            sink(dict(numbers), metrics.step)


def show(every: int = 20, to: Iterable[Any] = (print,), prefix: str = "") -> Show:
    """Shows the numbers of every so many steps; on rank 0, without a message.

    Args:
        every: The period, in steps.
        to: Where to: `print` for a line; an object with `set_postfix`, such as a tqdm bar; one with
            `add_scalar`, such as a SummaryWriter of TensorBoard; a function `(numbers, step)`, such as `wandb.log`, `trackio.log`
            or `mlflow.log_metrics`.
        prefix: Put in front of each name, such as "train/".

    Returns:
        A `Show`, to be called with the metrics of each step. Its numbers are those of `Metrics.as_dict`, and `steps_per_s` since
        the last time.

    Raises:
        ValueError: `every` is no whole number from 1.
        TypeError: an entry of `to` is none of these.

    >>> from fjoin import transforms as tx
    >>> step = fjoin.train_step(lambda p, x: (p["w"] * x).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.5)))
    >>> state, show = step.init({"w": torch.zeros(1)}), fjoin.show(every=2, to=[lambda numbers, step: print(step, numbers["loss"])])
    >>> for batch in step.join(torch.ones(4)):
    ...     state, metrics = step(state, batch)
    ...     show(metrics)
    1 -0.5
    3 -1.5
    """
    if type(every) is not int or every < 1:
        raise ValueError(f"every must be a whole number from 1, got {every!r}")
    return Show(every, [_sink(one) for one in to], prefix)


def _sink(one: Any) -> Sink:
    if one is print:
        return lambda numbers, step: print(line(numbers, step), flush=True)
    if hasattr(one, "set_postfix"):
        return lambda numbers, step: one.set_postfix({name: f"{value:.4g}" for name, value in numbers.items()})
    if hasattr(one, "add_scalar"):
        return lambda numbers, step: [one.add_scalar(name, value, step) for name, value in numbers.items()]
    if callable(one):
        return one  # type: ignore[no-any-return]
    raise TypeError(
        f"to= takes print, a progress bar with set_postfix, a writer with add_scalar, or a function (numbers, step), got {one!r}"
    )


def line(numbers: Mapping[str, float], step: int) -> str:
    """One line of text."""
    return f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
