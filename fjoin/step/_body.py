"""The data of a training state, and the ends of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..buckets import Storage
from ..groups import StepEnd
from ..transforms.base import trees
from ..transforms.layout import Bucket, Pieces
from ..transforms.optimizers import masters_of, state_fields
from ..transforms.pipelines import Pipeline
from ._hook_state import HookState


class EndStates(NamedTuple):
    """The states of a pipeline's transforms after the optimizer, in memory of their own."""

    after: Any = ()
    on_state: Any = ()


def init_ends(
    pipeline: Pipeline, own: dict[str, Tensor], states: Mapping[str, Any], lent: Iterable[Tensor]
) -> EndStates:
    """The states before the first step.

    Args:
        own: Path -> the parameters, or slices of them, that this rank steps.
        states: The optimizer's states by path.
        lent: The memory of the parameters, which a state must not share.
    """
    after: Any = ()
    on_state: Any = ()
    if pipeline.after:
        masters = masters_of(own, dict(states))
        after = trees.copy_if_aliased(pipeline.after.init(masters), [*lent, *masters.values()])
    if pipeline.on_state:
        fields = state_fields(states)
        on_state = trees.copy_if_aliased(pipeline.on_state.init(fields), fields)
    return EndStates(after, on_state)


class Params(Protocol):
    """Parameters, and the states of their optimizer, wherever they are: in a `Storage`, or in a module.

    Attributes: as of a `Storage`.
    """

    leaves: dict[str, Tensor]
    flats: list[Tensor]
    layout: tuple[Bucket, ...]
    pieces: Pieces | None
    shapes: dict[str, torch.Size]
    float16: bool
    exact: list[Tensor]

    @property
    def has_masters(self) -> bool: ...

    def own_leaves(self) -> dict[str, Tensor]: ...

    def optimizer_states(self) -> dict[str, Any]: ...


@dataclass(kw_only=True)
class StepData:
    """What a `Step` changes in place."""

    storage: Params
    hook: Any
    ends: EndStates
    step: int = 0  # the number of steps taken
    outer: Any = None  # the state of a pipeline that leaves steps out, without that of its inner pipeline

    def hook_state(self) -> Any:
        """The hook's state, keyed by path."""
        return self.hook.whole() if isinstance(self.hook, HookState) else self.hook


@dataclass(kw_only=True)
class StateData(StepData):
    """The data behind a `TrainState`. Steps change it in place; only the state with the same `version` may use it."""

    storage: Storage
    buffers: dict[str, Tensor] | None
    rebuild: Callable[[dict[str, Any]], Any]  # from path -> leaf to the tree that the user gave
    owner: object  # the token of the step that made it; only that step can run it
    buffers_state: Any = ()  # of the transform of the buffers
    gather: int = 0  # the number of gathers of encoded changes
    buffers_before: dict[str, Tensor] | None = None  # the buffers before this step's first forward pass
    batches_before: int = 0  # the batches before this step's first call
    version_before: int = 0  # the version of the state given to this step's first call
    batches: int = 0  # the number of batches consumed on this rank
    calls: int = 0  # the number of calls of the step, larger than `step` where gradients are accumulated
    window: dict[str, Any] = field(default_factory=dict)  # this rank's record of an open window
    window_weight: float = 1.0  # the weight of this window's first call of weight above 0
    version: int = 0
    torn: bool = False  # whether a step has failed after it had changed some of the parameters
    lost: str = ""  # why the open window is lost; all else is intact, so the state can still be read
    ended: StepEnd | None = None  # the end of its last step on a device; copies share it

    def lose_window(self, calls: int) -> None:
        """Discard the micro-batches of an open window: the state is again that of the last completed step."""
        self.window, self.calls = {}, calls
        self.buffers, self.batches = self.buffers_before, self.batches_before
        self.storage.clear_grads()

    def clone(self) -> StateData:
        buffers = None if self.buffers is None else {k: b.clone() for k, b in self.buffers.items()}
        storage, window = self.storage.clone(), dict(self.window)
        return replace(self, storage=storage, buffers=buffers, window=window, version=0, lost="")
