"""The stages of a hook that run on all gradients at once, after backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..buckets._aliases import assign_, copy_if_aliased
from ..buckets._grad_buffer import GradBuffer
from ..groups._mesh import Mesh
from ..transforms._axis_env import bind_axes
from ..transforms.combinators._chain import behind
from ..transforms.layout._bound_pieces import bind_pieces
from ..transforms.layout._pieces import Pieces
from ..transforms.transform._call import Call
from ..transforms.transform._transform import Transform


class HasParams(Protocol):
    """Parameters by path, and the flat memory that holds them."""

    leaves: dict[str, Tensor]
    flats: list[Tensor]
    pieces: Pieces | None


def run_stages(
    parts: Sequence[Transform],
    states: Any,
    storage: HasParams,
    outgoing: Sequence[GradBuffer],
    mesh: Mesh,
    call: Call,
) -> tuple[Any, ...]:
    """Run stages on all gradients, one after the other, and write the result in place; returns the new states.

    Args:
        call: The call of the first stage.
    """
    if not parts:
        return ()
    params = {path: leaf.detach() for path, leaf in storage.leaves.items()}
    of = {path: grad for out in outgoing for path, grad in out.by_path().items()}
    held = {path: of[path] for path in params}
    grads, new, pieces = dict(held), [], storage.pieces
    if pieces is not None and all(out.scattered for out in outgoing):
        params, call = pieces.own(params), call.inside(sharded_over=pieces.axis)
    with torch.no_grad(), bind_axes(mesh.axes), bind_pieces(pieces):
        for part, state in zip(parts, states, strict=True):
            grads, after = part.run(grads, state, params, call)
            new.append(copy_if_aliased(after, [*(out.grads for out in outgoing), *storage.flats]))
            call = behind(part, after, call)
            if part.sharded_over and pieces is not None:
                params = pieces.own(params)
                for out in outgoing:
                    out.scatter(out.pack_own(grads))
                held = {path: grad for out in outgoing for path, grad in out.by_path().items()}
        assign_(held, grads)
    return tuple(new)
