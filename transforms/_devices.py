"""Accelerators, whatever their kind: streams, events and pinned memory, by torch's interface that is common to them.

Everything else asks this file. It holds for CUDA, ROCm and XPU; the host and tensors without data are no accelerators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_accelerator(device: torch.device) -> bool:
    """Whether the host runs ahead of a device, so that reading a value from it waits."""
    return device.type not in ("cpu", "meta")


def is_host(device: torch.device) -> bool:
    """Whether operations on a device run at once. Elsewhere they are launched, and a launch may cost more than their memory."""
    return device.type == "cpu"


def kind() -> str | None:
    """The kind of this host's accelerators, such as "cuda"; None where there is none."""
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
    """The state of the current accelerator's random generator, (bytes,) uint8; None where none is in use."""
    state: Tensor | None = torch.get_device_module(current()).get_rng_state() if in_use() else None
    return state


def set_rng_state(state: Tensor) -> None:
    """Continue the current accelerator's random generator; without an accelerator nothing happens."""
    if kind() is not None:
        torch.get_device_module(current()).set_rng_state(state)
