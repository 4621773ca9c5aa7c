"""The data behind the state of a training run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ...buckets._flat_params import Storage
from ...groups.failures._unfinished import StepEnd
from ...reducer._hook_state import HookState
from ._ends import EndStates


@dataclass
class StateData:
    """The data behind a `TrainState`. Steps change it in place; only the state with the same `version` may use it."""

    storage: Storage
    buffers: dict[str, Tensor] | None
    hook: Any
    ends: EndStates
    rebuild: Callable[[dict[str, Any]], Any]  # from path -> leaf to the tree that the user gave
    owner: object  # the token of the step that made it; only that step can run it
    buffers_state: Any = ()  # of the transform of the buffers
    gather: int = 0  # the number of gathers of encoded changes
    buffers_before: dict[str, Tensor] | None = None  # the buffers before this step's first forward pass
    batches_before: int = 0  # the batches before this step's first call
    version_before: int = 0  # the version of the state given to this step's first call
    step: int = 0  # the number of steps taken
    batches: int = 0  # the number of batches consumed on this rank
    calls: int = 0  # the number of calls of the step, larger than `step` where gradients are accumulated
    window: dict[str, Any] = field(default_factory=dict)  # lane sums of an open window
    unit: float = 1.0  # the factor that scales this window's gradients in messages
    version: int = 0
    torn: str = ""
    lost: str = ""  # why the open window is lost; all else is intact, so the state can still be read
    ended: StepEnd | None = None  # the end of its last step on a device; copies share it
    outer: Any = None  # the state of a pipeline that leaves steps out, without that of its inner pipeline

    def hook_state(self) -> Any:
        """The hook's state; after a plain reduction it is made only on demand."""
        if callable(self.hook):
            self.hook = self.hook()
        return self.hook.whole() if isinstance(self.hook, HookState) else self.hook

    def lose_window(self, calls: int) -> None:
        """Discard the micro-batches of an open window: the state is again that of the last completed step."""
        self.window, self.calls = {}, calls
        self.buffers, self.batches = self.buffers_before, self.batches_before
        self.storage.clear_grads()

    def clone(self) -> StateData:
        buffers = None if self.buffers is None else {k: b.clone() for k, b in self.buffers.items()}
        new = replace(self, storage=self.storage.clone(), window=dict(self.window), version=0, lost="")
        new.buffers = buffers
        return new
