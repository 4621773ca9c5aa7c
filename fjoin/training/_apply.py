"""The update of the parameters: optimizer kernels on buckets, then the parameter transform."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..groups._mesh import Mesh
from ..reducer._buckets import GradBuffer
from ..reducer._flat_params import assign_, copy_if_aliased
from ..reducer._step_check import Decision
from ..transforms._axis_env import bind_axes
from ..transforms._call import Call
from ..transforms._transform import Transform
from ..transforms._tree import named_leaves
from ..transforms.optimizers._mixed_precision import masters_of
from ..transforms.program._effect import Effect
from ..transforms.step_param._checked import unchecked
from ..transforms.step_param._state_fields import state_fields
from ._state import StateData


def tears(step: int) -> str:
    """The text of a state whose step fails while it changes the parameters."""
    return (
        f"step {step} failed after it had changed some of the parameters, so this state is neither old nor "
        f"new; load a checkpoint, or use donate=False to keep the old state whole"
    )


def step_bucket(body: StateData, index: int, out: GradBuffer, decision: Decision) -> None:
    """Run the optimizer's kernels on one bucket."""
    for optimizer, param, grad, slots in body.storage.ranges(index, out.grads):
        step_param_ = unchecked(optimizer.step_param_)  # init_param has made these slots
        step_param_(param, grad, slots, grad_scale=decision.scale, found_inf=decision.found_inf)
    # Fused kernels do not increment the version: without this a graph that still needs the old values,
    # such as the user's own, would silently use the new ones.
    torch.autograd.graph.increment_version(body.storage.flats[index])


def end_on_params(
    mesh: Mesh, transform: Transform, params: dict[str, Tensor], states: Mapping[str, Any], old: Any, lent: Iterable[Tensor],
    effect: Effect, call: Call,
) -> Any:  # fmt: skip
    """Run the transform of the parameters, or of their master copies, in place; returns its new state.

    Args:
        states: The optimizer's states by path; may be empty where there are no master copies.
        lent: The memory of the parameters, which the new state must not share.
        call: The call, with the sum of the weights of all ranks that share the gradients.
    """
    masters: dict[str, Tensor] = masters_of(params, dict(states)) if states else params
    with bind_axes(mesh.axes):
        new, fresh = effect.after(transform, masters, old, call)
    after = copy_if_aliased(fresh, [*lent, *masters.values()])
    if new is not masters:  # a transform with a period returns its input in the other steps
        assign_(masters, new)
        for path, param in params.items():
            if masters[path] is not param:
                param.copy_(masters[path])
    return after


def end_on_optimizer(
    mesh: Mesh, transform: Transform, params: dict[str, Tensor], states: Mapping[str, Any], old: Any, effect: Effect, call: Call
) -> Any:  # fmt: skip
    """Run the transform of the optimizer's state in place; returns its new state."""
    held = state_fields(states)
    with bind_axes(mesh.axes):
        new, fresh = effect.after(transform, held, old, call, params)
    on_state = copy_if_aliased(fresh, named_leaves(held).values())
    if new is not held:
        assign_(named_leaves(held), named_leaves(new))
    return on_state
