"""The generators of random numbers of this process, and those of a loader: their states, as data."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..transforms.base import devices

_WORDS = 624  # of MT19937, the generator of Python and of numpy
_ODD = "a generator of random numbers has values that it cannot have"


class Streams(NamedTuple):
    """Where the streams of this process are. That of CUDA is left out before its first use, and numpy's until it is
    imported.

    Each is what its own function returns: the two of torch tensors, (bytes,) uint8. `own` has those of a loader, by
    their names.
    """

    torch: Tensor
    python: tuple[Any, ...]
    cuda: Tensor | None
    numpy: tuple[Any, ...] | None
    own: Mapping[str, Any] = {}

    @staticmethod
    def now(generators: Mapping[str, Generator] = {}) -> Streams:
        """Where they are now.

        Args:
            generators: Those of a loader, by their names.
        """
        own = {name: one.state() for name, one in generators.items()} if generators else {}
        return Streams(torch.get_rng_state(), random.getstate(), devices.rng_state(), _numpy_state(), own)

    def restore(self, generators: Mapping[str, Generator] = {}) -> None:
        """Continue from here."""
        for name in self.own.keys() & generators.keys():
            generators[name].set_state(self.own[name])
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        if self.cuda is not None:
            devices.set_rng_state(self.cuda)
        if self.numpy is not None:
            import numpy.random

            numpy.random.set_state(self.numpy)

    def state_dict(self) -> dict[str, Any]:
        """As tensors, (bytes,) uint8, and numbers."""
        state = _shown(self.torch) | _shown(self.python)
        if self.cuda is not None:
            state["cuda"] = self.cuda
        if self.numpy is not None:
            state |= _shown(self.numpy)
        return state | {"own": {name: _shown(one) for name, one in self.own.items()}}

    @staticmethod
    def of(state: Mapping[str, Any]) -> Streams:
        """The inverse of `state_dict`.

        Each generator is tried first, so that one that cannot be is an error here, of any kind.
        """
        own = {name: _read(name.rpartition(": ")[2], one) for name, one in state.get("own", {}).items()}
        numpy, cuda = _read("numpy", state) if "numpy" in state else None, state.get("cuda")
        if not isinstance(cuda, Tensor | None):
            raise ValueError(_ODD)
        return Streams(_read("torch", state), _read("python", state), cuda, numpy, own)


class Generator(NamedTuple):
    """A generator of random numbers.

    Attributes:
        kind: "torch", on the CPU; "python"; of numpy "numpy", its RandomState, or "pcg64", its default.
    """

    kind: str
    state: Callable[[], Any]
    set_state: Callable[[Any], Any]


def generators_of(loader: Any) -> dict[str, Generator]:
    """The generators that a loader, its samplers and its dataset have as attributes, by names that end in their kind."""

    def part(owner: Any, name: str) -> Any:
        try:
            return getattr(owner, name, None)
        except Exception:  # of a property that is not ready yet
            return None

    batches = part(loader, "batch_sampler")
    places = {"loader": loader, "sampler": part(loader, "sampler"), "batch_sampler": batches}
    places |= {"batch_sampler.sampler": part(batches, "sampler"), "dataset": (data := part(loader, "dataset"))}
    places["dataset.dataset"] = part(data, "dataset")  # of a Subset
    found = dict[int, tuple[str, Generator]]()
    for place, owner in places.items():
        for name, value in getattr(owner, "__dict__", {}).items():
            if (one := _generator(value)) is not None:
                found.setdefault(id(value), (f"{place}.{name}: {one.kind}", one))
    return dict(found.values())


def _generator(value: Any) -> Generator | None:
    numpy: Any = sys.modules.get("numpy.random")
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return Generator("torch", value.get_state, value.set_state)
    if type(value) is random.Random:
        return Generator("python", value.getstate, value.setstate)
    if numpy and isinstance(value, numpy.RandomState):
        of_mt19937 = value.get_state(legacy=False)["bit_generator"] == "MT19937"
        return Generator("numpy", value.get_state, value.set_state) if of_mt19937 else None
    if numpy and isinstance(value, numpy.Generator) and type(bits := value.bit_generator) is numpy.PCG64:
        return Generator("pcg64", lambda: bits.state, partial(setattr, bits, "state"))
    return None


def _shown(state: Any) -> dict[str, Any]:
    """The state of a generator of any kind, as `Streams.state_dict` has it."""
    if isinstance(state, Tensor):
        return {"torch": state}
    if isinstance(state, dict):
        return {"pcg64": state}
    first, words, *rest = state
    kind = "numpy" if isinstance(first, str) else "python"
    return {kind: torch.tensor([*map(int, words)]).view(torch.uint8), f"{kind}_rest": [first, *rest]}


def _read(kind: str, shown: Mapping[str, Any]) -> Any:
    """The inverse of `_shown`."""
    if kind == "torch":
        torch.Generator().set_state(state := shown[kind].cpu())
        return state
    if kind == "pcg64":
        from numpy.random import PCG64

        PCG64().state = shown[kind]
        return shown[kind]
    first, *rest = shown[f"{kind}_rest"]
    state = first, tuple(shown[kind].cpu().clone().view(torch.int64).tolist()), *rest
    if kind == "python":
        random.Random().setstate(state)
        odd = not isinstance(rest[0], float | None)
    else:
        from numpy.random import RandomState

        # numpy does not look, and reads its memory there.
        if not (odd := type(rest[0]) is not int or not 0 <= rest[0] <= _WORDS):
            RandomState().set_state(state)
    if odd:
        raise ValueError(_ODD)
    return state


_last: tuple[bytes, Any] = (b"", None)  # the memory of numpy's generator, and its state, which takes long to read


def _numpy_state() -> tuple[Any, ...] | None:
    """The state of numpy's stream, None for another generator than its default, MT19937; read anew only where it has
    moved.

    A normal number that is left over from a pair is not in the memory of the generator, so a state with one is read
    each time.
    """
    global _last
    numpy = sys.modules.get("numpy.random")
    generator: Any = None if numpy is None else numpy.get_bit_generator()
    if type(generator).__name__ != "MT19937":
        return None
    memory, (known, state) = ctypes.string_at(generator.ctypes.state_address, 4 * _WORDS + 4), _last
    if memory != known or state[3]:
        state = numpy.get_state()  # type: ignore[union-attr]
        _last = memory, state
    return state  # type: ignore[no-any-return]
