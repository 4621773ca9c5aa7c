"""Whole training steps as pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from .._spec import Spec, Specified
from .._transform import Transform
from .._tree import State, Tree
from ..optimizers._optimizer import Optimizer


class Skips(NamedTuple):
    """The state of a pipeline around that of another one, whose steps it leaves out where they are not finite."""

    begin: Callable[[State], Any]  # state of what it runs -> its own, which has that in the field `inner`
    update_counters: Callable[[Any, Tensor], Any]  # (state, fine) -> state, after a step; `fine`, 0-d bool: with effect
    scaled: bool = False  # whether it takes gradients of the loss times `state.scale`


@dataclass(frozen=True, eq=False, repr=False)
class Pipeline(Specified):
    """Gradient transform, then optimizer, then parameter transform; made by `fuse`.

    Args:
        init: `params -> state`, the state being `PipelineState(hook, optimizer, after, step, window)`.
        step: `(params, grads, state, *, weight=None, lane=None) -> (params, state)`, pure.
        hook, optimizer, after: What it is made of; `after` may be None.
        spec: The pipeline as data.
        skips: For one that leaves out steps that are not finite, how it keeps count of them; else None.
    """

    init: Callable[[Tree], State]
    step: Callable[..., tuple[Tree, State]]
    hook: Transform
    optimizer: Optimizer
    after: Transform | None = None
    spec: Spec = Spec("")
    skips: Skips | None = None

    instead_of_transform = "a pipeline is complete already; put the transform into its hook"

    def with_spec(self, spec: Spec) -> Pipeline:
        return replace(self, spec=spec)
