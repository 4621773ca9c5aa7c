"""What is saved: a step, a pipeline, modules and optimizers, and the position of a loop over data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from .._errors import CheckpointError
from .._functional import unwrapped
from ..ddp import Handle
from ..fsdp import ShardedHandle
from ..groups import Communicator, Mesh, mesh_or_world
from ..loading import check_position
from ..optim import ZeroRedundancyOptimizer
from ..records import Requests, put_together, taken_apart
from ..training import TrainStep, check_state, loaded
from ..transforms.axes import bind_axes
from ..transforms.base import Merge, Placement, trees
from ..transforms.layout import Slice
from ..transforms.pipelines import Pipeline, buffers_placement, params_placement
from ._sharded_item import ShardedItem
from ._values import Names, Snapshot, Values, tree_from

_GROUPS = "$groups"  # stands for the state of a ZeroRedundancyOptimizer whose slices are among the values


class PlainItem:
    """An object with a state dict. Values that are equal on all ranks are saved once, others for each rank."""

    def __init__(self, name: str, one: Any, mesh: Communicator) -> None:
        self._name, self._one, self._mesh = name, one, mesh

    def add(self, found: Snapshot) -> Any:
        """Add what this rank has of it; returns what is no tensor, as JSON."""
        tensors: dict[str, Tensor] = {}
        shown = taken_apart(self._state(), f"objects.{self._name}", tensors)
        found.add_by_content(dict(sorted(tensors.items())), self._mesh.shape)  # in one order on all ranks
        return shown

    def _state(self) -> Any:
        """The state; of an object that gathers it on one rank, on each rank in turn."""
        if not hasattr(self._one, "consolidate_state_dict"):
            return self._one.state_dict()
        found = None
        for to in range(self._mesh.size):
            self._one.consolidate_state_dict(to)
            found = self._one.state_dict() if to == self._mesh.rank else found
        return found

    def load(self, values: Values, shown: Any) -> Callable[[], None]:
        """A function that loads the values of a checkpoint, by name. Until it is called nothing has changed.

        Args:
            shown: What `add` returned.
        """
        state = put_together(shown, values)
        for wrapper in ("_orig_mod", "module", "_orig_mod"):  # of checkpoints of 0.2
            if isinstance(self._one, nn.Module) and not hasattr(self._one, wrapper):
                consume_prefix_in_state_dict_if_present(state, f"{wrapper}.")
        return lambda: self._one.load_state_dict(state)


class HandleItem:
    """The handle of a registered module: the state of its pipeline, with the placements of that."""

    def __init__(self, name: str, handle: Handle, mesh: Communicator) -> None:
        self._handle = handle
        self._names = Names(f"objects.{name}", handle.run.what, mesh.shape)

    def add(self, found: Snapshot) -> Any:
        found.add_state(self._names, self._handle.pipeline, self._handle.run.pieces)
        return taken_apart(self._handle.run.numbers, "", {})

    def load(self, values: Values, shown: Any) -> Callable[[], None]:
        state = self._handle.run.dict_of(self._names.tree(self._handle.pipeline, values), **put_together(shown, {}))
        return lambda: self._handle.load_state_dict(state)


class ZeroItem:
    """A ZeroRedundancyOptimizer: each rank saves, and reads, the state of its own slices."""

    def __init__(self, name: str, zero: ZeroRedundancyOptimizer, mesh: Communicator) -> None:
        self._zero, self._prefix, (self._axis,) = zero, f"objects.{name}.state", mesh.shape

    def add(self, found: Snapshot) -> Any:
        found.slices[self._prefix] = self._slice
        tensors = {
            f"{one.number}.{key}": value
            for one in self._zero.owned()
            for key, value in one.state.items()
            if value is not None and (value.dim() or not one.start)  # a common value is in all slices
        }
        found.add(self._prefix, tensors, Placement((), self._axis))
        return {_GROUPS: taken_apart(torch.optim.Optimizer.state_dict(self._zero)["param_groups"], "", {})}

    def load(self, values: Values, shown: Any) -> Callable[[], None]:
        if _GROUPS not in shown:  # it was saved where another object stepped
            state = put_together(shown, values)
            return lambda: self._zero.load_state_dict(state)
        states: dict[int, dict[str, Any]] = {}
        for name, value in values.under(self._prefix).items():
            number, _, key = name.partition(".")
            states.setdefault(int(number), {})[key] = self._in_place(f"{self._prefix}.{name}", value)
        whole = {"state": states, "param_groups": put_together(shown[_GROUPS], {})}
        return lambda: self._zero.load_state_dict(whole)

    def _slice(self, name: str) -> Slice | None:
        number, _, _ = name.removeprefix(f"{self._prefix}.").partition(".")
        return (self._zero.slices() or {}).get(int(number))

    def _in_place(self, name: str, value: Tensor) -> Tensor:
        """A slice in a tensor of the whole shape, of which `load_state_dict` reads only this rank's slice."""
        own = self._slice(name)
        if own is None:
            raise CheckpointError(f"the checkpoint has the state {name!r}, whose parameter is not here")
        if own.whole or not value.dim():
            return value
        whole = torch.empty(own.shape, dtype=value.dtype)  # memory that nothing touches is none
        whole.view(-1)[own.start : own.stop] = value
        return whole


