"""What is saved of a module under fully_shard: its parameters and buffers, and the state of the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..fsdp import ShardedHandle
from ..groups import Communicator
from ..records import references
from ..transforms.base import Merge, Placement
from ..transforms.layout import LocalPieces, Slice
from ..transforms.pipelines import buffers_placement, params_placement
from ._values import Names, Snapshot, Values, slice_in


class ShardedItem:
    """The handle of a module under fully_shard. Its values have the names of those of a train_step, which can load them,
    too.
    """

    def __init__(self, name: str, handle: ShardedHandle, mesh: Communicator) -> None:
        self._run, self._axes = handle.run, mesh.shape
        self._params, self._buffers, self._counts = f"params.{name}", f"buffers.{name}", f"run.{name}"
        self._names = Names(f"pipeline.{name}", handle.run.pipeline, mesh.shape)

    def add(self, found: Snapshot) -> Any:
        run, others, place = self._run, self._run.others(), params_placement(self._run.pipeline, self._axes)
        equal = place._replace(equal=tuple(axis for axis in self._axes if axis != place.cut))
        for prefix, pieces, values, where in (
            (self._params, run.rows, run.local(), place),
            (self._buffers, others.rows, others.slices, equal),
        ):
            found.add(prefix, values, where)
            found.slices[prefix] = partial(_slice_of, prefix, pieces)
            found.forms.append(pieces.fingerprint)
        found.add(self._buffers, others.buffers, buffers_placement(None, self._axes))
        found.add(self._counts, {"batches": run.steps}, Placement((), None, Merge.MEAN))
        found.add_state(self._names, run.state, run.pieces)
        # The state dict of a module that is not sharded.
        kinds = {path: self._params if path in run.leaves else self._buffers for path in others.keys.values()}
        return references({key: f"{kinds[path]}.{path}" for key, path in others.keys.items()})

    def load(self, values: Values, shown: Any) -> Callable[[], None]:
        run, others = self._run, self._run.others()
        kinds = {self._params: run.local(), self._buffers: {**others.slices, **others.buffers}}
        pairs = [(leaf, values[f"{prefix}.{path}"]) for prefix, held in kinds.items() for path, leaf in held.items()]
        state = self._names.tree(run.state, values)
        return lambda: run.take(pairs, state)


def _slice_of(prefix: str, pieces: LocalPieces, name: str) -> Slice | None:
    return slice_in(pieces, {name: (name.removeprefix(f"{prefix}."),)}, name)
