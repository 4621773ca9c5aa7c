"""Objects with a state dict, as something that is saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..._errors import CheckpointError
from ...agreement._requests import Requests
from ...groups._mesh import Mesh
from ...transforms.tree._placement import Placement
from ..values._names import under
from ..values._skeleton import put_together, taken_apart
from ..values._snapshot import About, Snapshot


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
