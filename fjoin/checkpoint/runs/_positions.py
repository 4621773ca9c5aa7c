"""The position of a loop over data, in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ..._errors import CheckpointError
from ..values._skeleton import put_together, taken_apart
from ..values._snapshot import Snapshot

_NAME = "data"


def add_position(found: Snapshot, data: Any) -> None:
    """Add the position of this rank, which is its own.

    Raises:
        TypeError: `data` is no loop over data.
    """
    if not callable(getattr(data, "state_dict", None)) or not hasattr(data, "stopped"):
        raise TypeError(
            f"data must be the loop over the loader, batches = step.join(loader), got a {type(data).__name__}: a loader is one batch "
            f"ahead of the loop"
        )
    tensors: dict[str, Tensor] = {}
    found.rank[_NAME] = taken_apart(data.state_dict(), _NAME, tensors)
    found.add_by_content(tensors, ())


def position_of(values: Mapping[str, Any], own: Mapping[str, Any], data: Any) -> Callable[[], None]:
    """A function that loads the position into the loop.

    Raises:
        CheckpointError: the checkpoint has no position.
    """
    if data is None:
        return lambda: None
    if own.get(_NAME) is None:
        raise CheckpointError(
            "the checkpoint has no position of data; it was saved without data=, so restore it without, too"
        )
    return partial(data.load_state_dict, put_together(own[_NAME], values))


def is_position(name: str) -> bool:
    return name.startswith(f"{_NAME}.")
