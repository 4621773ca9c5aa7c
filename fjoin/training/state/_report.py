"""The numbers of a step that are not in its record: learning rates, the gradient's norm, this rank's times and bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from ...buckets._flat_params import Storage
from ...groups.axes._traffic import Traffic
from ...reducer._hook_state import HookState
from ...transforms.combinators._norms import NormState, UpdateNormState
from ...transforms.optimizers.wrappers._inject import InjectState
from ...transforms.schedules._rates import value_at
from ...transforms.step_param._optimizer import Optimizer


class Meter:
    """Measures the calls of this rank that make up a step."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._seconds = 0.0

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
        return {
            "rank/step_s": self._seconds,
            "rank/sent_bytes": float(self._traffic.sent_bytes - self._sent),
            "rank/waited_s": (self._traffic.waited_ns - self._waited) / 1e9,
        }


class LearningRates:
    """The learning rates of a step, to be looked up when they are shown."""

    def __init__(self) -> None:
        self._slots: Any = None
        self._parts: list[tuple[str, Optimizer, Any]] = []

    def __call__(self, storage: Storage, step: int) -> dict[str, Callable[[], Any]]:
        """The rates of the next step: "lr", or "lr/<label>" for each part of a partition; functions of no argument.

        Args:
            step: The number of steps so far, for optimizers that count them on a device.
        """
        if self._slots is not storage.slots:
            states = storage.states_of_parts()
            self._parts = [
                (f"lr/{label}" if label else "lr", part, states[id(part)])
                for label, part in _labelled(storage.optimizer)
                if id(part) in states and _has_rate(part)
            ]
            self._slots = storage.slots
        return {name: _rate(part, state, step) for name, part, state in self._parts}


def _labelled(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    parts = dict(optimizer.spec.args).get("parts")
    if optimizer.select is None or not isinstance(parts, Mapping):
        yield "", optimizer
        return
    for patterns, part in parts.items():
        yield patterns if isinstance(patterns, str) else "+".join(patterns), part


def _rate(part: Optimizer, state: Any, step: int) -> Callable[[], Any]:
    """The rate of an optimizer that is no partition."""
    while not isinstance(state, InjectState) and hasattr(state, "inner"):
        state = state.inner
    if isinstance(state, InjectState) and "lr" in state.hyperparameters:
        rate = state.hyperparameters["lr"]
        return lambda: rate
    count = getattr(state, "step", None)
    number = int(count) if isinstance(count, Tensor) and count.device.type == "cpu" else step
    return lambda: _of_spec(part, torch.tensor(float(number), device="cpu"))


def _has_rate(part: Any) -> bool:
    return any(name == "lr" or (hasattr(value, "step_param") and _has_rate(value)) for name, value in part.spec.args)


def _of_spec(part: Any, step: Tensor) -> Any:
    for name, value in part.spec.args:
        if name == "lr":
            return value_at(value, step)
        if hasattr(value, "step_param") and _has_rate(value):
            return _of_spec(value, step)
    raise AssertionError("unreachable")


class RecordedNorms:
    """Reads the norms that stages keep in their states. Pipelines without such stages are looked at once."""

    def __init__(self) -> None:
        self._kept: bool | None = None

    def __call__(self, hook: Any, after: Any) -> dict[str, Tensor]:
        """Name -> norm.

        Args:
            hook: The state of the hook, as a step stores it.
            after: The state of the transform behind the optimizer.
        """
        if self._kept is False:
            return {}
        found = dict[str, Tensor]()
        states: Any = [hook.rest if isinstance(hook, HookState) else () if callable(hook) else hook, after]
        for node in optree.tree_leaves(states, is_leaf=lambda node: isinstance(node, NORMS)):
            if isinstance(node, NORMS):
                found["grad_norm" if isinstance(node, NormState) else "update_norm"] = node.norm
        self._kept = bool(found)
        return found


NORMS = (NormState, UpdateNormState)
