"""What a function saves for its backward pass, found without data."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ._flat_call import FlatCall, path_words
from ._keeper import listening, memory_of, run_op, written_by
from ._rerun import parts_of, put_part

_SKIPPED = tuple(str(Path(module.__file__ or "").parent) for module in (torch, optree)) + (str(Path(__file__).parent),)


class Residual(NamedTuple):
    """A value that is kept from the forward to the backward pass.

    Attributes:
        name: Where it comes from: an argument, a parameter or buffer, the name that `checkpoint_name` gives it, or the
            operation and the line of the program.
        shape: Its shape.
        dtype: Its dtype.
        bytes: Bytes of its memory on its device; values that share memory are one.
        where: "device", or "cpu" where it waits on the host.
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
        total = f"in total; {self.activation_bytes:,} without arguments and parameters"
        rows.append((f"{self.bytes:,}", "", "", total))
        wide = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(f"{a:>{wide[0]}}  {b:<{wide[1]}}  {c:<{wide[2]}}  {d}" for a, b, c, d in rows)


def saved_residuals(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Residuals:
    """What a function keeps for its backward pass. Nothing is computed, no memory is used, and modules stay as they
    are.

    Derivatives are by the arguments, parameters and other tensors that require a gradient; where the result depends on
    none, by the first argument, as in torch.func.grad. What a `remat` inside the function keeps is what its policy
    says.

    Args:
        fn: The function, or a module.
        *args: Its arguments, pytrees; tensors may be on the device "meta".
        **kwargs: More of them.

    Returns:
        A tuple of values with their names, shapes and bytes; str() of it is a table.

    Raises:
        TypeError: no function.
        ValueError: the function depends on the values of tensors, uses torch.func inside, or writes into a tensor that
            no module holds.

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
    call = FlatCall(fn, args, kwargs)
    found, memories = call.found, _Memories()
    named = {id(x): name for root in found.roots for name, x in (*root.named_parameters(), *root.named_buffers())}
    with contextlib.ExitStack() as stack:
        fake = stack.enter_context(_without_values(fn))
        counted = tuple(x for x in found.tensors if not x.is_inference())
        stack.enter_context(torch.autograd._unsafe_preserve_version_counter(counted))  # type: ignore[attr-defined]
        new = {}
        for x in found.tensors:  # modules hold those without values; others are used as they are
            name = named.get(id(x), "a tensor of the function")
            memories.name(x, name, True)
            new[id(x)] = memories.name(fake.from_tensor(x), name, True)
        for part in parts_of(found.modules()):
            stack.callback(put_part, part, part.copy())
            put_part(part, part.copy(), new)
        given = []
        for path, x in zip(call.paths(), call.tensors, strict=True):
            like = _like(x, x.requires_grad or by_first and path[:2] == (0, 0))
            given.append(memories.name(like, f"argument {path_words(path)}", True))
        stack.enter_context(_Origins(memories))
        stack.enter_context(listening(memories.name, lambda x: memories.keep(x, "cpu")))
        stack.enter_context(saved_tensors_hooks(memories.keep, lambda x: x))
        out = call.run(given)
        if not any(isinstance(x, Tensor) and x.requires_grad for x in optree.tree_leaves(out)):
            return None
    return memories.residuals()


class _Memories:
    """The memory of tensors: its name, whether the caller holds it too, and what is kept."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self._given: set[int] = set()
        self._kept: dict[int, Residual] = {}
        self._holds: list[Tensor] = []  # so that no memory is freed and its address used again

    def name(self, x: Tensor, name: str, given: bool = False) -> Tensor:
        """Name it; `given` by the caller, or not."""
        self._holds.append(x)
        self.names[memory_of(x)] = name
        if given:
            self._given.add(memory_of(x))
        return x

    def keep(self, x: Tensor, where: str = "device") -> Tensor:
        """A tensor is kept, on its device or on the host."""
        self._holds.append(x)
        memory, size = memory_of(x), x.untyped_storage().nbytes() if where == "device" else 0
        if memory not in self._kept or self._kept[memory].where != "device":
            self._kept[memory] = Residual("a constant", tuple(x.shape), x.dtype, size, where, memory in self._given)
        return x

    def residuals(self) -> Residuals:
        """All that is kept."""
        return Residuals(one._replace(name=self.names.get(memory, one.name)) for memory, one in self._kept.items())


def _like(x: Tensor, moves: bool) -> Tensor:
    """A tensor of the same form."""
    moves = moves and (x.is_floating_point() or x.is_complex())
    new = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return nn.Parameter(new, moves) if isinstance(x, nn.Parameter) else new.requires_grad_(moves)


@contextlib.contextmanager
def _without_values(fn: Callable[..., Any]) -> Iterator[FakeTensorMode]:
    """A context in which operations have results without values."""
    try:
        with torch.enable_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            yield fake
    except RuntimeError as error:
        name = getattr(fn, "__qualname__", type(fn).__name__)
        why = f"which fails where it depends on values or uses torch.func: {error}"
        raise ValueError(f"saved_residuals runs {name} on tensors without values, {why}") from error


class _Origins(TorchDispatchMode):
    """Names memory by the operation that makes it, and refuses writes into tensors with values."""

    def __init__(self, memories: _Memories) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memories = memories

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not all(isinstance(x, FakeTensor) for x in written_by(func, args, kwargs)):
            raise ValueError(f"saved_residuals changes no values, and {func} writes into a tensor that no module holds")
        out = run_op(func, types, args, kwargs)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and memory_of(x) not in self._memories.names:
                self._memories.name(x, f"{func.overloadpacket.__name__} at {_line()}")
        return out


def _line() -> str:
    """The line of the program that runs, outside of libraries."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
