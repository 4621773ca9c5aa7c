"""Modes of torch while a function runs: what surrounds it, random numbers, kept results."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_unflatten

from ._keeper import Keeper, Kept, Place, Slot, written_by
from ._offload import Handle

_C: Any = torch._C


class OfOneRun:
    """A mode of one run of a function, which no later run has."""


def _pair(get: str, put: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return getattr(_C, get), getattr(_C, put)


_SUBCLASSES = "functions of tensor subclasses"
# What a later run finds as the first one did: how to read it, and how to set it.
FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "flash attention": _pair("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    "memory-efficient attention": _pair("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    "attention by its formula": _pair("_get_math_sdp_enabled", "_set_sdp_use_math"),
    "attention of cudnn": _pair("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    _SUBCLASSES: _pair("_get_torch_function_state", "_set_torch_function_state"),
}


class Surroundings:
    """What surrounds a call now."""

    def __init__(self) -> None:
        self.functions = _get_current_function_mode_stack()
        self._operations = _get_current_dispatch_mode_stack()
        self._values = {name: get() for name, (get, _) in FLAGS.items()}
        self._context = contextvars.copy_context()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context with these modes and flags.

        Modes for functions are those of the first run only: a backward pass has none. Modes for operations that are
        active now stay, since they may count what runs.
        """
        now = {name: get() for name, (get, _) in FLAGS.items()}
        missing = [m for m in self._operations if not isinstance(m, OfOneRun) and _is_missing(m)]
        with contextlib.ExitStack() as stack:
            for name, (_, put) in FLAGS.items():
                if now[name] != self._values[name]:
                    put(self._values[name])
                    stack.callback(put, now[name])
            for mode in missing:
                _push_mode(mode)
                stack.callback(_pop_mode)
            stack.enter_context(function_modes([m for m in self.functions if not isinstance(m, OfOneRun)]))
            yield

    @contextlib.contextmanager
    def subclasses(self) -> Iterator[None]:
        """A context in which tensors of subclasses stay of them, if they do here: a backward pass may begin in one of theirs."""
        now = _C._get_torch_function_state()
        _C._set_torch_function_state(self._values[_SUBCLASSES])
        try:
            yield
        finally:
            _C._set_torch_function_state(now)

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function with the values that variables of Python's contexts have here."""
        return self._context.copy().run(fn, *args, **kwargs)


@contextlib.contextmanager
def function_modes(modes: Sequence[Any]) -> Iterator[None]:
    """A context with these modes for functions, and no others."""
    before = [_C._pop_torch_function_stack() for _ in range(_C._len_torch_function_stack())]
    try:
        for mode in modes:
            _C._push_on_torch_function_stack(mode)
        yield
    finally:
        while _C._len_torch_function_stack():
            _C._pop_torch_function_stack()
        for mode in reversed(before):
            _C._push_on_torch_function_stack(mode)


def _is_missing(mode: Any) -> bool:
    """Whether neither a mode nor one in its place is active."""
    key = getattr(mode, "_mode_key", None)
    stack = _get_current_dispatch_mode_stack()
    return all(one is not mode and (key is None or getattr(one, "_mode_key", None) is not key) for one in stack)


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


class _Threads(threading.local):
    def __init__(self) -> None:
        self.uncounted = 0


_THREADS = _Threads()


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """A context for operations that are not those of the function that runs."""
    _THREADS.uncounted += 1
    try:
        yield
    finally:
        _THREADS.uncounted -= 1


def run_op(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation below a mode, out of sight of modes for functions, which see those of tensor subclasses again."""
    if not types:
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


class Recording(TorchDispatchMode, OfOneRun):
    """Tells a keeper of all operations."""

    def __init__(self, keeper: Keeper) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeper, self._counts = keeper, Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim" or _THREADS.uncounted:  # it asks a tensor without values for its device
            return run_op(func, types, args, kwargs)
        if func._schema.is_mutable:
            for x in written_by(func, args, kwargs):
                self._keeper.writes(x)
        out = run_op(func, types, args, kwargs)
        place = func, self._counts[func]
        self._counts[func] += 1
        if func._schema.is_mutable:
            self._keeper.count += 1
        else:
            self._keeper.made(place, _shapes(args), func, args, kwargs, out)
        return out


class Replaying(TorchDispatchMode, OfOneRun):
    """Operations whose results are kept do not run.

    Args:
        kept: Those operations.
        values: The tensors in their results, or handles.
    """

    def __init__(self, kept: Mapping[Place, Kept], values: Sequence[Tensor | Handle | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._values, self._counts = kept, values, Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim" or _THREADS.uncounted:
            return run_op(func, types, args, kwargs or {})
        place = func, self._counts[func]
        self._counts[func] += 1
        kept = self._kept.get(place)
        if kept is None:
            return run_op(func, types, args, kwargs or {})
        if kept.shapes != _shapes(args):
            raise RuntimeError(
                f"a function in remat did not do the same in the backward pass: {func} got shapes {list(map(tuple, _shapes(args)))}, "
                f"before {list(map(tuple, kept.shapes))}; it must depend on its arguments only"
            )
        return tree_unflatten(
            [self._value(x, kept.written) if isinstance(x, Slot) else x for x in kept.leaves], kept.form
        )

    def _value(self, slot: Slot, copied: bool) -> Tensor:
        value = self._values[slot.number]
        if isinstance(value, Handle):
            return value.get()
        assert value is not None
        return value.clone() if copied else value.detach()


def _shapes(args: Any) -> tuple[torch.Size, ...]:
    return tuple(x.shape for x in args if isinstance(x, Tensor))
