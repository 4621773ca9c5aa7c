"""The placements of a pipeline's state."""

from __future__ import annotations

from collections.abc import Iterator

from ...combinators._chain import stages
from ...transform._transform import Transform
from ...tree._placement import Placement, leaves_with_placement
from ...tree._tree import State
from .._pipeline import Pipeline
from .._tree_memory import PipelineState


def placements(part: Pipeline | Transform, state: State) -> dict[str, Placement]:
    """Path -> placement of the tensors and numbers of a state: which ranks have which values.

    - `REPLICATED`: equal on all ranks. Host counters always are.
    - `PER_RANK`: each rank has its own, such as the residuals of error feedback, or the optimizer's state where no
      gradients are averaged.
    - `PIECE`: each rank has its slice, where a `scatter_mean` shards.

    Args:
        part: A pipeline, or a transform.
        state: Its state.

    >>> from fjoin import transforms as tx
    >>> hook = tx.error_feedback(tx.quantized_mean("data", tx.int8()))
    >>> {path: kind.value for path, kind in placements(hook, hook.init({"w": torch.zeros(2)})).items()}
    {'inner.total': 'replicated', 'error.w': 'per rank', 'last.w': 'per rank'}
    """
    if isinstance(part, Transform):
        return dict(leaves_with_placement(state))
    path, inner = "", state
    found: dict[str, Placement] = {}
    if part.skips is not None:
        path, inner = ".inner", state.inner
        found.update(leaves_with_placement(state._replace(inner=())))
    found.update(_of_pipeline(part, inner, path))
    return found


def _of_pipeline(pipeline: Pipeline, state: PipelineState, path: str) -> Iterator[tuple[str, Placement]]:
    own = Placement.REPLICATED
    if pipeline.sharding is not None:
        own = Placement.PIECE
    elif pipeline.hook.reduces is None:
        own = Placement.PER_RANK
    yield from leaves_with_placement(state._replace(hook=(), optimizer=(), after=(), on_state=()), path)
    parts = stages(pipeline.hook)
    behind = next((i + 1 for i, part in enumerate(parts) if part.sharded_over), len(parts))
    if len(parts) > 1:
        for i, one in enumerate(state.hook):
            kind = Placement.PIECE if i >= behind else Placement.REPLICATED
            yield from leaves_with_placement(one, f"{path}.hook.{i}", kind)
    else:
        yield from leaves_with_placement(state.hook, f"{path}.hook")
    for name in ("optimizer", "after", "on_state"):
        kind = own if name == "optimizer" or own is Placement.PIECE else Placement.REPLICATED
        yield from leaves_with_placement(getattr(state, name), f"{path}.{name}", kind)
