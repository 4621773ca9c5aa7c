"""Objects with a state dict, as something that is saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..._errors import CheckpointError
from ...agreement._requests import Requests
from ...groups._mesh import Mesh
from ..values._snapshot import About, Snapshot
from ..values._values import Values
from ._items import item_of


class OfObjects:
    """Objects with `state_dict` and `load_state_dict`, by name; they are their own state."""

    needs_params = False
    requests: Requests | None = None

    def __init__(self, objects: Mapping[str, Any], mesh: Mesh) -> None:
        for name in objects:
            if inside := [other for other in objects if other.startswith(f"{name}.")]:
                raise ValueError(f"{inside[0]!r} begins with the name of {name!r}; give the objects other names")
        self._items, self.mesh = {name: item_of(name, one, mesh) for name, one in objects.items()}, mesh

    def about(self) -> About:
        return About(sorted(self._items), {})

    def number(self, state: Any) -> int:
        if type(state) is not int or state < 0:
            raise TypeError(
                f"with objects the state is the number of steps so far, got {state!r}; write fjoin.save(path, objects, steps)"
            )
        return state

    def snapshot(self, state: Any) -> Snapshot:
        found = Snapshot()
        found.rank = {"objects": {name: item.add(found) for name, item in self._items.items()}, "steps": state}
        return found

    def start(self, params: Any, buffers: Any) -> Any:
        return 0

    def load(self, state: Any, values: Values, rank: Mapping[str, Any]) -> Callable[[], Any]:
        shown = rank.get("objects", {})
        if shown.keys() != self._items.keys():
            raise CheckpointError(
                f"the checkpoint is of {sorted(shown)}, but here are {sorted(self._items)}; pass the same names"
            )
        loads = [item.load(values, shown[name]) for name, item in self._items.items()]

        def take() -> Any:
            for load in loads:
                load()
            return rank["steps"]

        return take
