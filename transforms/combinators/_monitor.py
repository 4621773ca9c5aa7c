"""Looks at the gradients: a function of the user's own, and their norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base import ByNorm, Call, Facts, Needs, State, Transform, Tree, factory, trees
from ._clip import norm_of


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
        leaves = trees.named_leaves(grads)
        if not trees.has_no_data(leaves):
            function(leaves)
        return grads, state

    return Transform(lambda params: (), update, Needs.LEAVES | Needs.PATHS, facts=Facts(passes=True))


class NormState(NamedTuple):
    norm: Tensor  # of the last call's gradients, 0-d float64; NaN before the first call

    @property
    def unread(self) -> tuple[str, ...]:
        """The fields that no later call reads."""
        return ("norm",)


@factory
def record_norm() -> Transform:
    """Keeps the global norm of the gradients in its state, and leaves the gradients unchanged.

        norm = sqrt(sum of squares over all leaves)

    Put it after the reduction: `chain(mean("data"), record_norm())`. A `train_step` shows it as `grad_norm` in
    `metrics.as_dict()`; directly after a mean or a `scatter_mean`, and alone there, it costs no pass over the
    gradients. Where the gradients are clipped there, `clip_by_global_norm` gives `grad_norm` by itself.

    Returns:
        A `Transform` with state `NormState(norm)`. Where its keyword `sharded_over` names the axis over which the tree
        is sharded, the squares are summed across that axis.

    >>> from fjoin import transforms as tx
    >>> hook = tx.record_norm()
    >>> hook.update({"w": torch.tensor([3.0, 4.0])}, hook.init({"w": torch.zeros(2)}))[1].norm.item()
    5.0
    """

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, NormState]:
        return grads, NormState(norm_of(grads, call).to(torch.float64))

    facts = Facts(takes=("sharded_over",), by_norm=ByNorm(torch.ones_like, keeps=NormState), passes=True)
    return Transform(lambda params: NormState(torch.tensor(float("nan"), dtype=torch.float64)), update, facts=facts)
