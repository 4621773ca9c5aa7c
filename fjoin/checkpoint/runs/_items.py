"""One object of several, as something that is saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..._errors import CheckpointError
from ...ddp._handle import Handle
from ...groups._mesh import Mesh
from ...optim.zero._zero_redundancy_optimizer import ZeroRedundancyOptimizer
from ...transforms.tree._placement import Placement
from ..values._names import Names
from ..values._skeleton import put_together, taken_apart
from ..values._slices import Slice
from ..values._snapshot import Snapshot
from ..values._values import Values

_GROUPS = "$groups"  # stands for the state of a ZeroRedundancyOptimizer whose slices are among the values


class Item(Protocol):
    """One of the objects that are saved and loaded together."""

    def add(self, found: Snapshot) -> Any:
        """Add what this rank has of it; returns what is no tensor, as JSON."""

    def load(self, values: Values, shown: Any) -> Callable[[], None]:
        """A function that loads the values of a checkpoint, by name. Until it is called nothing has changed.

        Args:
            shown: What `add` returned.
        """


class PlainItem:
    """An object with a state dict. Values that are equal on all ranks are saved once, others for each rank."""

    def __init__(self, name: str, one: Any, mesh: Mesh) -> None:
        self._name, self._one, self._mesh = name, one, mesh

    def add(self, found: Snapshot) -> Any:
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
        state = put_together(shown, values)
        return lambda: self._one.load_state_dict(state)


class HandleItem:
    """The handle of a registered module: the state of its pipeline, with the placements of that."""

    def __init__(self, name: str, handle: Handle, mesh: Mesh) -> None:
        self._handle, self._prefix = handle, f"objects.{name}"
        self._names = Names(self._prefix, handle.what, mesh.shape)

    def add(self, found: Snapshot) -> Any:
        handle = self._handle
        found.add_state(self._names, handle.pipeline)
        found.cut(self._prefix, handle.pieces)
        return taken_apart({"step": handle.step, "total": handle.total, "parameters": handle.checksum}, "", {})

    def load(self, values: Values, shown: Any) -> Callable[[], None]:
        state = self._handle.dict_of(self._names.tree(self._handle.pipeline, values), **put_together(shown, {}))
        return lambda: self._handle.load_state_dict(state)


class ZeroItem:
    """A ZeroRedundancyOptimizer: each rank saves, and reads, the state of its own slices."""

    def __init__(self, name: str, zero: ZeroRedundancyOptimizer, mesh: Mesh) -> None:
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
            states.setdefault(int(number), {})[key] = self._in_place(name, value)
        whole = {"state": states, "param_groups": put_together(shown[_GROUPS], {})}
        return lambda: self._zero.load_state_dict(whole)

    def _slice(self, name: str, params: Sequence[str] = ()) -> Slice | None:
        slices, number = self._zero.slices(), int(name.partition(".")[0])
        if slices is None or number not in slices:
            return None
        shape, start, stop, whole = slices[number]
        return Slice(shape, start, stop, whole, holds=start < stop)

    def _in_place(self, name: str, value: Tensor) -> Tensor:
        """A slice in a tensor of the whole shape, of which `load_state_dict` reads only this rank's slice."""
        own = self._slice(name)
        if own is None:
            raise CheckpointError(
                f"{self._prefix} has a state of the parameter {name.partition('.')[0]}, which is not here"
            )
        if own.whole or not value.dim():
            return value
        whole = torch.empty(own.shape, dtype=value.dtype)  # memory that nothing touches is none
        whole.view(-1)[own.start : own.stop] = value
        return whole


def item_of(name: str, one: Any, mesh: Mesh) -> Item:
    """What saves and loads an object.

    Raises:
        TypeError: it has no state dict.
    """
    if isinstance(one, Handle) and one.axes.keys() == mesh.shape.keys():
        return HandleItem(name, one, mesh)
    if (
        isinstance(one, ZeroRedundancyOptimizer)
        and one.slices() is not None
        and [one.world_size] == [*mesh.shape.values()]
    ):
        return ZeroItem(name, one, mesh)
    if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
        raise TypeError(f"{name!r} is a {type(one).__name__}, expected an object with state_dict and load_state_dict")
    return PlainItem(name, one, mesh)
