"""What a later run of a function finds as the first one did: state of modules, random numbers, autocast, modes, axes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ..axes import bind_axes, bound, bound_call
from ._keeper import memory_of
from ._reached import Reached, is_table

_C: Any = torch._C


class OfOneRun(TorchFunctionMode):
    """A mode for functions that later runs do not have."""


def parts_of(modules: Iterable[nn.Module]) -> list[Any]:
    """The dicts of modules, and the lists among their attributes, such as the weights of an LSTM."""
    parts: list[Any] = []
    for module in modules:
        held = vars(module)
        parts += [held, held["_parameters"], held["_buffers"], held["_modules"]]
        parts += [x for x in held.values() if type(x) is list and not is_table(x)]
    return parts


def put_part(part: Any, copy: Any, of: Mapping[int, Tensor] | None = None) -> None:
    """Give a dict or a list the entries of a copy, with other tensors in the place of some, by id."""
    if isinstance(part, list):
        part[:] = [of.get(id(x), x) for x in copy] if of else copy
        return
    if of:
        copy = {key: of.get(id(x), x) for key, x in copy.items()}
    if len(part) != len(copy) or not all(map(is_, part.values(), copy.values())) or not all(map(is_, part, copy)):
        part.clear()
        part.update(copy)


class Rerun:
    """What surrounds the first run of a function, and what it changes in modules.

    Args:
        found: What the function reaches.
        preserve_rng_state: Whether later runs have the random numbers of the first.
        cached: Whether autocast may keep casts: those made without a graph must not be used with one.
    """

    def __init__(self, found: Reached, preserve_rng_state: bool, cached: bool) -> None:
        self._reached_generators, self._preserve_rng_state, self._cached = found.generators, preserve_rng_state, cached
        modules = found.modules()
        self._parts = parts_of(modules)
        self._states: list[Any] = []  # copies of the parts
        tensors = {id(x): x for m in modules for x in (*m.buffers(False), *vars(m).values()) if _is_state(x)}
        self._tensors = list(tensors.values())
        # A norm writes its statistics without a new version.
        norms = [m for m in modules if m.training and "running_mean" in vars(m)["_buffers"]]
        self._norms = {id(x) for m in norms for x in m.buffers(False)}
        self._written: dict[int, tuple[Tensor, int, Tensor]] = {}  # by id: a tensor, its version and values before
        self._random: list[tuple[Callable[[], Tensor], Callable[[Tensor], Any], Tensor]] = []
        self._drawn: list[Tensor] = []  # the states of the generators after the first run
        self._autocast: list[tuple[str, torch.dtype, bool, bool]] = []
        self.functions = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, OfOneRun)]
        self._axes, self._call = bound(), bound_call()

    @contextlib.contextmanager
    def first(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """A context for the first run."""
        devices = {x.device for x in tensors if x.device.type not in ("cpu", "meta")}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), self._cached)
            for kind in sorted({"cpu", *(device.type for device in devices)})
        ]
        if self._preserve_rng_state:
            self._random = [(get, put, get()) for get, put in self._generators(devices)]
        self._states = [part.copy() for part in self._parts]
        with torch.no_grad():
            self._written = {id(x): (x, version_of(x), x.clone()) for x in self._tensors}
        cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(cache and self._cached)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cache)
        self._written = self._changed()
        self._drawn = [get() for get, _, _ in self._random]

    def has_drawn(self) -> bool:
        """Whether a later run has drawn all random numbers of the first one.

        While that one still runs, they are not known.
        """
        return all(torch.equal(get(), end) for (get, _, _), end in zip(self._random, self._drawn, strict=False))

    def holds(self, x: Tensor) -> bool:
        """Whether a tensor is a parameter, or state of a module, of which later runs get their own."""
        return id(x) in self._written or isinstance(x, nn.Parameter)

    def undo(self) -> None:
        """Go back to before the first run, which has failed."""
        for _, put, state in self._random:
            put(state)
        for part, state in zip(self._parts, self._states, strict=True):
            put_part(part, state)
        with torch.no_grad():
            for x, _, before in self._changed().values():
                x.copy_(before)

    @contextlib.contextmanager
    def again(self) -> Iterator[set[int]]:
        """A context for a later run, after which modules and generators are as before it.

        It yields the memory of what stands in the place of tensors that the function writes into.
        """
        with contextlib.ExitStack() as stack:
            for autocast in self._autocast:
                stack.enter_context(torch.autocast(*autocast))
            torch.clear_autocast_cache()
            for get, put, before in self._random:
                stack.callback(put, get())
                put(before)
            with torch.no_grad(), temporarily_clear_interpreter_stack():  # state is of no transform
                stands = {i: before.clone() for i, (_, _, before) in self._written.items()}
            for part, state in zip(self._parts, self._states, strict=True):
                stack.callback(put_part, part, part.copy())
                put_part(part, state, stands)
            for context in (function_modes(self.functions), bind_axes(self._axes, self._call)):
                stack.enter_context(context)
            versions = {i: version_of(x) for i, (x, _, _) in self._written.items()}
            yield {memory_of(x) for x in stands.values()}
            if any(version_of(x) != versions[i] for i, (x, _, _) in self._written.items()):
                what = "a buffer of a module by another name than the module's, and so twice"
                raise ValueError(f"a function in remat has written into {what}; write by the module's")

    def _changed(self) -> dict[int, tuple[Tensor, int, Tensor]]:
        """The tensors that the first run has written into."""
        return {i: one for i, one in self._written.items() if i in self._norms or version_of(one[0]) != one[1]}

    def _generators(self, devices: Iterable[torch.device]) -> Iterator[tuple[Any, Any]]:
        """How to read and set the states of torch's generators, and of those that the function reaches."""
        yield torch.get_rng_state, torch.set_rng_state
        for device in devices:
            module = torch.get_device_module(device)
            yield partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)
        for generator in self._reached_generators:
            yield generator.get_state, generator.set_state


def version_of(x: Tensor) -> int:
    """How often a tensor has been written into."""
    return 0 if x.is_inference() else x._version


def _is_state(x: Any) -> bool:
    if not isinstance(x, Tensor) or isinstance(x, nn.Parameter) or x.requires_grad or x.is_inference():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


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
