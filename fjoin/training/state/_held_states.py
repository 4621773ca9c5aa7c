"""The states beside the parameters, in tensors that stay the same from step to step, for graphs of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import optree
import torch
from torch import Tensor

from ..._errors import CaptureError
from ...transforms.optimizers.wrappers._inject import injected
from ...transforms.pipelines._pipeline import Pipeline
from ._state_data import StateData

Out = TypeVar("Out")


class HeldStates:
    """The states beside the parameters: a step makes new tensors, and a graph reads and writes always the same ones.

    Attributes:
        hyperparameters: The values of `inject_hyperparameters`, which lie on the host.
    """

    NAMES = ("hook", "buffers", "buffers_state", "ends", "gather", "outer")

    hyperparameters: tuple[float, ...]

    def __init__(self, body: StateData, pipeline: Pipeline) -> None:
        self._storage, self._pipeline = body.storage, pipeline
        self._held: tuple[Any, ...] | None = None  # those that graphs read
        self._look_at(body.storage.slots)

    def _look_at(self, slots: Any) -> None:
        values = [value for _, value in injected(slots)]
        apart = set(map(id, values))
        self.hyperparameters, self._slots = tuple(value.item() for value in values), slots
        self._places = [x for x in tensors_in(slots) if id(x) not in apart]

    def belong_to(self, body: StateData) -> bool:
        """Whether these are the states that go with these parameters. Hyperparameters in a state may be others than before."""
        if body.storage is not self._storage:
            return False
        if body.storage.slots is not self._slots:
            before = self._places
            self._look_at(body.storage.slots)
            if list(map(id, before)) != list(map(id, self._places)):
                return False
        return self._held is None or _change(self._held, self._of(body)) is None

    def _of(self, body: StateData) -> tuple[Any, ...]:
        if callable(body.hook):
            body.hook = body.hook()
        return tuple(getattr(body, name) for name in self.NAMES)

    def watched(self, body: StateData, run: Callable[[], Out]) -> Out:
        """Run a step without a graph.

        Raises:
            CaptureError: it has changed a number of the host in the states.
        """
        before = self._of(body)
        done = run()
        change = _change(before, self._of(body))
        if change is not None and body.step:  # in the first step the names of the user's sums become known
            self._refuse(change)
        return done

    def hold(self, body: StateData) -> None:
        """Take the present states as those that graphs read, unless there are such."""
        if self._held is None:
            # Copies: metrics of earlier steps may show the present ones.
            copied: Any = optree.tree_map(copy_of, self._of(body), none_is_leaf=True)  # type: ignore[arg-type]
            self._held = copied
            self.give_back(body)
        else:
            self.take(body)

    def take(self, body: StateData) -> None:
        """Put the present states into the tensors that graphs read."""
        now, held = self._of(body), self._held
        assert held is not None
        if any(a is not b for a, b in zip(now, held, strict=True)):
            _copy(now, held)
            self.give_back(body)

    def write_back(self, body: StateData) -> None:
        """At the end of a capture: put the new states into the tensors that graphs read."""
        assert self._held is not None
        now = self._of(body)
        change = _change(self._held, now)
        if change is not None:
            self._refuse(change)
        _copy(now, self._held)

    def give_back(self, body: StateData) -> None:
        """Give the state the tensors that graphs read."""
        if self._held is not None:
            body.held = self.NAMES
            for name, value in zip(self.NAMES, self._held, strict=True):
                setattr(body, name, value)

    def _refuse(self, change: str) -> NoReturn:
        raise CaptureError(
            f"capture=True: {self._pipeline!r}: {change}. A captured step would repeat one of them for ever, such as the dice of a codec; "
            f"leave capture out"
        )


def copy_of(x: Any) -> Any:
    """A copy of a tensor; anything else as it is."""
    return x.detach().clone() if isinstance(x, Tensor) else x


def tensors_in(tree: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(tree, none_is_leaf=True) if isinstance(x, Tensor)]


def _copy(now: Any, held: Any) -> None:
    pairs = [(to, x) for to, x in zip(tensors_in(held), tensors_in(now), strict=True) if to is not x]
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([to for to, _ in pairs], [x for _, x in pairs])


def _change(before: tuple[Any, ...], now: tuple[Any, ...]) -> str | None:
    """A difference between states that is not one of tensors, in words."""
    for name, old, new in zip(HeldStates.NAMES, before, now, strict=True):
        if old is new:
            continue
        paths, leaves, spec = optree.tree_flatten_with_path(old, none_is_leaf=True)
        others, other = optree.tree_flatten(new, none_is_leaf=True)
        if spec != other:
            return f"the state of its {name} has another structure"
        for path, a, b in zip(paths, leaves, others, strict=True):
            if not isinstance(a, Tensor) and a is not b and a != b:
                place = name + "".join(f"[{key!r}]" for key in path)
                return f"its state has a number of the host that changes, {place}: {a!r} and then {b!r}"
    return None
