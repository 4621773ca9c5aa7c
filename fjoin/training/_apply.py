"""The update of the parameters: optimizer kernels on buckets, then the parameter transform."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..groups._mesh import Mesh
from ..reducer._buckets import GradBuffer
from ..reducer._flat_params import assign_, copy_if_aliased
from ..reducer._step_check import Decision
from ..transforms._axis_env import bind_axes
from ..transforms._call import Call
from ..transforms._tree import named_leaves
from ..transforms.optimizers._mixed_precision import masters_of
from ..transforms.pipelines._pipeline import Pipeline
from ..transforms.program._effect import Effect
from ..transforms.step_param._checked import unchecked
from ..transforms.step_param._state_fields import state_fields
from ._state import StateData


@contextlib.contextmanager
def changing(body: StateData) -> Iterator[None]:
    """A context for changing parameters: an error within it leaves a torn state."""
    body.torn = (
        f"step {body.step} failed after it had changed some of the parameters, so this state is neither old nor "
        f"new; load a checkpoint, or use donate=False to keep the old state whole"
    )
    with torch.no_grad():
        yield
    body.torn = ""


def step_bucket(body: StateData, index: int, out: GradBuffer, decision: Decision) -> None:
    """Run the optimizer's kernels on one bucket."""
    for optimizer, param, grad, slots in body.storage.ranges(index, out.grads):
        step_param_ = unchecked(optimizer.step_param_)  # init_param has made these slots
        step_param_(param, grad, slots, grad_scale=decision.scale, found_inf=decision.found_inf)
    # Fused kernels do not increment the version: without this a graph that still needs the old values,
    # such as the user's own, would silently use the new ones.
    torch.autograd.graph.increment_version(body.storage.flats[index])


def run_ends(
    pipeline: Pipeline,
    mesh: Mesh,
    params: dict[str, Tensor],
    states: Mapping[str, Any],
    old: tuple[Any, Any],
    lent: Iterable[Tensor],
    effect: Effect,
    call: Call,
) -> tuple[Any, Any]:
    """Run the transforms of the parameters, or of their master copies, and of the optimizer's state, in place.

    Args:
        states: The optimizer's states by path; may be empty where there are no master copies and no `on_state`.
        old: The states of these two transforms.
        lent: The memory of the parameters, which the new states must not share.
        call: The call, with the sum of the weights of all ranks that share the gradients.

    Returns:
        The new states of the two transforms.
    """
    after, on_state = old
    if pipeline.after is not None:
        masters: dict[str, Tensor] = masters_of(params, dict(states)) if states else params
        with bind_axes(mesh.axes):
            new, fresh = effect.after(pipeline.after, masters, after, call)
        after = copy_if_aliased(fresh, [*lent, *masters.values()])
        if new is not masters:  # a transform with a period returns its input in the other steps
            assign_(masters, new)
            for path, param in params.items():
                if masters[path] is not param:
                    param.copy_(masters[path])
    if pipeline.on_state is not None:
        held = state_fields(states)
        with bind_axes(mesh.axes):
            new, fresh = effect.after(pipeline.on_state, held, on_state, call, params)
        on_state = copy_if_aliased(fresh, named_leaves(held).values())
        if new is not held:
            assign_(named_leaves(held), named_leaves(new))
    return after, on_state
