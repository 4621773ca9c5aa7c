"""Parameters whose gathers are under way, and their use in a forward pass."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..groups.failures._unfinished import StepEnd
from ..transforms._axis_env import Work
from ..transforms._devices import here


class Arrivals:
    """The gathers under way of a state's parameters.

    Attributes:
        failed: Why a gather has failed; "" if none has. Some parameters are then old and others new.
    """

    def __init__(self) -> None:
        self._works: dict[int, Work] = {}  # by bucket, in the order of their start
        self.failed: str = ""
        self._behind: tuple[StepEnd, torch.device] | None = None

    def end(self, step: StepEnd, device: torch.device) -> None:
        """The step that began these gathers ends on its device when they have arrived."""
        if self._works:
            self._behind, step.gathers = (step, device), weakref.WeakMethod(self.wait)

    def add(self, bucket: int, work: Work) -> None:
        self._works[bucket] = work

    def wait(self, bucket: int | None = None) -> None:
        """Wait for the gather of one bucket, or for all."""
        for k in list(self._works) if bucket is None else [bucket]:
            work = self._works.pop(k, None)
            if work is not None:
                try:
                    work.wait()
                except BaseException as error:
                    self.failed = (
                        f"the parameters of the last step have not arrived from all ranks: {error!r}; load a checkpoint"
                    )
                    raise
        if self._behind is not None and not self._works:
            (step, device), self._behind = self._behind, None
            step.event, step.gathers = here(device), lambda: None

    def lend(self, leaves: Mapping[str, Tensor], by_bucket: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
        """The leaves for a forward pass; the first operation on one that is under way waits for it."""
        if not self._works:
            return dict(leaves)
        of = {id(leaf): k for k in self._works for leaf in by_bucket[k]}
        return {
            path: leaf if (k := of.get(id(leaf))) is None else _arriving(leaf, functools.partial(self.wait, k))
            for path, leaf in leaves.items()
        }


class Arriving(Tensor):
    """A parameter that may still be under way: every operation gets the parameter itself, once it has arrived."""

    _leaf: Tensor
    _wait: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Arriving, arrived, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Of operations that bypass `__torch_function__`, such as those in torch.func transforms."""
        args, kwargs = tree_map_only(Arriving, lambda x: arrived(x).detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _arriving(leaf: Tensor, wait: Callable[[], None]) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        lent: Any = leaf.as_subclass(Arriving)  # type: ignore[arg-type]
    lent._leaf, lent._wait = leaf, wait
    return cast(Tensor, lent)


def arrived(x: Any) -> Any:
    """The parameter itself, once it has arrived; any other value unchanged."""
    if not isinstance(x, Arriving):
        return x
    held = vars(x)
    held["_wait"]()
    return held["_leaf"]
