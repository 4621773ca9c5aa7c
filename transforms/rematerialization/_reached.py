"""What a function reaches: modules, tensors and random number generators."""

from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_PLAIN = frozenset((type(None), str, bytes, int, float, complex, bool, type, types.ModuleType, torch.dtype))
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that are no user's
_CLOSED = ("torch.", "builtins.", f"{__name__.partition('.')[0]}.")  # packages whose objects are not looked into
_DEEPEST = 5  # containers and objects, one inside another
_TABLE = 100  # entries; a larger container of numbers or texts is not looked through


class Reached(NamedTuple):
    """What a function reaches.

    roots: Modules; their submodules belong to them.
    tensors: Those in modules, too.
    generators: Of random numbers.
    """

    roots: list[nn.Module]
    tensors: list[Tensor]
    generators: list[torch.Generator]

    def modules(self) -> list[nn.Module]:
        """All modules, without those of torch.jit, which have no dicts."""
        found = {id(m): m for root in self.roots for m in root.modules()}
        return [m for m in found.values() if not isinstance(m, torch.jit.ScriptModule)]


def reached(fn: Callable[..., Any], *arguments: Any) -> Reached:
    """Search a function's closure, globals and defaults, methods' objects, attributes of modules and objects,
    containers.
    """
    found = Reached([], [], [])
    seen: set[int] = set()
    todo: list[tuple[Any, int]] = [(root, 0) for root in (*arguments, fn)]
    while todo:
        x, depth = todo.pop()
        if type(x) in _PLAIN or id(x) in seen or depth > _DEEPEST:
            continue
        seen.add(id(x))
        if isinstance(x, Tensor):
            found.tensors.append(x)
        elif isinstance(x, torch.Generator):
            found.generators.append(x)
        elif isinstance(x, nn.Module):
            found.roots.append(x)
            for module in x.modules():
                seen.add(id(module))
                todo += [(inside, depth + 1) for inside in _in_module(module)]
        else:
            through = isinstance(x, (types.FunctionType, types.MethodType, functools.partial))
            todo += [(inside, depth if through else depth + 1) for inside in _inside(x)]
    return found


def _in_module(module: nn.Module) -> list[Any]:
    if isinstance(module, torch.jit.ScriptModule):
        return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    held = vars(module)
    own = [x for name, x in held.items() if name not in _OF_MODULES and type(x) not in _PLAIN]
    # An activation that an earlier call has left is not used because it can be reached.
    own = [x for x in own if not isinstance(x, Tensor) or x.is_leaf or not x.requires_grad]
    forward = () if _is_closed(type(module).__module__) else (type(module).forward,)
    return [*held["_parameters"].values(), *held["_buffers"].values(), *own, *forward]


def _inside(x: Any) -> Iterable[Any]:
    if isinstance(x, types.MethodType):
        return x.__self__, x.__func__
    if isinstance(x, functools.partial):
        return x.func, *x.args, *x.keywords.values()
    if isinstance(x, types.FunctionType):
        return _in_function(x)
    if isinstance(x, (list, tuple, set, frozenset, collections.deque, dict)):
        values = x.values() if isinstance(x, dict) else x
        return () if is_table(values) else values
    held = None if _is_closed(type(x).__module__) else getattr(x, "__dict__", None)
    return held.values() if isinstance(held, dict) else ()


def is_table(values: Collection[Any]) -> bool:
    """Whether a container is a large one of numbers or texts, of which tensors are no part."""
    return len(values) > _TABLE and set(map(type, values)) <= _PLAIN  # in C, since each call looks


def _in_function(function: types.FunctionType) -> list[Any]:
    inside = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable that is not assigned yet
            inside.append(cell.cell_contents)
    names = function.__globals__
    if not _is_closed(names.get("__name__")):
        used = [names[name] for name in function.__code__.co_names if name in names]
        # Functions of other files are not looked into: all of a library would be within reach.
        inside += [g for g in used if not isinstance(g, types.FunctionType) or g.__globals__ is names]
    return inside


def _is_closed(file: Any) -> bool:
    return f"{file}.".startswith(_CLOSED)
