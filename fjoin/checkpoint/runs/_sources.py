"""What can be saved: a train_step, a pipeline in a loop of one's own, or objects with a state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..._errors import CheckpointError
from ...agreement._requests import Requests
from ...groups._make_mesh import world_mesh
from ...groups._mesh import Mesh, check_mesh
from ...training._step import TrainStep
from ...training.state._load import loaded
from ...training.state._state import check_state
from ...transforms._axis_env import bind_axes
from ...transforms.layout._pieces import Pieces
from ...transforms.pipelines._pipeline import Pipeline
from ...transforms.pipelines._placements import buffers_placement, params_placement
from ...transforms.tree._placement import Merge, Placement
from ...transforms.tree._tree import named_leaves
from ..values._names import Names, tree_from
from ..values._snapshot import About, Snapshot
from ..values._values import Values
from ._objects import OfObjects

_HELD = ("params.", "pipeline.optimizer.", "pipeline.inner.optimizer.")  # by the storage of a train_step


class Source(Protocol):
    """Something that is saved and loaded.

    Attributes:
        mesh: The ranks.
        requests: What a rank asks of all of them, where its steps carry that.
        needs_params: Whether `start` needs parameters.
    """

    mesh: Mesh
    requests: Requests | None
    needs_params: bool

    def about(self) -> About:
        """What the manifest says of it."""

    def number(self, state: Any) -> int:
        """The number of steps that a state has taken."""

    def snapshot(self, state: Any) -> Snapshot:
        """What this rank has of it."""

    def start(self, params: Any, buffers: Any) -> Any:
        """A state at the start, which gives the form of a load."""

    def load(self, state: Any, values: Values, rank: Mapping[str, Any]) -> Callable[[], Any]:
        """A function that returns the state with the values of a checkpoint, by name. Until it is called nothing of the run has changed.

        Args:
            rank: What only this rank has saved.
        """


class OfStep:
    """A train_step; its state is a `TrainState`."""

    needs_params = True

    def __init__(self, step: TrainStep) -> None:
        run = step.run
        self._step, self.mesh = step, run.mesh
        self.requests: Requests | None = run.agreements.requests
        self._names = Names("pipeline", run.pipeline, self.mesh.shape)
        on_buffers = run.on_buffers
        self._on_buffers = None if on_buffers is None else Names("on_buffers", on_buffers, self.mesh.shape)

    def about(self) -> About:
        return About(repr(self._step.pipeline), {"bucket_bytes": self._step.bucket_bytes})

    def number(self, state: Any) -> int:
        return check_state(state).step

    def snapshot(self, state: Any) -> Snapshot:
        """What this rank has, after its pending verdicts.

        Raises:
            ValueError: the state is within an accumulation window.
            NonFinite, DesyncError: on all ranks: the last step was not taken.
        """
        run = self._step.run
        body = check_state(state).settled(run.token)
        run.agreements.drain(body.step)
        axes, found = self.mesh.shape, Snapshot(storage=body.storage, held=_HELD)
        found.cut("pipeline", body.storage.pieces)
        found.add("params", body.storage.leaves, params_placement(run.pipeline, axes))
        found.add_state(self._names, state.pipeline)
        if body.buffers is not None:
            found.add("buffers", body.buffers, buffers_placement(run.on_buffers, axes))
            if self._on_buffers is not None:
                found.add_state(self._on_buffers, body.buffers_state)
        counts = {"batches": body.batches, "weight": run.step_check.weight or 0.0}  # None before the first input
        mine = Placement((), None, Merge.MEAN)
        found.add("run", counts, mine)
        return found

    def start(self, params: Any, buffers: Any) -> Any:
        return self._step.init(params, buffers)

    def load(self, state: Any, values: Values, rank: Mapping[str, Any]) -> Callable[[], Any]:
        run, counts, saved = self._step.run, dict(values.under("run")), values.under("buffers")
        if saved.keys() != (state.buffers or {}).keys():
            raise CheckpointError(
                f"the checkpoint has the buffers {sorted(saved)}, but here are {sorted(state.buffers or {})}; pass restore(params, buffers)"
            )
        # Into the memory of the new state, which nobody has yet.
        params = tree_from("params", named_leaves(state.params), values.under("params"), in_place=True)
        pipeline = self._names.tree(state.pipeline, values, in_place=True)
        buffers = tree_from("buffers", state.buffers or {}, saved)
        on_buffers = () if self._on_buffers is None else self._on_buffers.tree(state.on_buffers, values)

        def take() -> Any:
            run.step_check.weight = counts["weight"] or None
            return loaded(state, run.token, params, pipeline, buffers, on_buffers, counts["batches"], run.accumulate)

        return take


class OfPipeline:
    """A pipeline in a loop of one's own; its state is the pair (params, state)."""

    needs_params = True
    requests: Requests | None = None

    def __init__(self, pipeline: Pipeline, mesh: Mesh) -> None:
        self._pipeline, self.mesh = pipeline, mesh
        self._names = Names("pipeline", pipeline, mesh.shape)

    def about(self) -> About:
        return About(repr(self._pipeline), {})

    def number(self, state: Any) -> int:
        _, own = self._pair(state)
        return int((own.inner if self._pipeline.skips else own).step)

    def snapshot(self, state: Any) -> Snapshot:
        params, own = self._pair(state)
        found = Snapshot()
        found.cut("pipeline", self._pieces(params))
        found.add("params", named_leaves(params), params_placement(self._pipeline, self.mesh.shape))
        found.add_state(self._names, own)
        return found

    def _pair(self, state: Any) -> Any:
        if not isinstance(state, tuple) or len(state) != 2:
            raise TypeError(
                f"the state of a pipeline is saved with the parameters: pass (params, state), got {type(state).__name__}"
            )
        return state

    def _pieces(self, params: Any) -> Pieces | None:
        if self._pipeline.sharding is None:
            return None
        with bind_axes(self.mesh.axes):
            return self._pipeline.sharding.pieces(params)

    def start(self, params: Any, buffers: Any) -> Any:
        if buffers is not None:
            raise TypeError("a pipeline has no buffers; save them as objects of their own: fjoin.save(path, {...})")
        with bind_axes(self.mesh.axes):
            return params, self._pipeline.init(params)

    def load(self, state: Any, values: Values, rank: Mapping[str, Any]) -> Callable[[], Any]:
        params, own = state
        new = tree_from("params", params, values.under("params")), self._names.tree(own, values)
        return lambda: new


def source_of(what: Any, mesh: Mesh | None) -> Source:
    """The source for what a user passes.

    Raises:
        TypeError: it cannot be saved.
    """
    if isinstance(what, TrainStep):
        if mesh is not None:
            raise TypeError("a train_step has a mesh of its own; leave mesh= out")
        return OfStep(what)
    if mesh is not None:
        check_mesh("save", mesh)
    if isinstance(what, Pipeline):
        return OfPipeline(what, mesh or world_mesh())
    if isinstance(what, Mapping) and what:
        return OfObjects(what, mesh or world_mesh())
    raise TypeError(
        f"a {type(what).__name__} cannot be saved; pass a train_step, a pipeline, or a dict of objects with a state_dict, such as "
        f'{{"model": model, "optimizer": optimizer}}'
    )
