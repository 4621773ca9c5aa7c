"""The tensors that a function reaches, and the form of its result."""

from __future__ import annotations

import dis
import functools
import random
import types
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from ._captured import as_seen
from ._places import GENERATORS, ITERATORS, Names, Places, variable

_WIDEST = 10_000  # entries of a container that are looked at
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that are no user's
SIMPLE = frozenset((type(None), str, bytes, int, float, complex, bool))
_HERE = __name__.partition(".")[0]
# Objects of these packages, such as process groups, are not looked into.
_CLOSED = ("torch.", "builtins.", f"{_HERE}.")
# Globals of these kinds are imported or defined, not changed while functions run, unless by a statement that tells.
_DEFINED = (types.ModuleType, types.FunctionType, type)


def is_tracked(x: Tensor) -> bool:
    """Whether a transform may differentiate, or batch, by this tensor, or by what it is in the region around."""
    new = as_seen(x)
    if x.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(new):
        return True
    with torch._C.DisableTorchFunction():  # the tensor itself
        return new is not x and (x.requires_grad or bool(torch._C._functorch.is_functorch_wrapped_tensor(x)))


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
    places: Where the function can leave something.
    """

    tracked: dict[int, Tensor]
    state: dict[int, Tensor]
    slots: list[Slot]
    modules: list[nn.Module]
    places: Places


def captured(fn: Callable[..., Any], *arguments: Any) -> Found:
    """Search a function's closure, defaults, globals, partial arguments, the object of a method, modules, and containers.

    Args:
        fn: The function.
        *arguments: Its arguments. Those that are no tensors are searched too.
    """
    found = Found({}, {}, [], [], Places())
    given: Any = arguments
    others = [x for x in optree.tree_leaves(given) if not isinstance(x, Tensor)]
    for x in _reachable((fn, *others), set(), 0, found):
        (found.tracked if is_tracked(x) else found.state)[id(x)] = x
    for part in _containers(given):
        found.places.add(part)
    return found


def _reachable(x: Any, seen: set[int], depth: int, found: Found) -> Iterator[Tensor]:
    if x is None or isinstance(x, (str, bytes, int, float, complex, types.ModuleType)) or id(x) in seen or depth > 6:
        return
    seen.add(id(x))
    if isinstance(x, Tensor):
        yield x
        return
    if isinstance(x, types.GeneratorType):
        raise TypeError(
            f"a function in remat uses the generator {x.__name__}, of which nothing is left when it runs again; make a list of it"
        )
    if isinstance(x, (*GENERATORS, *ITERATORS)):
        if not isinstance(x, random.SystemRandom):  # it has no state
            found.places.add(x)
        return
    if isinstance(x, torch.jit.ScriptModule):
        yield from (*x.parameters(), *x.buffers())
        return
    if isinstance(x, nn.Module):
        yield from _in_module(x, seen, depth, found)
        return
    # Functions inside of functions, such as those that decorators make, are no deeper.
    deeper = depth if isinstance(x, (functools.partial, types.MethodType, types.FunctionType)) else depth + 1
    for part in _inside(x, depth, found.places):
        yield from _reachable(part, seen, deeper, found)


def _in_module(x: nn.Module, seen: set[int], depth: int, found: Found) -> Iterator[Tensor]:
    places = found.places
    for prefix, module in x.named_modules():
        seen.add(id(module))
        found.modules.append(module)
        places.add(module)
        for held in (module._parameters, module._buffers):
            for key, value in held.items():
                if value is not None:
                    found.slots.append(Slot(held, key, value, f"{prefix}.{key}" if prefix else key))
                    yield value
        others = [vars(module)[key] for key in vars(module).keys() - _OF_MODULES]
        others += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        kinds = [kind for kind in type(module).__mro__ if id(kind) not in seen and not _is_closed(kind.__module__)]
        for value in (*kinds, *(f for kind in kinds for f in _code(kind)), *others):
            if value.__class__ not in SIMPLE and id(value) not in seen:
                # An activation that an earlier call has left is not used because it can be reached.
                yield from (t for t in _reachable(value, seen, depth + 1, found) if t.is_leaf or not is_tracked(t))


def _inside(x: Any, depth: int, places: Places) -> Iterable[Any]:
    """The parts of an object; where it can be changed is noted."""
    inside: list[Any] = []
    if isinstance(x, functools.partial):
        inside = [x.func, *x.args, *x.keywords.values()]
    elif isinstance(x, types.MethodType):
        inside = [x.__self__, x.__func__]
    elif isinstance(x, types.FunctionType):
        cells = x.__closure__ or ()
        inside = [cell.cell_contents for cell in cells if filled(cell)]
        inside += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        if _is_closed(x.__globals__.get("__name__")):
            return inside  # it has wrapped a user's function
        for cell in cells:
            places.add(variable(cell))
        names, stored = _names(x.__code__)
        named = {name: x.__globals__[name] for name in names if name in x.__globals__}
        if kept := (*stored, *(name for name, g in named.items() if not isinstance(g, _DEFINED))):
            places.add(Names(x.__globals__, kept))
        # Of other files' functions only what they are called with is searched: all of torch would be within reach.
        inside += [g for g in named.values() if not isinstance(g, types.FunctionType) or _of_same_file(g, x)]
        if vars(x):
            places.add(vars(x))
        if (wrapped := getattr(x, "__wrapped__", None)) is not None:
            inside.append(wrapped)
    elif isinstance(x, (dict, list, tuple, set, frozenset, deque)):
        if not isinstance(x, (tuple, frozenset)):
            places.add(x)
        if len(x) <= _WIDEST:
            inside = list(x.values() if isinstance(x, dict) else x)
        inside += _attributes(x, depth, places) if hasattr(x, "__dict__") else []
    else:
        inside = _attributes(x, depth, places)
    return inside


def _attributes(x: Any, depth: int, places: Places) -> list[Any]:
    kind = x if isinstance(x, type) else type(x)
    if depth >= 4 or _is_closed(kind.__module__):
        return []
    if isinstance(x, type):
        data = {name: value for name, value in vars(x).items() if not _is_code(name, value)}
        if data:
            places.add(Names(x, tuple(data)))
        return list(data.values())
    held = getattr(x, "__dict__", None)
    if isinstance(held, dict):
        places.add(held)
    slots = slots_of(x)
    if slots:
        places.add(Names(x, slots))
    return [
        kind,
        *_code(kind),
        *(held.values() if isinstance(held, dict) else ()),
        *(getattr(x, name, None) for name in slots),
    ]


def _code(kind: type) -> list[types.FunctionType]:
    """The functions of a user's class."""
    if _is_closed(kind.__module__):
        return []
    return [value for value in vars(kind).values() if isinstance(value, types.FunctionType)]


