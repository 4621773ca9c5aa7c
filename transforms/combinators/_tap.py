"""Observing gradients: `tap` and `logged`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._check import whole_number
from ..spec._spec import factory
from ..transform._call import Call
from ..transform._counter import counts_steps
from ..transform._inner import Inner
from ..transform._transform import Needs, Transform, check_transform, init_empty
from ..tree._tree import State, Tree, global_norm, has_no_data, named_leaves


@factory
def tap(function: Callable[[dict[str, Tensor]], Any]) -> Transform:
    """Calls a function on the gradients and passes them unchanged.

    Args:
        function: Called with a dict path -> gradient, one bucket at a time in `fjoin.train_step` and after
            `fjoin.ddp.register`; its result is ignored. It must not write into the gradients, and must copy those that
            it keeps: `lambda g: seen.append(g["w"].clone())`. `explain` does not call it.

    Returns:
        A `Transform` without state.

    Raises:
        TypeError: `function` is not callable.

    Same as: jax.debug.callback; torch's Tensor.register_hook.

    >>> from fjoin import transforms as tx
    >>> hook = tx.chain(tx.tap(lambda g: print(g["w"])), tx.clip_by_value(1.0))
    >>> hook.update({"w": torch.tensor(3.0)}, hook.init({"w": torch.tensor(0.0)}))[0]
    tensor(3.)
    {'w': tensor(1.)}
    """
    if not callable(function):
        raise TypeError(f"tap takes a function of a dict path -> gradient, got {function!r}")

    def update(grads: Tree, state: State, params: Tree = None, **extra: Any) -> tuple[Tree, State]:
        del params, extra
        leaves = named_leaves(grads)
        if not has_no_data(leaves):
            function(leaves)
        return grads, state

    return Transform(init_empty, update, Needs.LEAVES | Needs.PATHS)


class LoggedState(NamedTuple):
    inner: State
    step: int  # calls so far, on the host


@factory
def logged(hook: Transform, every: int = 1, logger: str = "fjoin") -> Transform:
    """Runs a hook, and logs the norms of its input and its output.

    It logs one line at level INFO in every `every`-th call: the step, the parameters, the weight, the norms of the
    gradients before and after, and the number of elements that are not finite.

    Args:
        hook: The hook to run.
        every: The period, at least 1.
        logger: The name of the logger.

    Returns:
        A `Transform` with state `LoggedState(inner, step)`.

    Raises:
        TypeError: `hook` is not a Transform.
        ValueError: `every` is no whole number above 0.

    >>> import logging
    >>> from fjoin import transforms as tx
    >>> hook = tx.logged(tx.clip_by_value(1.0))
    >>> hook.update({"w": torch.tensor(3.0)}, hook.init({"w": torch.tensor(0.0)}))[0]
    {'w': tensor(1.)}
    """
    inner = Inner(check_transform(hook, "logged: hook"))
    whole_number("logged: every", every, 1)

    def init(params: Tree) -> LoggedState:
        return LoggedState(hook.init(params), 0)

    @counts_steps
    def update(grads: Tree, state: LoggedState, params: Tree, call: Call) -> tuple[Tree, LoggedState]:
        out, new = inner.run(grads, state, params, call)
        leaves, count = named_leaves(grads), state.step + 1
        if count % every == 0 and not has_no_data(leaves):
            bad = sum(int((~torch.isfinite(leaf)).sum()) for leaf in leaves.values())
            after = "no step" if out is None else f"{float(global_norm(out)):.6g}"
            logging.getLogger(logger).info(
                "step %d, %s: weight %s, norm %.6g -> %s, %d not finite",
                count,
                _which(leaves),
                call.weight,
                float(global_norm(grads)),
                after,
                bad,
            )
        return out, LoggedState(new, count)

    return Transform(init, update, Needs.PATHS, inner.reduction())


def _which(leaves: dict[str, Tensor]) -> str:
    paths = list(leaves)
    return ", ".join(paths) if len(paths) < 3 else f"{paths[0]} to {paths[-1]}, {len(paths)} parameters"
