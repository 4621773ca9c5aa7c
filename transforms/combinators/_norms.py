"""Norms of gradients, kept in the state to be shown."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..axes._collectives import psum
from ..spec._spec import factory
from ..transform._call import Call
from ..transform._transform import ByNorm, Transform
from ..tree._tree import State, Tree, global_norm


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

    Put it behind the reduction: `chain(mean("data"), record_norm())`. A `train_step` shows it as `grad_norm` in
    `metrics.as_dict()`; directly behind a mean or a `scatter_mean`, and alone there, it costs no pass over the gradients. Where the
    gradients are clipped there, `clip_by_global_norm` gives `grad_norm` by itself.

    Returns:
        A `Transform` with state `NormState(norm)`. `extra["sharded_over"]` gives the names of the axes over which the tree is sharded;
        the squares are summed across them.

    >>> from fjoin import transforms as tx
    >>> hook = tx.record_norm()
    >>> hook.update({"w": torch.tensor([3.0, 4.0])}, hook.init({"w": torch.zeros(2)}))[1].norm.item()
    5.0
    """

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, NormState]:
        del state, params
        norm = global_norm(grads)
        if call.sharded_over:
            norm = psum(norm * norm, call.sharded_over).sqrt()
        return grads, NormState(norm.to(torch.float64))

    return Transform(
        lambda params: NormState(torch.tensor(float("nan"), dtype=torch.float64)),
        update,
        takes=("sharded_over",),
        by_norm=ByNorm(torch.ones_like, keeps=NormState),
    )
