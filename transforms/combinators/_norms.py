"""Norms of gradients and of updates, kept in the state to be shown."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..axes._collectives import psum
from ..spec._spec import factory
from ..transform._call import Call
from ..transform._transform import ByNorm, Needs, Transform
from ..tree._tree import State, Tree, global_norm, named_leaves


class NormState(NamedTuple):
    norm: Tensor  # of the last call's gradients, 0-d float64; NaN before the first call

    @property
    def unread(self) -> tuple[str, ...]:
        """The fields that no later call reads."""
        return ("norm",)


class UpdateNormState(NamedTuple):
    norm: Tensor  # of the last call's change of the parameters, 0-d float64; NaN before the first call
    before: dict[str, Tensor]  # path -> the parameters after the last call, in their shapes and dtypes

    @property
    def unread(self) -> tuple[str, ...]:
        """The fields that no later call reads."""
        return ("norm",)


def _nan() -> Tensor:
    return torch.tensor(float("nan"), dtype=torch.float64)


def _over_axes(norm: Tensor, call: Call) -> Tensor:
    return psum(norm * norm, call.sharded_over).sqrt() if call.sharded_over else norm


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
        return grads, NormState(_over_axes(global_norm(grads), call).to(torch.float64))

    return Transform(
        lambda params: NormState(_nan()),
        update,
        takes=("sharded_over",),
        by_norm=ByNorm(torch.ones_like, keeps=NormState),
    )


@factory
def record_update_norm() -> Transform:
    """Keeps the global norm of the last step's change of the parameters in its state, and leaves the parameters unchanged.

        norm = sqrt(sum of (p - p before)^2 over all leaves)

    It is for the place behind the optimizer, `fuse(hook, optimizer, after=record_update_norm())`, and behind averages there, whose
    change it then includes. It keeps a copy of the parameters. A `train_step` shows it as `update_norm` in `metrics.as_dict()`.

    Returns:
        A `Transform` of parameters. State: `UpdateNormState(norm, before)`.

    >>> from fjoin import transforms as tx
    >>> pipeline, p = tx.fuse(tx.noop(), tx.sgd(0.5), after=tx.record_update_norm()), {"w": torch.tensor([6.0, 8.0])}
    >>> _, state = pipeline.step(p, p, pipeline.init(p))
    >>> state.after.norm.item()
    5.0
    """

    def init(params: Tree) -> UpdateNormState:
        return UpdateNormState(_nan(), {path: leaf.detach().clone() for path, leaf in named_leaves(params).items()})

    def update(values: Tree, state: UpdateNormState, params: Tree, call: Call) -> tuple[Tree, UpdateNormState]:
        del params
        named = named_leaves(values)
        moved = {path: leaf - state.before[path] for path, leaf in named.items()}
        norm = _over_axes(global_norm(moved), call).to(torch.float64)
        return values, UpdateNormState(norm, {path: leaf.clone() for path, leaf in named.items()})

    return Transform(init, update, Needs.PATHS | Needs.TREE, takes=("sharded_over",))