def _is_code(name: str, value: Any) -> bool:
    return name.startswith("__") or callable(value) or hasattr(value, "__get__")


def slots_of(x: Any) -> tuple[str, ...]:
    """The names of an object's attributes in slots."""
    named: list[str] = []
    for kind in type(x).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            named.append(f"_{kind.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in named if name not in ("__dict__", "__weakref__"))


def _containers(tree: Any) -> Iterator[Any]:
    """The containers of a pytree that can be changed."""
    if isinstance(tree, (dict, list, tuple, deque)):
        if not isinstance(tree, tuple):
            yield tree
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _containers(part)


def _is_closed(file: Any) -> bool:
    return f"{file}.".startswith(_CLOSED)


@functools.lru_cache(4096)
def _names(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The globals that a function, or one inside it, may use, and those among them that it assigns or deletes."""
    inner = [_names(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    stored = [one.argval for one in dis.get_instructions(code) if one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")]
    all_names = dict.fromkeys((*code.co_names, *(name for names, _ in inner for name in names)))
    return tuple(all_names), tuple(dict.fromkeys((*stored, *(name for _, names in inner for name in names))))


def _of_same_file(value: Any, function: types.FunctionType) -> bool:
    return isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__


def filled(cell: Any) -> bool:
    """Whether a variable of a closure has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # not assigned yet
        return False
    return True


# Values in which no tensors are looked for.
_PLAIN = (str, bytes, int, float, complex, type, types.FunctionType, types.ModuleType, nn.Module, torch.Generator)


class Form(NamedTuple):
    """A result without its tensors.

    tree: Its structure.
    leaves: The place of each tensor; an `Object`; or another value.
    """

    tree: Any
    leaves: list[Any]


class Place(NamedTuple):
    """The place of a tensor: its kind and number."""

    kind: str
    number: int


class Object(NamedTuple):
    """An object that holds tensors in its attributes."""

    value: Any
    attributes: dict[str, Form]


def form_of(result: Any, place: Callable[[Tensor], Any]) -> Form:
    """The form of a result.

    Args:
        result: A pytree, whose leaves may be any values.
        place: Called with each tensor; returns what stands in its place.

    Raises:
        TypeError: an iterator, of which the function has not run yet what it will give.
    """
    return _form(result, place, set())


def rebuilt(form: Form, tensor: Callable[[Any], Any]) -> Any:
    """The result of this form. Objects are those that the function has returned.

    Args:
        form: The form.
        tensor: Called with what stands in the place of a tensor.
    """
    leaves: list[Any] = []
    for leaf in form.leaves:
        if isinstance(leaf, Object):
            for name, inner in leaf.attributes.items():
                object.__setattr__(leaf.value, name, rebuilt(inner, tensor))
            leaves.append(leaf.value)
        else:
            leaves.append(tensor(leaf) if isinstance(leaf, Place) else leaf)
    return optree.tree_unflatten(form.tree, leaves)


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors in a result, those in attributes of objects included."""
    found: list[Tensor] = []
    form_of(result, found.append)
    return found


def _form(x: Any, place: Callable[[Tensor], Any], seen: set[int]) -> Form:
    leaves, tree = optree.tree_flatten(x)
    return Form(tree, [place(leaf) if isinstance(leaf, Tensor) else _other(leaf, place, seen) for leaf in leaves])


def _other(x: Any, place: Callable[[Tensor], Any], seen: set[int]) -> Any:
    if isinstance(x, (Iterator, Coroutine)):
        raise TypeError(
            f"a function in remat has returned a {type(x).__name__}, which has not computed yet what it will give; return a list"
        )
    if isinstance(x, _PLAIN) or id(x) in seen:
        return x
    seen.add(id(x))
    held = getattr(x, "__dict__", None)
    values = dict(held) if isinstance(held, dict) else {}
    values |= {name: getattr(x, name) for name in slots_of(x) if hasattr(x, name)}
    forms = {name: form for name, value in values.items() if _holds(form := _form(value, place, seen))}
    return Object(x, forms) if forms else x


def _holds(form: Form) -> bool:
    return any(isinstance(leaf, (Place, Object, Tensor)) for leaf in form.leaves)
