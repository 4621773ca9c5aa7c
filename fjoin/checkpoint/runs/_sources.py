"""What can be saved: a train_step, a pipeline in a loop of one's own, or objects with a state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

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
from ...transforms.tree._placement import Placement
from ...transforms.tree._tree import named_leaves
from ._load import tree_from, under
from ._skeleton import put_together, taken_apart
from ._snapshot import Snapshot, of_pipeline, of_step


class About(NamedTuple):
    """Fields of a manifest, the same on all ranks."""

    spec: Any
    settings: dict[str, Any]


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

    def load(self, state: Any, values: Mapping[str, Any], rank: Mapping[str, Any]) -> Callable[[], Any]:
        """A function that returns the state with the values of a checkpoint, by name. Until it is called nothing has changed.

        Args:
            rank: What only this rank has saved.
        """


class OfStep:
    """A train_step; its state is a `TrainState`."""

    needs_params = True

    def __init__(self, step: TrainStep) -> None:
        self._step, self.mesh = step, step.run.mesh
        self.requests: Requests | None = step.run.agreements.requests

    def about(self) -> About:
        return About(repr(self._step.pipeline), {"bucket_bytes": self._step.bucket_bytes})

    def number(self, state: Any) -> int:
        return check_state(state).step

    def snapshot(self, state: Any) -> Snapshot:
        return of_step(self._step, check_state(state))

    def start(self, params: Any, buffers: Any) -> Any:
        return self._step.init(params, buffers)

    def load(self, state: Any, values: Mapping[str, Any], rank: Mapping[str, Any]) -> Callable[[], Any]:
        run, counts, saved = self._step.run, under("run", values), under("buffers", values)
        if saved.keys() != (state.buffers or {}).keys():
            raise CheckpointError(
                f"the checkpoint has the buffers {sorted(saved)}, but here are {sorted(state.buffers or {})}; pass restore(params, buffers)"
            )
        params, pipeline = (
            tree_from("params", named_leaves(state.params), values),
            tree_from("pipeline", state.pipeline, values),
        )
        buffers = tree_from("buffers", state.buffers or {}, values)
        on_buffers = tree_from("on_buffers", state.on_buffers, values)

        def take() -> Any:
            run.step_check.weight = counts.get("weight")
            return loaded(state, run.token, params, pipeline, buffers, on_buffers, counts["batches"], run.accumulate)

        return take


class OfPipeline:
    """A pipeline in a loop of one's own; its state is the pair (params, state)."""

    needs_params = True
    requests: Requests | None = None

    def __init__(self, pipeline: Pipeline, mesh: Mesh) -> None:
        self._pipeline, self.mesh = pipeline, mesh

    def about(self) -> About:
        return About(repr(self._pipeline), {})

    def number(self, state: Any) -> int:
        _, own = self._pair(state)
        return int((own.inner if self._pipeline.skips else own).step)

    def snapshot(self, state: Any) -> Snapshot:
        params, own = self._pair(state)
        return of_pipeline(self._pipeline, params, own, self.mesh.shape, self._pieces(params))

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

    def load(self, state: Any, values: Mapping[str, Any], rank: Mapping[str, Any]) -> Callable[[], Any]:
        params, own = state
        new = tree_from("params", params, values), tree_from("pipeline", own, values)
        return lambda: new


class OfObjects:
    """Objects with `state_dict` and `load_state_dict`, by name; they are their own state."""

    needs_params = False
    requests: Requests | None = None

    def __init__(self, objects: Mapping[str, Any], mesh: Mesh) -> None:
        for name, one in objects.items():
            if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                raise TypeError(
                    f"{name!r} is a {type(one).__name__}, expected an object with state_dict and load_state_dict"
                )
        self._objects, self.mesh = dict(objects), mesh

    def about(self) -> About:
        return About(sorted(self._objects), {})

    def number(self, state: Any) -> int:
        if type(state) is not int or state < 0:
            raise TypeError(
                f"with objects the state is the number of steps so far, got {state!r}; write fjoin.save(path, objects, steps)"
            )
        return state

    def snapshot(self, state: Any) -> Snapshot:
        tensors: dict[str, Tensor] = {}
        shown = {name: taken_apart(self._state_of(one), name, tensors) for name, one in self._objects.items()}
        found, all_of = Snapshot(), tuple(self.mesh.shape)
        for name, value in sorted(tensors.items()):  # in one order on all ranks
            found.values[f"objects.{name}"], found.places[f"objects.{name}"] = value.detach(), Placement(all_of)
        found.rank = {"objects": shown, "steps": state}
        found.by_content = True
        return found

    def _state_of(self, one: Any) -> Any:
        """The state of an object; of one that gathers it on one rank, on each rank in turn."""
        if not hasattr(one, "consolidate_state_dict"):
            return one.state_dict()
        found = None
        for to in range(self.mesh.size):
            one.consolidate_state_dict(to)
            found = one.state_dict() if to == self.mesh.rank else found
        return found

    def start(self, params: Any, buffers: Any) -> Any:
        return 0

    def load(self, state: Any, values: Mapping[str, Any], rank: Mapping[str, Any]) -> Callable[[], Any]:
        shown = rank.get("objects", {})
        if shown.keys() != self._objects.keys():
            raise CheckpointError(
                f"the checkpoint is of {sorted(shown)}, but here are {sorted(self._objects)}; pass the same names"
            )
        tensors = under("objects", values)
        states = {name: put_together(shown[name], tensors) for name in self._objects}

        def take() -> Any:
            for name, one in self._objects.items():
                one.load_state_dict(states[name])
            return rank["steps"]

        return take


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
