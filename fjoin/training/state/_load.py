"""Loads a saved state into that of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...buckets._flat_params import Storage
from ...reducer._hook_state import HookState
from ...transforms.optimizers.wrappers._mixed_precision import master_of
from ...transforms.pipelines._tree_memory import PipelineState, by_path
from ...transforms.tree._tree import named_leaves
from ._ends import EndStates
from ._state import TrainState
from ._state_data import StateData


def loaded(
    state: TrainState,
    owner: object,
    params: Mapping[str, Tensor],
    pipeline: Any,
    buffers: Mapping[str, Tensor] | None,
    on_buffers: Any,
    batches: int,
    accumulate: int,
) -> TrainState:
    """The state with other values; it takes the memory of the given one.

    Args:
        state: From `init`.
        owner: The token of its step.
        accumulate: The number of calls of a step.
    """
    body = state.settled(owner)
    load_state(body, params, pipeline)
    if body.buffers is not None and buffers is not None:
        for path, place in body.buffers.items():
            place.copy_(buffers[path])
        body.buffers_state = on_buffers
    body.batches, body.calls = batches, body.step * accumulate
    body.version += 1
    return TrainState(body)


@torch.no_grad()
def load_state(body: StateData, params: Mapping[str, Tensor], pipeline: Any) -> None:
    """Take parameters and the state of a pipeline, in the form of the pure pipeline; the inverse of `TrainState.pipeline`.

    Args:
        body: A state of the same pipeline and parameters, as `init` makes it.
        params: Path -> parameter.
        pipeline: In memory that nothing else uses.
    """
    storage, inner = body.storage, pipeline
    if body.outer is not None:
        inner, body.outer = pipeline.inner, pipeline._replace(inner=body.outer.inner)
    assert isinstance(inner, PipelineState)
    leaves = {path: leaf.detach() for path, leaf in storage.leaves.items()}
    for path, leaf in leaves.items():
        leaf.copy_(params[path])
    states = by_path(body.rebuild(leaves), inner.optimizer)
    storage.load_optimizer_states(states)
    _load_exact(storage, inner, states)
    body.hook = body.hook.split(inner.hook) if isinstance(body.hook, HookState) else inner.hook
    body.ends = EndStates(inner.after, inner.on_state)
    body.gather = getattr(inner.gather, "step", 0)
    body.step = inner.step


def _load_exact(storage: Storage, inner: PipelineState, states: Mapping[str, Any]) -> None:
    """The exact values of this rank's slices, where a codec sends their changes."""
    if not storage.exact:
        return
    masters = named_leaves(inner.gather.master)
    for path, own in storage.own_leaves().items():
        value = master_of(states[path])
        own.copy_(masters[path] if value is None else value)