SavedItem = PlainItem | HandleItem | ZeroItem | ShardedItem


def item_of(name: str, one: Any, mesh: Communicator) -> SavedItem:
    """What saves and loads an object.

    Raises:
        TypeError: it has no state dict.
    """
    if isinstance(one, ShardedHandle):
        return ShardedItem(name, one, mesh)
    if isinstance(one, Handle) and one.run.mesh.shape.keys() == mesh.shape.keys():
        return HandleItem(name, one, mesh)
    sliced = isinstance(one, ZeroRedundancyOptimizer) and one.slices() is not None
    if sliced and [one.world_size] == [*mesh.shape.values()]:
        return ZeroItem(name, one, mesh)
    if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
        raise TypeError(f"{name!r} is a {type(one).__name__}, expected an object with state_dict and load_state_dict")
    return PlainItem(name, unwrapped(one) if isinstance(one, nn.Module) else one, mesh)


class OfObjects:
    """Objects with `state_dict` and `load_state_dict`, by name; they are their own state."""

    trees: Sequence[str] = ()
    requests: Sequence[Requests] = ()

    def __init__(self, objects: Mapping[str, Any], mesh: Communicator) -> None:
        self._items, self.mesh = {name: item_of(name, one, mesh) for name, one in objects.items()}, mesh
        self.spec: Any = sorted(self._items)

    def number(self, state: Any) -> int:
        if type(state) is not int or state < 0:
            expected = "with objects the state is the number of steps"
            raise TypeError(f"{expected}, got {state!r}; write fjoin.save(path, objects, steps)")
        return state

    def snapshot(self, state: Any) -> Snapshot:
        found = Snapshot()
        found.rank = {"objects": {name: item.add(found) for name, item in self._items.items()}, "steps": state}
        return found

    def start(self, params: Any, buffers: Any) -> Any:
        return 0

    def load(self, state: Any, values: Values, rank: Mapping[str, Any]) -> Callable[[], Any]:
        # A sharded module and a train_step have the same values.
        sharded = {name: None for name, item in self._items.items() if isinstance(item, ShardedItem)}
        shown = sharded | rank.get("objects", {})
        if shown.keys() != self._items.keys():
            both = f"the checkpoint is of {sorted(shown)}, here are {sorted(self._items)}"
            raise CheckpointError(f"{both}; pass the same names")
        loads, steps = [item.load(values, shown[name]) for name, item in self._items.items()], rank["steps"]

        def take() -> Any:
            for load in loads:
                load()
            return steps

        return take


class OfStep:
    """A train_step; its state is a `TrainState`.

    Args:
        at: What comes behind "params" and the like in names: "", or "." and the name of the step.

    Attributes:
        mesh: The ranks.
        spec: What the manifest says of it, the same on all ranks; JSON.
        requests: What a rank asks of all of them, where steps carry that; of each step.
        trees: The names of the trees of parameters that `start` needs; "" for one without a name.
    """

    trees: Sequence[str] = ("",)

    def __init__(self, step: TrainStep, at: str = "") -> None:
        run, axes = step.run, step.run.mesh.shape
        self._step, self._at, self.mesh, self.spec = step, at, run.mesh, repr(step.pipeline)
        self.requests: Sequence[Requests] = [run.records.requests]
        self._names = Names(f"pipeline{at}", run.pipeline, axes)
        self._on_buffers = None if run.on_buffers is None else Names(f"on_buffers{at}", run.on_buffers, axes)

    def number(self, state: Any) -> int:
        """The number of steps that a state has taken."""
        return check_state(state).step

    def snapshot(self, state: Any) -> Snapshot:
        """What this rank has, after its pending verdicts.

        Raises:
            ValueError: the state is within an accumulation window.
            NonFinite, DesyncError: on all ranks: the last step was not taken.
        """
        run = self._step.run
        body = check_state(state).settled(run.token)
        run.records.drain(body.step)
        axes, at, found = self.mesh.shape, self._at, Snapshot()
        found.add(f"params{at}", body.storage.leaves, params_placement(run.pipeline, axes))
        found.add_state(self._names, state.pipeline, body.storage.pieces)
        if body.buffers is not None:
            found.add(f"buffers{at}", body.buffers, buffers_placement(run.on_buffers, axes))
            if self._on_buffers is not None:
                found.add_state(self._on_buffers, body.buffers_state)
        found.add(f"run{at}", {"batches": body.batches}, Placement((), None, Merge.MEAN))
        return found

    def start(self, params: Any, buffers: Any) -> Any:
        """A state at the start, which gives the form of a load."""
        return self._step.init(params, buffers)

    def load(self, state: Any, values: Values, rank: Mapping[str, Any]) -> Callable[[], Any]:
        """A function that returns the state with the values of a checkpoint, by name. Until it is called nothing of the
        run has changed.

        Args:
            rank: What only this rank has saved.
        """
        run, at = self._step.run, self._at
        # Into the memory of the new state, which nobody has yet.
        params = tree_from(f"params{at}", trees.named_leaves(state.params), values.under(f"params{at}"), in_place=True)
        pipeline = self._names.tree(state.pipeline, values, in_place=True)
        buffers = tree_from(f"restore(params, buffers): buffers{at}", state.buffers or {}, values.under(f"buffers{at}"))
        on_buffers = () if self._on_buffers is None else self._on_buffers.tree(state.on_buffers, values)
        return partial(loaded, state, run, params, pipeline, buffers, on_buffers, values[f"run{at}.batches"])


