"""One counter for all periods, warm-ups and switches of a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ._spec import Spec
from ._transform import other_state
from ._tree import State, Tree


class Period(NamedTuple):
    """The calls in which a transform runs: first, first + steps, ..., counted from 0.

    except_every: calls whose number is a multiple of this are left to another transform; None: none is.
    """

    steps: int
    first: int
    except_every: int | None = None

    @staticmethod
    def of(spec: Spec) -> Period:
        """The period in the arguments `steps`, `first` and `except_every` of a spec."""
        args = dict(spec.args)
        first = args.get("first")
        return Period(args["steps"], args["steps"] - 1 if first is None else first, args.get("except_every"))

    def ends(self, call: int) -> bool:
        """Whether a window ends with this call."""
        return call >= self.first and (call - self.first) % self.steps == 0

    def due(self, call: int) -> bool:
        """Whether the transform runs in this call."""
        return self.ends(call) and (self.except_every is None or call % self.except_every != 0)

    def window(self, call: int) -> int:
        """The number of the window that ends with this call, from 0."""
        return (call - self.first) // self.steps

    def ended(self, calls: int) -> int:
        """The number of windows that have ended after this many calls."""
        return max(self.window(calls - 1) + 1, 0)

    def open(self, calls: int) -> bool:
        """Whether, after this many calls, a window has begun and not ended."""
        return calls > 0 and not self.ends(calls - 1)


U = TypeVar("U", bound=Callable[..., Any])


def counts_steps(update: U) -> U:
    """Decorates an `update`: a given `step` replaces its state's own count of calls.

    Raises:
        ValueError: at a call: a state without such a count, which is that of another transform.
    """

    @functools.wraps(update)
    def counted(grads: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, State]:
        if "step" not in getattr(state, "_fields", ()):
            raise other_state(state)
        step = extra.get("step")
        out: tuple[Tree, State] = update(grads, state if step is None else state._replace(step=step), params, **extra)
        return out

    return counted  # type: ignore[return-value]


def check_state(state: State, kind: type) -> None:
    """Raise ValueError unless a transform gets a state of its own kind."""
    if not isinstance(state, kind):
        raise other_state(state, f"the {kind.__name__}")
