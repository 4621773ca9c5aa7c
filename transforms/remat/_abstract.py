"""Running a function on tensors without values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from ._messages import path_words
from ._plain import HOOKS_REFUSED, HooksRefused
from .record._kept import unheard
from .record._modes import run_op
from .surroundings._random import unchanged_host
from .surroundings._reach import captured, is_tracked
from .surroundings._surroundings import function_modes
from .values._aten import written_by
from .values._memory import memory_of


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
        for context in (
            found.places.unchanged(),
            unchanged_host(),
            _disable_current_modes(),
            function_modes(()),
            temporarily_clear_interpreter_stack(),
            _without_hooks(),
            unheard(),
            torch.enable_grad(),
            _typed_errors(fn),
            torch.autograd._unsafe_preserve_version_counter(  # type: ignore[attr-defined]
                tuple(x for x in others if not x.is_inference())
            ),
        ):
            stack.enter_context(context)
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Protected(fake))
        stack.enter_context(_Lent())
        for x in others:
            given[memory_of(x)] = given[memory_of(fake.from_tensor(x))] = "a tensor of the function"
        new = {i: like.make() for i, like in inside.items()}
        for slot in found.slots:
            slot.held[slot.key] = new[id(slot.value)]
            given[memory_of(new[id(slot.value)])] = slot.name
        for i, like in likes.items():
            leaves[i] = like.make()
            given[memory_of(leaves[i])] = f"argument {path_words(paths[i])}"
        again: Any = optree.tree_unflatten(form, leaves)
        yield Abstract(again[0], again[1], given)


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    """A context without saved-tensor hooks, but with the right to them, which torch.func takes."""
    autograd: Any = torch._C._autograd
    message = autograd._saved_tensors_hooks_get_disabled_error_message()
    if message is not None:
        autograd._saved_tensors_hooks_enable()
    hooks = []
    while (pair := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*pair)
        if message is not None:
            autograd._saved_tensors_hooks_disable(message)


@contextlib.contextmanager
def _typed_errors(fn: Callable[..., Any]) -> Iterator[None]:
    """A context that says which functions cannot run without values."""
    name = getattr(fn, "__qualname__", type(fn).__name__)
    where = f"saved_residuals runs {name} on tensors without values, and it"
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(f"{where} depends on the values of tensors, by {error}") from error
    except HooksRefused as error:
        raise ValueError(f"{where} uses torch.func, within which saved tensors are not seen") from error
    except RuntimeError as error:
        if HOOKS_REFUSED not in str(error):
            raise
        raise ValueError(f"{where} uses torch.func, within which saved tensors are not seen") from error


class _Protected(TorchDispatchMode):
    """Writes go into tensors without values, never into those that have them."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self._written: dict[int, Tensor] = {}  # by memory, kept so that no other tensor gets its address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for x in written_by(func, args, kwargs):
                if not isinstance(x, FakeTensor):
                    self._written[memory_of(x)] = x
        if self._written:
            args, kwargs = tree_map_only(Tensor, self._swap, (args, kwargs))
        return run_op(func, types, args, kwargs)

    def _swap(self, x: Tensor) -> Tensor:
        written = not isinstance(x, FakeTensor) and memory_of(x) in self._written
        return self._fake.from_tensor(x) if written else x


class _Lent(TorchFunctionMode):
    """Arrays of numpy are copies."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in ("numpy", "__array__", "__dlpack__"):
            return func(*args, **kwargs)
        if isinstance(args[0], FakeTensor):
            raise DataDependentOutputException(func)
        with _disable_current_modes():
            return func(args[0].detach().clone(), *args[1:], **kwargs)


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
