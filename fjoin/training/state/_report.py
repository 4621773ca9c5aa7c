"""The numbers of a step that are not in its record: learning rates, the gradient's norm, this rank's times and bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from ...buckets._flat_params import Storage
from ...groups._mesh import Mesh
from ...reducer._hook_state import HookState
from ...transforms.combinators._norms import NormState
from ...transforms.combinators._partition import label_of
from ...transforms.optimizers.wrappers._inject import InjectState
from ...transforms.schedules._rates import value_at


class Meter:
    """Measures the calls of this rank that make up a step."""

    def __init__(self, mesh: Mesh) -> None:
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
            yield patterns if isinstance(patterns, str) else "+".join(patterns)
            yield from _labels(value[patterns], path)
        elif hasattr(value, "step_param"):
            yield from _labels(value, path)


def _hyper(part: Any) -> Any:
    """The argument lr of an optimizer, or of the one inside it; None where it has none."""
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
            after: The state of the transform behind the optimizer.
        """
        if self._kept is False:
            return {}
        found = dict[str, Tensor]()
        states: Any = [hook.rest if isinstance(hook, HookState) else () if callable(hook) else hook, after]
        for node in optree.tree_leaves(states, is_leaf=lambda node: isinstance(node, NormState)):
            if isinstance(node, NormState):
                found["grad_norm"] = node.norm
        self._kept = bool(found)
        return found
