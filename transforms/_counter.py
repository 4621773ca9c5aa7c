"""One counter for all periods, warm-ups and switches of a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from ._tree import State, Tree

U = TypeVar("U", bound=Callable[..., Any])


def counts_steps(update: U) -> U:
    """Decorates an `update`: a given `step` replaces its state's own count of calls."""

    @functools.wraps(update)
    def counted(grads: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, State]:
        step = extra.get("step")
        out: tuple[Tree, State] = update(grads, state if step is None else state._replace(step=step), params, **extra)
        return out

    return counted  # type: ignore[return-value]
