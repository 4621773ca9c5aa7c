"""Running a function on tensors without values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from ._captured import captured, is_tracked
from ._kept import memory_of, unheard
from ._plain import path_words


class Abstract(NamedTuple):
    """Arguments without values.

    args, kwargs: The arguments.
    given: Memory that the caller holds too, by address -> the argument, or the name of the parameter or buffer.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: dict[int, str]


@contextlib.contextmanager
def abstract(fn: Callable[..., Any], args: Any, kwargs: Any, by_first: bool = False) -> Iterator[Abstract]:
    """A context in which operations have results without values, below all transforms and unseen by all modes and hooks.

    Modules have parameters and buffers without values; afterwards they have their own again, whatever the function has
    assigned. Gradients are required of tensors that require them, and with `by_first` of the first argument.
    """
    found = captured(fn, args, kwargs)
    whole: Any = (args, kwargs)
    leaves, form = optree.tree_flatten(whole, none_is_leaf=True)
    paths = optree.treespec_paths(form)
    likes = {
        i: _like(x, is_tracked(x) or by_first and paths[i][:2] == (0, 0))
        for i, x in enumerate(leaves)
        if isinstance(x, Tensor)
    }
    inside = {id(slot.value): _like(slot.value, is_tracked(slot.value)) for slot in found.slots}
    others = [x for x in (*found.tracked.values(), *found.state.values()) if id(x) not in inside and not _wrapped(x)]
    given: dict[int, str] = {}
    with contextlib.ExitStack() as stack:
        isolated: tuple[Any, ...] = (
            _disable_current_modes,
            _without_function_modes,
            temporarily_clear_interpreter_stack,
        )
        for context in (*isolated, _hooks_allowed, unheard, torch.enable_grad):
            stack.enter_context(context())
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for x in others:
            given[memory_of(x)] = given[memory_of(fake.from_tensor(x))] = "a tensor of the function"
        new = {i: like.make() for i, like in inside.items()}
        for slot in found.slots:
            stack.callback(slot.held.__setitem__, slot.key, slot.value)
            slot.held[slot.key] = new[id(slot.value)]
            given[memory_of(new[id(slot.value)])] = slot.name
        for i, like in likes.items():
            leaves[i] = like.make()
            given[memory_of(leaves[i])] = f"argument {path_words(paths[i])}"
        again: Any = optree.tree_unflatten(form, leaves)
        yield Abstract(again[0], again[1], given)


@contextlib.contextmanager
def _hooks_allowed() -> Iterator[None]:
    """A context without saved-tensor hooks, but with the right to them, which torch.func takes."""
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    if message is not None:
        torch._C._autograd._saved_tensors_hooks_enable()
    try:
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            yield
    finally:
        if message is not None:
            torch._C._autograd._saved_tensors_hooks_disable(message)


@contextlib.contextmanager
def _without_function_modes() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield


def batches() -> int:
    """The number of times that active vmaps run what runs now."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    sizes = [
        torch._C._functorch.CVmapInterpreterPtr(level).batchSize()
        for level in stack
        if level.key() == torch._C._functorch.TransformType.Vmap
    ]
    return math.prod(sizes)


class _Like(NamedTuple):
    shape: Any
    stride: Any
    dtype: torch.dtype
    device: torch.device
    moves: bool
    is_parameter: bool

    def make(self) -> Tensor:
        new = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        moves = self.moves and (new.is_floating_point() or new.is_complex())
        return nn.Parameter(new, moves) if self.is_parameter else new.requires_grad_(moves)


def _like(x: Tensor, moves: bool) -> _Like:
    return _Like(x.shape, x.stride(), x.dtype, x.device, moves, isinstance(x, nn.Parameter))


def _wrapped(x: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))
