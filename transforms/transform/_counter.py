"""One counter for all periods, warm-ups and switches of a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from ..tree._tree import State, Tree, with_changes
from ._call import Call
from ._inner import other_state

U = TypeVar("U", bound=Callable[..., Any])


def counts_steps(update: U) -> U:
    """Decorates an `update`: a given `step` replaces its state's own count of calls.

    Raises:
        ValueError: at a call: a state without such a count, which is that of another transform.
    """

    @functools.wraps(update)
    def counted(grads: Tree, state: Any, params: Tree, call: Call) -> tuple[Tree, State]:
        if "step" not in getattr(state, "_fields", ()):
            raise other_state(state)
        state = state if call.step is None else with_changes(state, step=call.step)
        out: tuple[Tree, State] = update(grads, state, params, call)
        return out

    return counted  # type: ignore[return-value]


def check_state(state: State, kind: type) -> None:
    """Raise ValueError unless a transform gets a state of its own kind."""
    if not isinstance(state, kind):
        raise other_state(state, f"the {kind.__name__}")
