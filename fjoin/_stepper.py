"""Parameters in lists, stepped in place: one kernel for all that are of one kind and age."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .transforms._base import Optimizer
from .transforms._state_dict import restored
from .transforms._tree import fields, with_fields
from .transforms.optimizers._wrap import sharing, step_in_place

Item = tuple[Any, Optimizer, Tensor, Any]  # whose, what steps it, the parameter, its gradient


class Stepper:
    """The states of parameters, each under a key; what is 0-d in them is one tensor for all that are of one age.

    Args:
        changed: Told of a key and its state where this is another object from now on.
    """

    def __init__(self, changed: Callable[[Any, Any], None] = lambda key, state: None) -> None:
        self.states: dict[Any, Any] = {}
        self._changed = changed

    def begin(self, items: Iterable[Item]) -> None:
        """Begin the states of those of these parameters that have none: all are of one age."""
        fresh: dict[Any, Any] = {}
        for key, part, param, _ in items:
            if key not in self.states:
                state = part.init_param(param.detach())
                self.share(part, key, state, fresh.setdefault((id(part), param.dtype, param.device), state))

    def step(self, items: Iterable[Item], **guards: Tensor | None) -> None:
        """Step these parameters; the others do not age."""
        sharing = Counter(id(state.step) for state in self.states.values())
        items = list(items)
        self.begin(items)
        kinds: dict[Any, list[Item]] = {}
        for item in items:
            key, part, param, _ = item
            kinds.setdefault((id(part), param.dtype, param.device, id(self.states[key].step)), []).append(item)
        for some in kinds.values():
            first, part = self.states[some[0][0]], some[0][1]
            if len(some) < sharing[id(first.step)]:  # the others stay as old as they are
                first = with_fields(first, [None if f is None else f.clone() if c else f
                                            for f, c in zip(fields(first), part.common, strict=True)])  # fmt: skip
                for key, *_ in some:
                    self.share(part, key, self.states[key], first)
            states, params = [self.states[key] for key, *_ in some], [param for _, _, param, _ in some]
            here = {name: None if guard is None else guard.to(params[0].device) for name, guard in guards.items()}
            step_in_place(part, params, [grad for *_, grad in some], states, **here)
            # Fused kernels do not count as writes: a graph that still needs the old values would silently use the new.
            torch.autograd.graph.increment_version(params)

    def share(self, part: Optimizer, key: Any, state: Any, like: Any) -> None:
        """Put a state under a key, its 0-d fields being those of another state."""
        self.states[key] = sharing(part, state, like)
        self._changed(key, self.states[key])

    def prepared(self, given: Iterable[tuple[Any, Optimizer, Tensor, dict[str, Tensor]]]) -> dict[Any, Any]:
        """States from tensors by name, for (key, optimizer, parameter, state) each; equal ages are shared again.

        Raises:
            ValueError: a state of another optimizer, or of a parameter of another shape.
        """
        new: dict[Any, Any] = {}
        alike: dict[Any, Any] = {}
        for key, part, param, named in given:
            state = restored(f"the state of {_whose(key)}", part.init_param(param.detach()), named)
            ages = tuple(f.item() for f, c in zip(fields(state), part.common, strict=True) if c)
            like = alike.setdefault((id(part), param.dtype, param.device, ages), state)
            new[key] = sharing(part, state, like)
        return new

    def adopt(self, states: dict[Any, Any]) -> None:
        """Go on with what `prepared` made."""
        self.states = states
        for key, state in states.items():
            self._changed(key, state)


def divides(part: Optimizer, dtype: torch.dtype) -> bool:
    """Whether a kernel leaves gradients divided by `grad_scale`, and not the sums that they were."""
    if dtype.itemsize < 4:  # their buckets may have units of their own
        return False
    param, grad = torch.ones(2, 2, dtype=dtype), torch.full((2, 2), 2.0, dtype=dtype)
    step_in_place(part, [param], [grad], [part.init_param(param)], grad_scale=torch.tensor(2.0, dtype=torch.float64))
    return bool((grad == 1.0).all())


def _whose(key: Any) -> str:
    return f"a parameter of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
