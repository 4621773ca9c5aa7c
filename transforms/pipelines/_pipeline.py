"""Whole training steps as pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from ..program._program import Parts
from ..spec._spec import Spec
from ..spec._specified import Specified
from ..step_param._optimizer import Optimizer
from ..transform._transform import Transform
from ..tree._tree import State, Tree
from ._sharding import Sharding


def _as_they_are(grads: Tree, state: Any) -> Tree:
    del state
    return grads


class Skips(NamedTuple):
    """The state of a pipeline that runs another one and skips its non-finite steps."""

    begin: Callable[[State], Any]  # inner state -> outer state, which has the inner one in the field `inner`
    update_counters: Callable[[Any, Tensor], Any]  # (state, fine) -> state, after a step; `fine`, 0-d bool: with effect
    scaled: bool = False  # whether the gradients are those of the loss times `state.scale`
    prepare: Callable[[Tree, Any], Tree] = _as_they_are  # `(grads, state) -> grads`, before the hook
    check: Callable[[Tree], None] | None = None  # raises for parameters that cannot be trained


@dataclass(frozen=True, eq=False, repr=False)
class Pipeline(Specified):
    """Gradient transform, then optimizer, then parameter transform; made by `fuse`.

    Args:
        init: `params -> state`; the state is `PipelineState(hook, optimizer, after, on_state, step, window)`.
        step: `(params, grads, state, *, weight=None, lane=None) -> (params, state)`, pure.
        flush: `(params, state) -> (params, state)`, pure: runs now the transforms after the optimizer that would run in
            later steps, with the weights since their last run, and uses results that wait. For the end of a run.
        hook, optimizer, after, on_state: The parts of the pipeline; the last two may be None.
        sharding: For a pipeline whose hook shards: the pieces that ranks own.
        spec: The pipeline as data.
        skips: The state that counts skipped steps, for a pipeline that skips non-finite ones; None for others.
    """

    init: Callable[[Tree], State]
    step: Callable[..., tuple[Tree, State]]
    flush: Callable[..., tuple[Tree, State]]
    hook: Transform
    optimizer: Optimizer
    after: Transform | None = None
    on_state: Transform | None = None
    sharding: Sharding | None = None
    spec: Spec = Spec("")
    skips: Skips | None = None

    @property
    def ends(self) -> tuple[Transform, ...]:
        """The transforms that run after the optimizer."""
        return tuple(part for part in (self.after, self.on_state) if part is not None)

    def check(self, params: Tree) -> None:
        """Raise for parameters that this pipeline cannot train."""
        if self.optimizer.check:
            self.optimizer.check(params)
        if self.skips and self.skips.check:
            self.skips.check(params)

    instead_of_transform = "a pipeline is complete already; put the transform into its hook"

    def with_spec(self, spec: Spec) -> Pipeline:
        return replace(self, spec=spec)


def parts_of(what: Pipeline | Transform, on_buffers: Transform | None = None, used: tuple[str, ...] = ()) -> Parts:
    """What the programs of a pipeline, or of a hook alone, depend on.

    Args:
        on_buffers: The transform of the buffers, in a train_step.
        used: The axes over which ranks agree on the parameters in use, where a pass need not use all.
    """
    if isinstance(what, Transform):
        return Parts(on_buffers=on_buffers, used=used, steps=False)
    shards = None if what.sharding is None else what.sharding.axis
    return Parts(what.after, what.on_state, shards, what.skips is not None, on_buffers, used)
