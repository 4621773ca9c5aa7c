"""Parameters in lists, stepped in place: one kernel for all that are of one kind and age."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import optree
from torch import Tensor

from .transforms._base import Optimizer
from .transforms._tree import fields, with_fields
from .transforms.optimizers._wrap import step_in_place

Item = tuple[Hashable, Optimizer, Tensor, Tensor]  # whose, what steps it, the parameter, its gradient


class Stepper:
    """The states of parameters, each under a key; what is 0-d in them is one tensor for all that are of one age.

    Args:
        changed: Told of a key and its state where this is another object from now on.
    """

    def __init__(self, changed: Callable[[Any, Any], None] = lambda key, state: None) -> None:
        self.states: dict[Any, Any] = {}
        self._changed = changed

    def step(self, items: Iterable[Item], **guards: Tensor | None) -> None:
        """Step these parameters; the others do not age."""
        sharing = Counter(id(state.step) for state in self.states.values())
        kinds: dict[Any, list[Item]] = {}
        fresh: dict[Any, Any] = {}
        for item in items:
            key, part, param, _ = item
            kind = (id(part), param.dtype, param.device)
            if key not in self.states:  # all that begin together are of one age
                state = part.init_param(param)
                self.share(part, key, state, fresh.setdefault(kind, state))
            kinds.setdefault((*kind, id(self.states[key].step)), []).append(item)
        for some in kinds.values():
            first, part = self.states[some[0][0]], some[0][1]
            if len(some) < sharing[id(first.step)]:  # the others stay as old as they are
                first = with_fields(first, [None if f is None else f.clone() if c else f
                                            for f, c in zip(fields(first), part.common, strict=True)])  # fmt: skip
                for key, *_ in some:
                    self.share(part, key, self.states[key], first)
            states = [self.states[key] for key, *_ in some]
            step_in_place(part, [item[2] for item in some], [item[3] for item in some], states, **guards)

    def share(self, part: Optimizer, key: Any, state: Any, like: Any) -> None:
        """Put a state under a key, its 0-d fields being those of another state."""
        pairs = zip(fields(state), fields(like), part.common, strict=True)
        self.states[key] = with_fields(state, [other if common else own for own, other, common in pairs])
        self._changed(key, self.states[key])

    def load(self, given: Iterable[tuple[Any, Optimizer, Tensor, dict[str, Tensor]]]) -> None:
        """Take over states of tensors by name, for (key, optimizer, parameter, state) each; equal ages are shared again.

        Raises:
            ValueError: a state of another optimizer.
        """
        self.states.clear()
        alike: dict[Any, Any] = {}
        for key, part, param, named in given:
            state = part.init_param(param)
            names = named_fields(state)
            if names.keys() != named.keys():
                raise ValueError(f"the state of {_whose(key)} has {sorted(named)}, but {part!r} keeps {sorted(names)}")
            for name, tensor in names.items():
                tensor.copy_(named[name])
            ages = tuple(f.item() for f, c in zip(fields(state), part.common, strict=True) if c)
            self.share(part, key, state, alike.setdefault((id(part), param.dtype, param.device, ages), state))


def _whose(key: Any) -> str:
    return f"a parameter of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)


def named_fields(state: Any) -> dict[str, Any]:
    """The tensors and numbers in a state by name, those of states inside it too."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(state)
    return {
        ".".join(str(getattr(entry, "field", entry.entry)) for entry in accessor): leaf
        for accessor, leaf in zip(accessors, leaves, strict=True)
    }
