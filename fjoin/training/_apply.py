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
from ..transforms._transform import Transform
from ..transforms.optimizers._mixed_precision import masters_of
from ..transforms.pipelines._effect import Effect
from ..transforms.step_param._checked import unchecked
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


def run_after(
    after: Transform,
    mesh: Mesh,
    params: dict[str, Tensor],
    states: Mapping[str, Any] | None,
    old: Any,
    lent: Iterable[Tensor],
    weight: Any,
    effect: Effect,
    step: int,
) -> Any:
    """Run the parameter transform in place on the new parameters, or on their master copies; returns its new state.

    Args:
        states: The optimizer's states by path, where it keeps master copies of some parameters; otherwise None.
        old: The state of the transform.
        lent: The memory of the parameters, which the new state must not share.
        weight: The sum of the weights of all ranks that share the gradients.
        step: The number of steps before this one.
    """
    masters: dict[str, Tensor] = params if states is None else masters_of(params, dict(states))
    with bind_axes(mesh.axes):
        new, fresh = effect.after(after, masters, old, weight, step)
    fresh = copy_if_aliased(fresh, [*lent, *masters.values()])
    assign_(masters, new)
    for path, param in params.items():
        if masters[path] is not param:
            param.copy_(masters[path])
    return fresh