class OfPipeline:
    """A pipeline in a loop of one's own; its state is the pair (params, state)."""

    trees: Sequence[str] = ("",)
    requests: Sequence[Requests] = ()

    def __init__(self, pipeline: Pipeline, mesh: Communicator, at: str = "") -> None:
        if pipeline.sharding is not None and not pipeline.sharding.gathers:
            why = "steps pieces, and only its loop knows how they make up whole parameters"
            remedy = "each rank saves its own, as an object with state_dict and load_state_dict"
            raise TypeError(f"{pipeline!r} {why}; {remedy}")
        self._pipeline, self._at, self.mesh, self.spec = pipeline, at, mesh, repr(pipeline)
        self._names = Names(f"pipeline{at}", pipeline, mesh.shape)

    def number(self, state: Any) -> int:
        _, own = self._pair(state)
        return int((own.inner if self._pipeline.skips else own).step)

    def snapshot(self, state: Any) -> Snapshot:
        (params, own), found, sharding = self._pair(state), Snapshot(), self._pipeline.sharding
        found.add(f"params{self._at}", trees.named_leaves(params), params_placement(self._pipeline, self.mesh.shape))
        with bind_axes(self.mesh.axes):
            pieces = None if sharding is None else sharding.pieces(params)
        found.add_state(self._names, own, pieces)
        return found

    def _pair(self, state: Any) -> Any:
        if not isinstance(state, tuple) or len(state) != 2:
            raise TypeError(f"with a pipeline pass (params, state) as the state, got {type(state).__name__}")
        return state

    def start(self, params: Any, buffers: Any) -> Any:
        if buffers is not None:
            raise TypeError("a pipeline has no buffers; save them as objects of their own: fjoin.save(path, {...})")
        with bind_axes(self.mesh.axes):
            return params, self._pipeline.init(params)

    def load(self, state: Any, values: Values, rank: Mapping[str, Any]) -> Callable[[], Any]:
        params, own = state
        name = f"params{self._at}"
        new = tree_from(name, params, values.under(name)), self._names.tree(own, values)
        return lambda: new


class OfTogether:
    """Steps and pipelines by name, and objects beside them; its state is the dict of the states of steps and pipelines.

    The first part gives the checkpoint its number. The first step carries requests to save.
    """

    def __init__(self, parts: Mapping[str, OfStep | OfPipeline], objects: OfObjects) -> None:
        self._parts, self._objects, self.trees = parts, objects, [*parts]
        self._first = self.trees[0]
        self.mesh, self.requests = parts[self._first].mesh, [asks for one in parts.values() for asks in one.requests]
        self.spec: Any = [{name: one.spec for name, one in parts.items()}, objects.spec]
        for name, one in parts.items():
            if one.mesh.shape != self.mesh.shape:
                both = f"a mesh of {one.mesh.shape}, and {self._first!r} one of {self.mesh.shape}"
                raise ValueError(f"{name!r} has {both}; steps that are saved together have the same ranks")

    def _of(self, what: str, given: Any) -> Any:
        if isinstance(given, Mapping) and given.keys() == self._parts.keys():
            return given
        got = sorted(given) if isinstance(given, Mapping) else type(given).__name__
        raise TypeError(f"{what} must be a dict with one value for each of {self.trees}, got {got}")

    def number(self, state: Any) -> int:
        return self._parts[self._first].number(self._of("the state", state)[self._first])

    def snapshot(self, state: Any) -> Snapshot:
        found = self._objects.snapshot(self.number(state))
        for name, one in self._of("the state", state).items():
            found.include(self._parts[name].snapshot(one))
        return found

    def start(self, params: Any, buffers: Any) -> Any:
        params, buffers = self._of("params", params), {} if buffers is None else buffers
        if not isinstance(buffers, Mapping) or buffers.keys() - self._parts.keys():
            raise TypeError(f"buffers must be a dict by the names {self.trees}, got {buffers!r}")
        return {name: one.start(params[name], buffers.get(name)) for name, one in self._parts.items()}

    def load(self, state: Any, values: Values, rank: Mapping[str, Any]) -> Callable[[], Any]:
        takes = {name: one.load(state[name], values, rank) for name, one in self._parts.items()}
        others = {name: one for name, one in rank.get("objects", {}).items() if name not in self._parts}
        objects = self._objects.load(0, values, {**rank, "objects": others})
        return lambda: (objects(), {name: take() for name, take in takes.items()})[1]


