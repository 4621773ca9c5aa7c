"""Observing gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..spec._spec import factory
from ..transform._transform import Needs, Transform, init_empty
from ..tree._tree import State, Tree, has_no_data, named_leaves


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
