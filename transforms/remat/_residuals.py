"""What a function keeps for its backward pass, known before it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ._abstract import abstract
from .record._kept import listening
from .record._modes import run_op
from .surroundings._result import tensors_of
from .values._memory import memory_of
from .values._store import Handle

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
    >>> for one in tx.saved_residuals(tx.remat(block, tx.save_only_these_names("h")), w.to("meta"), x):
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