Source = OfStep | OfPipeline | OfObjects | OfTogether


def _of_one(one: TrainStep | Pipeline, mesh: Communicator, at: str) -> OfStep | OfPipeline:
    return OfStep(one, at) if isinstance(one, TrainStep) else OfPipeline(one, mesh, at)


def source_of(what: Any, mesh: Mesh | None) -> Source:
    """The source for what a user passes.

    Raises:
        TypeError: it cannot be saved.
    """
    if not isinstance(what, Mapping | TrainStep | Pipeline) or what == {}:
        known = "a train_step, a pipeline, or a dict of these and of objects with a state_dict"
        such = '{"model": model, "optimizer": optimizer}'
        raise TypeError(f"a {type(what).__name__} cannot be saved; pass {known}, such as {such}")
    parts = what if isinstance(what, Mapping) else {"": what}
    if isinstance(what, Mapping) and not all(isinstance(name, str) and name for name in what):
        raise TypeError(f"the names of what is saved must be text, got {[*what]}")
    for name in parts:
        if inside := [other for other in parts if other.startswith(f"{name}.")]:
            raise ValueError(f"{inside[0]!r} begins with the name of {name!r}; give the objects other names")
    steps = {name: one for name, one in parts.items() if isinstance(one, TrainStep | Pipeline)}
    meshes = [one.run.mesh for one in parts.values() if isinstance(one, TrainStep | ShardedHandle)]
    if meshes and mesh is not None:
        raise TypeError("a train_step, or a sharded module, has a mesh of its own; leave mesh= out")
    ranks = meshes[0] if meshes else mesh_or_world("save", mesh)
    sources = {name: _of_one(one, ranks, name and f".{name}") for name, one in steps.items()}
    if "" in sources:
        return sources[""]
    objects = OfObjects({name: one for name, one in parts.items() if name not in steps}, ranks)
    return OfTogether(sources, objects) if sources else objects


DATA = "data"
LOOP = "loop"  # whether a step was saved within a joined loop, with its position or without


def add_position(found: Snapshot, data: Any) -> None:
    """Add the position of this rank, which is its own.

    Raises:
        TypeError: `data` is no loop over data.
    """
    if not callable(getattr(data, "state_dict", None)) or not hasattr(data, "stopped"):
        text = f"data must be the loop over the loader, batches = step.join(loader), got a {type(data).__name__}"
        raise TypeError(f"{text}: a loader is one batch ahead of the loop")
    tensors: dict[str, Tensor] = {}
    found.rank[DATA] = taken_apart(data.state_dict(), DATA, tensors)
    found.add_by_content(tensors, ())


def position_of(values: Mapping[str, Any], own: Mapping[str, Any], data: Any) -> Callable[[], None]:
    """A function that loads the position into the loop; every value of it has been looked at.

    Raises:
        CheckpointError: the checkpoint has no position.
        ValueError: it is not what a loop has saved.
    """
    if data is None:
        return lambda: None
    if own.get(DATA) is None:
        raise CheckpointError("the checkpoint has no position of data; restore it without data=, as it was saved")
    check_position(position := put_together(own[DATA], values))
    warn_apart(data, (position["epoch"], position["batches"]))
    return partial(data.load_state_dict, position)


def warn_apart(data: Any, place: tuple[int, int]) -> None:
    """Warn where the loop goes on from another place: a crash came between two saves of what one loop trains."""
    if getattr(data, "resumed", None) not in (None, place):
        both = f"this checkpoint is of (epoch, batches) = {place}, and the loop goes on from {data.resumed}"
        remedy = 'save what one loop trains as one: Checkpoints(path, {"a": step, "b": other})'
        warnings.warn(f"{both}, of another one; {remedy}", stacklevel=2)
