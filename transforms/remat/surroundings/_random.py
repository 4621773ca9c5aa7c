"""The random numbers of a run: those of torch, of Python and of numpy."""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WORDS = 4 * 625  # bytes of a Mersenne twister: its words, and the position


class RandomNumbers:
    """The states of all random number generators before a run.

    Args:
        devices: The devices whose generators are kept too.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._devices: list[tuple[torch.device, Tensor]] = [
            (d, torch.get_device_module(d).get_rng_state(d)) for d in devices
        ]
        self._host: Any = _host()

    def settle(self) -> None:
        """The run has ended: the generators of Python and numpy are kept only if it has drawn from them."""
        if _host_is(self._host):
            self._host = None

    def set(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self._cpu)
        for device, state in self._devices:
            torch.get_device_module(device).set_rng_state(state, device)
        _set_host(self._host)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context that begins in these states, and after which the generators are as before it."""
        host = None if self._host is None else _host()
        with torch.random.fork_rng([d for d, _ in self._devices]):
            try:
                self.set()
                yield
            finally:
                _set_host(host)


@contextlib.contextmanager
def unchanged_host() -> Iterator[None]:
    """A context after which the generators of Python and numpy are as before it."""
    before = _host()
    try:
        yield
    finally:
        _set_host(before)


def _host() -> tuple[Any, Any]:
    return random.getstate(), _of_numpy()


def _set_host(state: Any) -> None:
    if state is not None:
        random.setstate(state[0])
        np.random.set_state(state[1])


def _host_is(state: Any) -> bool:
    python, numpy = _host()
    return bool(python == state[0] and numpy is state[1])


class _LastState(threading.local):
    def __init__(self) -> None:
        self.last: tuple[bytes, Any] = b"", None


_LAST = _LastState()


def _of_numpy() -> Any:
    """The state of numpy's generator, one object as long as it does not change: to read it takes as long as a small layer."""
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return np.random.get_state(legacy=False)
    memory = ctypes.string_at(generator.ctypes.state_address, _WORDS)
    if memory != _LAST.last[0]:
        _LAST.last = memory, np.random.get_state(legacy=False)
    return _LAST.last[1]
