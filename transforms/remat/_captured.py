"""The tensors that a function uses without taking them as arguments."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ._kept import memory_of, written_by

_WIDEST = 10_000  # entries of a container that are looked at


def is_tracked(x: Tensor) -> bool:
    """Whether a transform may differentiate, or batch, by this tensor."""
    return x.requires_grad or bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


class Slot(NamedTuple):
    """The place of a parameter or a buffer."""

    held: dict[str, Any]  # of a module
    key: str
    value: Tensor
    name: str  # in the module that the search has met


class Found(NamedTuple):
    """The tensors that can be reached from a function, by id.

    tracked: Those that a transform may differentiate, or batch, by.
    state: Others, such as buffers.
    slots: The places of parameters and buffers in modules.
    modules: The modules.
    """

    tracked: dict[int, Tensor]
    state: dict[int, Tensor]
    slots: list[Slot]
    modules: list[nn.Module]


def captured(fn: Callable[..., Any], *arguments: Any) -> Found:
    """Search a function's closure, defaults, globals, partial arguments, the object of a method, modules, and containers.

    Args:
        fn: The function.
        *arguments: Its arguments. Those that are no tensors are searched too.
    """
    found = Found({}, {}, [], [])
    given: Any = arguments
    others = [x for x in optree.tree_leaves(given) if not isinstance(x, Tensor)]
    for x in _reachable((fn, *others), set(), 0, found):
        (found.tracked if is_tracked(x) else found.state)[id(x)] = x
    return found


def _reachable(x: Any, seen: set[int], depth: int, found: Found) -> Iterator[Tensor]:
    if (
        x is None
        or isinstance(x, (str, bytes, int, float, complex, type, types.ModuleType))
        or id(x) in seen
        or depth > 6
    ):
        return
    seen.add(id(x))
    if isinstance(x, Tensor):
        yield x
        return
    if isinstance(x, types.GeneratorType):
        raise TypeError(
            f"a function in remat uses the generator {x.__name__}, of which nothing is left when it runs again; make a list of it"
        )
    if isinstance(x, torch.jit.ScriptModule):
        yield from (*x.parameters(), *x.buffers())
        return
    if isinstance(x, nn.Module):
        for prefix, module in x.named_modules():
            found.modules.append(module)
            for held in (module._parameters, module._buffers):
                for key, value in held.items():
                    if value is not None:
                        found.slots.append(Slot(held, key, value, f"{prefix}.{key}" if prefix else key))
                        yield value
        return
    inside: list[Any] = []
    if isinstance(x, functools.partial):
        inside = [x.func, *x.args, *x.keywords.values()]
    elif isinstance(x, types.MethodType):
        inside = [x.__self__, x.__func__]
    elif isinstance(x, types.FunctionType):
        inside = [cell.cell_contents for cell in x.__closure__ or () if _filled(cell)]
        inside += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        named = (x.__globals__.get(name) for name in _names(x.__code__))
        # Of other files' functions only what they are called with is searched: all of torch would be within reach.
        inside += [g for g in named if not isinstance(g, types.FunctionType) or _of_same_file(g, x)]
        if (wrapped := getattr(x, "__wrapped__", None)) is not None:
            inside.append(wrapped)
    elif isinstance(x, dict):
        inside = list(x.values()) if len(x) <= _WIDEST else []
    elif isinstance(x, (list, tuple, set, frozenset, deque)):
        inside = list(x) if len(x) <= _WIDEST else []
    elif depth < 4 and not type(x).__module__.startswith(("torch", "builtins")):
        inside = list(getattr(x, "__dict__", {}).values())
        inside += [getattr(x, name, None) for kind in type(x).__mro__ for name in vars(kind).get("__slots__", ())]
    for part in inside:
        yield from _reachable(part, seen, depth + 1, found)


def _names(code: types.CodeType) -> set[str]:
    """The globals that a function, or one inside it, may use."""
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _names(const)
    return found


def _of_same_file(value: Any, function: types.FunctionType) -> bool:
    return isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # not assigned yet
        return False
    return True


class Captured(Exception):
    """A function has used tensors that are tracked and that no search had found."""

    def __init__(self, found: list[Tensor]) -> None:
        super().__init__()
        self.found = found


# Functions of torch that write into some of their arguments without a trailing underscore: their positions, and names.
_STATISTICS = ("running_mean", "running_var")
_LENDS = ("numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage")
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_INPLACE = re.compile(r"(_foreach_\w*[^_]_|(?!_)\w*[^_]_|__i\w+__)$").match


class Substitute(TorchFunctionMode):
    """Replaces tensors by others in every operation of torch.

    Args:
        of: id -> replacement.
        state: Memory -> tensor that an operation may write into, itself or a view of it.
        written: Called with a tensor of `state` before the first operation that writes into it; returns what the
            operation gets instead.
        own: The ids of tensors that may be tracked; None where no others are looked for.
        refuse: Called with the memory of other tensors before an operation writes into them.
    """

    def __init__(
        self,
        of: dict[int, Tensor],
        state: dict[int, Tensor],
        written: Callable[[Tensor], Tensor],
        own: set[int] | None,
        refuse: Callable[[int], None] = lambda memory: None,
    ) -> None:
        super().__init__()
        self._of, self._state, self._written, self._own, self._refuse = of, state, written, own, refuse
        self.foreign: dict[int, Tensor] = {}
        self.moves = False  # whether a region inside has moved arguments elsewhere

    def __enter__(self) -> Substitute:
        _THREADS.running.append(self)
        return cast(Substitute, super().__enter__())  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _THREADS.running.pop()

    @contextlib.contextmanager
    def around(self, tensors: list[Tensor]) -> Iterator[list[Tensor]]:
        """A context for a region inside this one, with what its tensors are here; what it does itself is not watched."""
        new = [self._swap(x) for x in tensors]
        own, self._own = self._own, None
        try:
            yield new
        finally:
            self._own = own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        lends = getattr(func, "__name__", "") in _LENDS
        for x in _targets(func, args, kwargs):
            memory = memory_of(x)
            if memory in self._state:
                old = self._state.pop(memory)
                self._of[id(old)] = self._written(old)
            elif not lends:  # most only read
                self._refuse(memory)
        args = tuple(map(self._swap, args))
        if kwargs:
            kwargs = {name: self._swap(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _swap(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            new = self._of.get(id(x))
            if new is not None:
                return new
            if self._own is not None and id(x) not in self._own and self._is_foreign(x):
                self.foreign[id(x)] = x
        elif type(x) in (list, tuple):
            return type(x)(map(self._swap, x))
        elif isinstance(x, torch.Generator):
            raise TypeError(
                "a function in remat draws from a torch.Generator, which would go on from another state when the function "
                "runs again; draw outside of it and pass the numbers, or use torch's default generator"
            )
        return x

    def _is_foreign(self, x: Tensor) -> bool:
        """Whether a tensor is a leaf, or belongs to a transform that is not active here."""
        level = torch._C._functorch.maybe_get_level(x)
        if level > 0:
            active = {one.level() for one in torch._C._functorch.get_interpreter_stack() or ()}
            return level not in active
        return x.requires_grad and x.is_leaf


class _Threads(threading.local):
    def __init__(self) -> None:
        self.running: list[Substitute] = []


_THREADS = _Threads()


def note_moves() -> None:
    """Note in all regions around this one that it moves arguments that are results of operations."""
    for mode in _THREADS.running:
        mode.moves = True


@contextlib.contextmanager
def within(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """A context for a region's tensors, as the region around it has them."""
    if _THREADS.running:
        with _THREADS.running[-1].around(tensors) as new:
            yield new
    else:
        yield tensors


def _targets(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a function of torch writes into, or may give to others to write into."""
    name = getattr(func, "__name__", "")
    found: list[Any] = []
    if hasattr(func, "_schema"):
        found = written_by(func, args, kwargs) if func._schema.is_mutable else []
    elif name in ("batch_norm", "instance_norm"):
        found = [*args[1:3], *(kwargs.get(n) for n in _STATISTICS)]
    elif name in _LENDS or func == _SET_DATA:
        found = [*args, *kwargs.values()][:1]
    elif kwargs.get("out") is not None:
        found = [kwargs["out"]]
    elif name == "__setitem__" or kwargs.get("inplace") is True or _INPLACE(name) and name != "requires_grad_":
        found = [*args, *kwargs.values()][:1]
    return [x for x in tree_leaves(found) if isinstance(x, Tensor)]
