"""The devices of tensors, sums on them, and functions that are not compiled."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor


def is_accelerator(device: torch.device) -> bool:
    """Whether the host runs ahead of a device, so that reading a value from it waits."""
    return device.type not in ("cpu", "meta")


def is_host(device: torch.device) -> bool:
    """Whether operations on a device run at once.

    Elsewhere they are launched, and a launch may cost more than their memory.
    """
    return device.type == "cpu"


def kind() -> str | None:
    """The kind of this host's accelerators, such as "cuda"; None if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def count() -> int:
    return torch.accelerator.device_count()


def in_use() -> bool:
    """Whether this process has begun to use an accelerator; it is not begun by the question."""
    found = torch.accelerator.current_accelerator()
    initialized = None if found is None else getattr(torch.get_device_module(found), "is_initialized", None)
    return initialized is not None and initialized()


def current() -> torch.device:
    """The current accelerator of this thread."""
    found = torch.accelerator.current_accelerator()
    assert found is not None, "there is no accelerator"
    return torch.device(found.type, torch.accelerator.current_device_index())


def use(device: torch.device | int) -> None:
    """Make an accelerator the current one of this thread."""
    index = device if isinstance(device, int) else device.index
    torch.accelerator.set_device_index(index)


def new_stream(device: torch.device) -> Any:
    """A stream beside the current one, and a context in which it is the current one."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> Any:
    return torch.accelerator.current_stream(device)


def here(device: torch.device) -> Any:
    """An event at this place of a device's current stream."""
    event = torch.Event(device)
    event.record(current_stream(device))
    return event


def to_host(x: Tensor) -> tuple[Tensor, Any]:
    """A copy under way to pinned memory of the host, and the event that ends it."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    return host, here(x.device)  # which need not be the current device


def rng_state() -> Tensor | None:
    """The state of the current accelerator's random generator, (bytes,) uint8; None if none is in use."""
    return torch.get_device_module(current()).get_rng_state() if in_use() else None


def set_rng_state(state: Tensor) -> None:
    """Continue the current accelerator's random generator; without an accelerator nothing happens."""
    if kind() is not None:
        torch.get_device_module(current()).set_rng_state(state)


F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """The function, never compiled, and nothing that it calls.

    Same as: torch.compiler.disable.
    """

    disabled: Any = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:  # nothing is compiled
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # a compiled caller breaks its graph here
    return call  # type: ignore[return-value]


def constant(function: F) -> F:
    """The function, of arguments that a compiler knows, which is called once while it traces.

    Same as: torch.compiler.assume_constant_result.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of a dtype are added: float32 for 16-bit floats, otherwise itself."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def widened(x: Tensor) -> Tensor:
    """A tensor in the dtype in which its numbers are added."""
    return x.to(wide_dtype(x.dtype))


def sum_in_order(terms: Iterable[Tensor]) -> Tensor:
    """The sum of tensors in their order, in their dtype; 16-bit terms are added in float32.

    It lies in memory of its own.
    """
    first, *rest = terms
    total = widened(first) + rest[0] if rest else first.clone()
    for term in rest[1:]:
        total += term
    return total.to(first.dtype)


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """A tensor times a 0-d factor, in its dtype; a 16-bit product is rounded once."""
    wide = widened(x)
    return (wide * factor.to(wide.dtype)).to(x.dtype)


def divided(x: Tensor, total: Tensor) -> Tensor:
    """A tensor divided by a 0-d total, in its dtype; a 16-bit quotient is rounded once."""
    wide = widened(x)
    return (wide / total.to(wide.dtype)).to(x.dtype)


def sum_of_pieces(received: Tensor, length: int, own: Tensor | None, rank: int) -> Tensor:
    """The sum of the ranks' pieces in the order of the ranks, bit for bit that of an ordered reduction.

    It lies in memory of its own, or in that of the received pieces, so that the memory of `own` can be freed.

    Args:
        received: The pieces one after the other, without that of this rank where that is `own`; they are overwritten.
        length: The elements of a piece.
        own: This rank's piece, where it has not travelled; the sum may be written there.
    """
    rows = list(received.split(length)) if received.numel() else []
    if own is not None:
        rows.insert(rank, own)
    if not rows:
        return received
    if len(rows) == 2:  # of two ranks
        return torch.add(*rows, out=rows[0] if rows[1] is own else rows[1])
    return sum_in_order(rows)
