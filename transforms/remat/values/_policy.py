"""What a policy is, and what it chooses for a value."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeAlias


class Keep(enum.Enum):
    """What happens to a value between the forward and the backward pass."""

    RECOMPUTE = "recompute"
    SAVE = "save"
    OFFLOAD = "offload"


# From an operation of ATen and its arguments to whether to keep its result: a `Keep`, or a bool. True is SAVE, or OFFLOAD
# where `remat` is told where to.
Policy: TypeAlias = Callable[..., "Keep | bool"]


class Named:
    """A policy by the names that `checkpoint_name` gives, and one for operations."""

    of_name: Callable[[str], Keep | bool]
    offloads: bool

    def __init__(
        self,
        words: str,
        of_name: Callable[[str], Keep | bool],
        of_op: Policy = lambda op, *args, **kwargs: False,
        offloads: bool = False,
    ) -> None:
        self._words, self.of_name, self._of_op, self.offloads = words, of_name, of_op, offloads

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Keep | bool:
        return self._of_op(op, *args, **kwargs)

    def __repr__(self) -> str:
        return self._words


def keep_of(policy: Policy, kept: Keep, op: Any, *args: Any, **kwargs: Any) -> Keep:
    """The policy's choice for an operation; `kept` is what True means.

    Raises:
        TypeError: it is neither a bool nor a `Keep`.
    """
    found = policy(op, *args, **kwargs)
    if isinstance(found, (Keep, bool)):
        return _meant(found, kept)
    raise TypeError(f"a policy must return a bool or a Keep, got {found!r} for {op}")


def keep_of_name(policy: Policy, kept: Keep, name: str) -> Keep:
    """The policy's choice for a name; `kept` is what True means."""
    return _meant(policy.of_name(name), kept) if isinstance(policy, Named) else Keep.RECOMPUTE


def _meant(found: Keep | bool, kept: Keep) -> Keep:
    return found if isinstance(found, Keep) else kept if found else Keep.RECOMPUTE
