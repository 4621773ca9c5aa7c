"""The transforms at the end of a step, in place on the parameters or on the optimizer's state, and their states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...buckets._aliases import assign_, copy_if_aliased
from ...groups._mesh import Mesh
from ...transforms._axis_env import bind_axes
from ...transforms.optimizers.wrappers._mixed_precision import masters_of
from ...transforms.pipelines._pipeline import Pipeline
from ...transforms.program._effect import Effect
from ...transforms.program._ops import Ends
from ...transforms.step_param._state_fields import state_fields
from ...transforms.transform._call import Call
from ...transforms.tree._tree import named_leaves


class EndStates(NamedTuple):
    """The states of a pipeline's transforms after the optimizer, in memory of their own."""

    after: Any = ()
    on_state: Any = ()


def init_ends(
    pipeline: Pipeline, own: dict[str, Tensor], states: Mapping[str, Any], lent: Iterable[Tensor]
) -> EndStates:
    """The states before the first step; arguments as of `run_end`."""
    after: Any = ()
    on_state: Any = ()
    if pipeline.after:
        masters = masters_of(own, dict(states))
        after = copy_if_aliased(pipeline.after.init(masters), [*lent, *masters.values()])
    if pipeline.on_state:
        fields = state_fields(states)
        on_state = copy_if_aliased(pipeline.on_state.init(fields), named_leaves(fields).values())
    return EndStates(after, on_state)


def run_end(
    op: Ends,
    old: EndStates,
    mesh: Mesh,
    own: dict[str, Tensor],
    states: Mapping[str, Any],
    lent: Iterable[Tensor],
    effect: Effect,
    call: Call,
) -> EndStates:
    """Run the transform of the parameters, or of their master copies, or of the optimizer's state; returns the new states.

    Args:
        own: Path -> the parameters, or slices of them, that this rank steps.
        states: The optimizer's states by path; may be empty for a transform of parameters without master copies.
        lent: The memory of the parameters, which a state must not share.
        call: The call, with the sum of the weights of all ranks that share the gradients.
    """
    if op.on == "params":
        held: Any = masters_of(own, dict(states)) if states else own
        places, kept, lent = held, old.after, [*lent, *held.values()]
    else:
        held = state_fields(states)
        places, kept, lent = named_leaves(held), old.on_state, named_leaves(held).values()
    with torch.no_grad(), bind_axes(mesh.axes):
        new, fresh = effect.after(op.part, held, kept, call, None if op.on == "params" else own)
        fresh = copy_if_aliased(fresh, lent)
        if new is not held:  # a transform with a period returns its input in the other steps
            assign_(places, new if op.on == "params" else named_leaves(new))
            for path, param in own.items() if op.on == "params" else ():
                if held[path] is not param:
                    param.copy_(held[path])
    return old._replace(after=fresh) if op.on == "params" else old._replace(on_state=fresh)
