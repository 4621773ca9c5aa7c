"""The streams of random numbers of a process: those of torch, Python and numpy."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..transforms import _devices as devices

_MT19937_BYTES = 625 * 4  # of its 624 words and the position among them


class Streams(NamedTuple):
    """Where the streams of this process are. That of CUDA is left out before its first use, and numpy's until it is imported.

    Each is what its own function returns: the two of torch tensors, (bytes,) uint8.
    """

    torch: Tensor
    python: tuple[Any, ...]
    cuda: Tensor | None
    numpy: tuple[Any, ...] | None

    @staticmethod
    def now() -> Streams:
        """Where they are now."""
        return Streams(
            torch.get_rng_state(),
            random.getstate(),
            devices.rng_state(),
            _numpy_state(),
        )

    def restore(self) -> None:
        """Continue from here."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        if self.cuda is not None:
            devices.set_rng_state(self.cuda)
        if self.numpy is not None:
            import numpy.random

            numpy.random.set_state(self.numpy)

    def state_dict(self) -> dict[str, Any]:
        """As tensors, (bytes,) uint8, and numbers."""
        version, words, normal = self.python
        state: dict[str, Any] = {"torch": self.torch, "python": _packed(words), "python_rest": [version, normal]}
        if self.cuda is not None:
            state["cuda"] = self.cuda
        if self.numpy is not None:
            name, words, *rest = self.numpy
            state.update({"numpy": _packed(words.tolist()), "numpy_rest": [name, *rest]})
        return state

    @staticmethod
    def of(state: Mapping[str, Any]) -> Streams:
        """The inverse of `state_dict`."""
        version, normal = state["python_rest"]
        numpy = None
        if "numpy" in state:
            name, *rest = state["numpy_rest"]
            numpy = (name, _unpacked(state["numpy"]), *rest)
        return Streams(
            state["torch"].cpu(), (version, tuple(_unpacked(state["python"])), normal), state.get("cuda"), numpy
        )


_last: tuple[bytes, Any] = (b"", None)  # the memory of numpy's generator, and its state, which takes long to read


def _numpy_state() -> tuple[Any, ...] | None:
    """The state of numpy's stream, read anew only where it has moved.

    A normal number that is left over from a pair is not in the memory of the generator, so a state with one is read each time.
    """
    global _last
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    generator: Any = numpy.get_bit_generator() if hasattr(numpy, "get_bit_generator") else None
    if type(generator).__name__ != "MT19937":
        return tuple(numpy.get_state())
    memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    known, state = _last
    if memory != known or state[3]:
        state = numpy.get_state()
        _last = memory, state
    return tuple(state)


def _packed(words: Any) -> Tensor:
    return torch.tensor(words, dtype=torch.int64).view(torch.uint8)


def _unpacked(words: Tensor) -> list[int]:
    return words.cpu().clone().view(torch.int64).tolist()
