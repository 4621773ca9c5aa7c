"""What a rank has of a run: values by name, and their placements."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...training._step import TrainStep
from ...training.state._state import TrainState
from ...transforms.layout._pieces import Pieces
from ...transforms.pipelines._pipeline import Pipeline
from ...transforms.pipelines._placements import (
    buffers_placement,
    params_placement,
    placements,
    placements_at_end,
)
from ...transforms.tree._placement import Merge, Placement
from ...transforms.tree._state_dict import to_state_dict, without_unread
from ...transforms.tree._tree import Tree, named_leaves


@dataclass
class Snapshot:
    """The values of one rank.

    Attributes:
        values: Name -> tensor or host number.
        places: Name -> placement.
        pieces: The pieces of a pipeline that shards; None for others.
        rank: What only this rank has, as JSON.
        extra: What the user keeps beside it, as JSON.
        by_content: Whether values that differ are no drift, but placed where they differ.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Placement] = field(default_factory=dict)
    pieces: Pieces | None = None
    rank: dict[str, Any] = field(default_factory=dict)
    by_content: bool = False
    extra: Any = None

    def add(self, prefix: str, values: Mapping[str, Any], places: Mapping[str, Placement]) -> None:
        """Add values under a prefix."""
        for name, value in values.items():
            self.values[f"{prefix}.{name}"], self.places[f"{prefix}.{name}"] = value, places[name]

    def leaf_of(self, name: str) -> str | None:
        """The path of the parameter that a slice belongs to."""
        assert self.pieces is not None
        part, _, rest = name.removeprefix("pipeline.").removeprefix("inner.").partition(".")
        return next((path for path in _inside(rest, part) if path in self.pieces.shapes), None)


def of_step(step: TrainStep, state: TrainState) -> Snapshot:
    """What this rank has of a train_step's run, after its pending verdicts.

    Raises:
        ValueError: the state is within an accumulation window.
        NonFinite, DesyncError: on all ranks: the last step was not taken.
    """
    run, body = step.run, state.settled(step.run.token)
    run.agreements.drain(body.step)
    axes, found = run.mesh.shape, Snapshot(pieces=body.storage.pieces)
    _add_params(found, state.params, run.pipeline, axes)
    _add_pipeline(found, run.pipeline, state.pipeline, axes)
    if body.buffers is not None:
        over = buffers_placement(run.on_buffers, axes)
        found.add("buffers", body.buffers, dict.fromkeys(body.buffers, over))
        if run.on_buffers is not None:
            kept = without_unread(body.buffers_state)
            found.add("on_buffers", to_state_dict(kept), placements_at_end(run.on_buffers, kept, axes))
    mine = Placement((), None, Merge.REFUSE)
    counts = {"batches": body.batches, "weight": run.step_check.weight}
    found.add("run", {name: value for name, value in counts.items() if value is not None}, dict.fromkeys(counts, mine))
    return found


def of_pipeline(
    pipeline: Pipeline, params: Tree, state: Any, axes: Mapping[str, int], pieces: Pieces | None
) -> Snapshot:
    """What this rank has of a loop of one's own."""
    found = Snapshot(pieces=pieces)
    _add_params(found, params, pipeline, axes)
    _add_pipeline(found, pipeline, state, axes)
    return found


def _add_params(found: Snapshot, params: Tree, pipeline: Pipeline, axes: Mapping[str, int]) -> None:
    named = named_leaves(params)
    found.add("params", named, dict.fromkeys(named, params_placement(pipeline, axes)))


def _add_pipeline(found: Snapshot, pipeline: Pipeline, state: Any, axes: Mapping[str, int]) -> None:
    kept = without_unread(state)
    found.add("pipeline", to_state_dict(kept), placements(pipeline, kept, axes))


def _inside(name: str, part: str) -> Iterator[str]:
    """Where a path may stand in the name of a value of a pipeline's part, longest first.

    The optimizer's state is the tree of the parameters; states of transforms end with dicts by path.
    """
    words = name.split(".")
    for length in range(len(words), 0, -1):
        starts = range(len(words) - length + 1)
        for start in (
            starts[:1] if part == "optimizer" else starts[-1:] if part in ("hook", "after", "gather") else starts
        ):
            yield ".".join(words[start : start + length])


def is_host(value: Any) -> bool:
    """Whether a value is a number of the host, which is kept in the manifest."""
    return not isinstance(value, Tensor)


def bytes_of(value: Tensor) -> int:
    return value.numel() * value.element_size()


def check_json(extra: Any) -> Any:
    """A copy of a value that is kept as JSON; raises TypeError for another one."""
    try:
        kept = json.loads(json.dumps(extra, allow_nan=False))
        if kept != extra:
            raise TypeError(f"{extra!r} would be read back as {kept!r}")
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"extra must be JSON: finite numbers, text, lists, and dicts with text as keys: {error}"
        ) from None
    return kept
