"""What a function saves for its backward pass, found without data."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
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
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ._keeper import listening, memory_of, unheard, written_by
from ._modes import function_modes, run_op, unchanged_host
from ._offload import Handle
from ._plain import HOOKS_REFUSED, HooksRefused, path_words
from ._reach import captured, is_tracked, tensors_of


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


_SKIPPED = tuple(str(Path(module.__file__ or "").parent) for module in (torch, optree)) + (str(Path(__file__).parent),)


class Residual(NamedTuple):
    """A value that is kept from the forward to the backward pass.

    Attributes:
        name: Where it comes from: an argument, a parameter or buffer, the name that `checkpoint_name` gives it, or the
            operation and the line of the program.
        shape: Its shape.
        dtype: Its dtype.
        bytes: Bytes of its memory on its device; values that share memory are one.
        where: "device", or where it waits: "cpu", or the name of a codec.
        given: Whether the caller holds it too: an argument, a parameter or a buffer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    where: str
    given: bool


class Residuals(tuple[Residual, ...]):
    """All values that are kept.

    >>> from fjoin import transforms as tx
    >>> found = tx.saved_residuals(lambda w: (w @ w).sum(), torch.ones(2, 2))
    >>> found.bytes, found.activation_bytes
    (16, 0)
    """

    __slots__ = ()

    @property
    def bytes(self) -> int:
        """Bytes on the device, those of arguments and parameters included."""
        return sum(one.bytes for one in self)

    @property
    def activation_bytes(self) -> int:
        """Bytes on the device, without those of arguments, parameters and buffers."""
        return sum(one.bytes for one in self if not one.given)

    def __str__(self) -> str:
        rows = [(f"{one.bytes:,}", str(one.dtype)[6:] + str(list(one.shape)), one.where, one.name) for one in self]
        rows.append(
            (f"{self.bytes:,}", "", "", f"in total; {self.activation_bytes:,} without arguments and parameters")
        )
        wide = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(f"{a:>{wide[0]}}  {b:<{wide[1]}}  {c:<{wide[2]}}  {d}" for a, b, c, d in rows)


def saved_residuals(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Residuals:
    """What a function keeps for its backward pass. Nothing is computed, changed or left behind, and no memory is used.

    Derivatives are by the arguments, parameters and other tensors that require a gradient; where the result depends on
    none, by the first argument, as in torch.func.grad. What a `remat` inside the function keeps is what its policy says.

    Args:
        fn: The function, or a module.
        *args: Its arguments, pytrees; tensors may be on the device "meta".
        **kwargs: More of them.

    Returns:
        A tuple of values with their names, shapes and bytes; str() of it is a table.

    Raises:
        TypeError: no function.
        ValueError: the function depends on the values of tensors, or uses torch.func inside.

    >>> from fjoin import transforms as tx
    >>> def block(w, x):
    ...     return torch.tanh(tx.checkpoint_name(torch.tanh(x @ w), "h")).sum()
    >>> w, x = torch.ones(4, 4), torch.ones(8, 4, device="meta")
    >>> for one in tx.saved_residuals(tx.remat(block, tx.checkpoint_policies.save_only_these_names("h")), w.to("meta"), x):
    ...     print(one.name, one.bytes)
    argument 0 64
    argument 1 128
    h 128
    """
    if not callable(fn):
        raise TypeError(f"saved_residuals: fn must be a function, got {fn!r}")
    return _residuals(fn, args, kwargs, False) or _residuals(fn, args, kwargs, True) or Residuals()


def _residuals(fn: Callable[..., Any], args: Any, kwargs: Any, by_first: bool) -> Residuals | None:
    """See `saved_residuals`; None if the result depends on nothing that requires a gradient."""
    names: dict[int, str] = {}
    found: dict[int, Residual] = {}
    holds: list[Any] = []  # so that no memory is freed and its address used again
    with ExitStack() as stack:
        of = stack.enter_context(abstract(fn, args, kwargs, by_first))
        names |= of.given

        def add(x: Tensor, handle: Handle | None = None) -> Tensor:
            memory = memory_of(x)
            where, size = ("device", x.untyped_storage().nbytes()) if handle is None else (handle.where, handle.held)
            if memory not in found or found[memory].where != "device":
                found[memory] = Residual(
                    names.get(memory, "a constant"), tuple(x.shape), x.dtype, size, where, memory in of.given
                )
            holds.append(x)
            return x

        def name(x: Tensor, text: str) -> None:
            names[memory_of(x)] = text

        stack.enter_context(_Origins(names, holds))
        stack.enter_context(listening(name, add))
        stack.enter_context(saved_tensors_hooks(add, lambda x: x))
        out = fn(*of.args, **of.kwargs)
        if not any(x.requires_grad for x in tensors_of(out)):
            return None
    return Residuals(one._replace(name=names.get(memory, one.name)) for memory, one in found.items())


class _Origins(TorchDispatchMode):
    """Names memory by the operation that makes it."""

    def __init__(self, names: dict[int, str], holds: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._holds = names, holds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = run_op(func, types, args, kwargs or {})
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._holds.append(x)
                self._names.setdefault(memory_of(x), f"{func.overloadpacket.__name__} at {_line()}")
        return out


def _line() -> str:
    """The line of the program that runs, outside of libraries."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
