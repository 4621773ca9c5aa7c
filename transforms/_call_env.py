"""The call of a train_step in which a function of the user runs: this rank's weight, and the number of the call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ._axis_env import THREADS, BoundCall, bindings_of_caller


def bound_call() -> BoundCall:
    """The call that is bound in this thread."""
    return bindings_of_caller().call if THREADS.call is None else THREADS.call


@contextlib.contextmanager
def bind_call(call: BoundCall) -> Iterator[None]:
    """Bind a call in this thread inside a with block."""
    before, THREADS.call = THREADS.call, call
    try:
        yield
    finally:
        THREADS.call = before


def current_weight() -> Any:
    """This rank's weight in the current step: 0 where its batch is replayed only to match the other ranks' collectives.

    A train_step binds it around `loss_fn`, elsewhere it is 1.

    >>> from fjoin import transforms as tx
    >>> tx.current_weight()
    1.0
    """
    return bound_call().weight


def current_call() -> Any:
    """The number of this call of a train_step, from 0: of steps, or of micro-batches where a step has several.

    It is part of the saved state, so random numbers that are keyed by it go on as before in a run that is resumed:
    `tx.random.fold_in(key, tx.current_call())`.

    Raises:
        RuntimeError: no train_step runs here.

    >>> from fjoin import transforms as tx
    >>> def loss_fn(params, batch):
    ...     return (params["w"] * batch).sum(), tx.current_call()
    >>> step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    >>> state, first = step(step.init({"w": torch.tensor(1.0)}), torch.tensor(1.0))
    >>> state, second = step(state, torch.tensor(1.0))
    >>> first.aux, second.aux
    (0, 1)
    """
    number = bound_call().number
    if number is None:
        raise RuntimeError(
            "current_call() is known in the loss_fn of a train_step only; in a loop of your own pass the number of the step to loss_fn"
        )
    return number
