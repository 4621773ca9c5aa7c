"""The modes and flags of torch, and the variables of Python's contexts, that surround a call."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.backends.opt_einsum as opt_einsum
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

_C: Any = torch._C


class OfOneRun:
    """A mode of one run of a function, which no later run has."""


def _of(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _pair(get: str, put: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return getattr(_C, get), getattr(_C, put)


_SUBCLASSES = "functions of tensor subclasses"
# What a later run finds as the first one did: how to read it, and how to set it.
FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda on: torch.use_deterministic_algorithms(on[0], warn_only=on[1]),
    ),
    "fill uninitialized memory": _of(torch.utils.deterministic, "fill_uninitialized_memory"),
    "precision of products": _pair("_get_float32_matmul_precision", "_set_float32_matmul_precision"),
    "mkldnn": _pair("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    "cudnn": _pair("_get_cudnn_enabled", "_set_cudnn_enabled"),
    "cudnn.benchmark": _pair("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    "cudnn.deterministic": _pair("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    "flash attention": _pair("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    "memory-efficient attention": _pair("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    "attention by its formula": _pair("_get_math_sdp_enabled", "_set_sdp_use_math"),
    "attention of cudnn": _pair("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    "fast path of attention": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    "opt_einsum": _of(opt_einsum, "enabled"),
    "opt_einsum.strategy": _of(opt_einsum, "strategy"),
    "cached parametrizations": _of(parametrize, "_cache_enabled"),
    "the cache of parametrizations": (
        lambda: dict(parametrize._cache),
        lambda cache: setattr(parametrize, "_cache", cache),
    ),  # type: ignore[attr-defined]
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
                if _differ(now[name], self._values[name]):
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


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, dict):  # of tensors
        return bool(a or b)
    return bool(a != b)


def _is_missing(mode: Any) -> bool:
    """Whether neither a mode nor one in its place is active."""
    key = getattr(mode, "_mode_key", None)
    stack = _get_current_dispatch_mode_stack()
    return all(one is not mode and (key is None or getattr(one, "_mode_key", None) is not key) for one in stack)
