"""Transforms, optimizers and codecs as data: names, arguments and children; text, equality and fingerprint."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch

from .checks import CHECKS
from .trees import flatten_in_insertion_order


def code_text(code: types.CodeType) -> str:
    """Code and its constants as text; the functions inside it are among its constants."""
    return repr((code.co_code, code.co_names, list(map(_constant_text, code.co_consts))))


def _constant_text(constant: Any) -> str:
    if isinstance(constant, types.CodeType):
        return code_text(constant)
    if isinstance(constant, tuple):
        return f"({', '.join(map(_constant_text, constant))})"
    if isinstance(constant, frozenset):  # whose order differs between processes
        return f"{{{', '.join(sorted(map(_constant_text, constant)))}}}"
    return repr(constant)


P = ParamSpec("P")
T = TypeVar("T")

_FACTORIES: dict[str, Callable[..., Any]] = {}
DEEPEST = 100  # levels of transforms in transforms


@dataclass(frozen=True, eq=False)
class Spec:
    """The name of a factory and the arguments it was called with, defaults included."""

    name: str
    args: tuple[tuple[str, Any], ...] = ()

    @functools.cached_property
    def children(self) -> tuple[Any, ...]:
        """The arguments that have a spec themselves, in order, also those inside containers."""
        _, leaves, _ = flatten_in_insertion_order([value for _, value in self.args])
        return tuple(leaf for leaf in leaves if isinstance(getattr(leaf, "spec", None), Spec))

    @functools.cached_property
    def depth(self) -> int:
        """The number of levels of transforms, this one included."""
        return 1 + max((child.spec.depth for child in self.children), default=0)

    @property
    def factory(self) -> Callable[..., Any] | None:
        """The factory that makes such an object; None if it was made by none."""
        return _FACTORIES.get(self.name)

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the factory by name; none where there is none."""
        return {} if self.factory is None else inspect.signature(self.factory).parameters

    @property
    def is_ours(self) -> bool:
        """Whether a factory of this package makes it."""
        return _is_ours(self.factory)

    def canonical(self) -> str:
        return json.dumps(encode(self), sort_keys=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self.canonical() == other.canonical()

    def __hash__(self) -> int:
        return hash(self.canonical())

    def __repr__(self) -> str:
        known = self.parameters
        parts = []
        for key, value in self.args:
            parameter = known.get(key)
            if parameter is not None and parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                parts += [shown(item) for item in value]
            elif parameter is None or parameter.default is inspect.Parameter.empty:
                parts.append(shown(value))
            elif (type(value), repr(value)) != (type(parameter.default), repr(parameter.default)):
                parts.append(f"{key}={shown(value)}")
        return f"{self.name}({', '.join(parts)})"


def _is_ours(function: Any) -> bool:
    """Whether a function is of this package."""
    return str(getattr(function, "__module__", "")).startswith(f"{__package__.rpartition('.')[0]}.")


def shown(value: Any) -> str:
    if isinstance(getattr(value, "spec", None), Spec):
        return repr(value.spec)
    if isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        return f"partial({', '.join(map(shown, parts))})"
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    if callable(value) and not isinstance(value, type):
        return type(value).__qualname__
    if isinstance(value, tuple) and any(map(callable, value)):
        return f"({', '.join(map(shown, value))})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {shown(v)}" for k, v in value.items()) + "}"
    return repr(value)


def factory(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a factory: its results carry a spec, with the factory's name and arguments.

    The factory is registered under its own name, so a name can be used only once.

    Raises:
        ValueError: another factory has this name; at a call: an argument is nested 100 deep already.

    >>> from fjoin import transforms as tx
    >>> tx.clip_by_global_norm(1.0)
    clip_by_global_norm(1.0)
    """
    name = function.__name__
    known = _FACTORIES.get(name)
    if known is not None and known.__module__ != function.__module__:
        raise ValueError(f"a factory called {name!r} exists already, in {known.__module__}; choose another name")
    signature = inspect.signature(function)
    # By the words of this package for types, see CHECKS; in another one they may mean something else.
    checks = _is_ours(function)

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}: {error}; it takes {', '.join(signature.parameters)}") from None
        bound.apply_defaults()
        bound.arguments = {key: _number(value) for key, value in bound.arguments.items()}
        for key, value in bound.arguments.items() if checks else ():
            parameter = signature.parameters[key]
            several = parameter.kind is parameter.VAR_POSITIONAL
            kind, _, optional = str(parameter.annotation).partition(" | ")
            given = [(f"argument {i}", one) for i, one in enumerate(value)] if several else [(key, value)]
            for what, one in given:
                if kind in CHECKS and (one is not None or optional != "None"):
                    CHECKS[kind](f"{name}: {what}", one)
        spec = Spec(name, tuple(bound.arguments.items()))
        if spec.depth > DEEPEST:
            deep = f"{name} would be nested {spec.depth} deep, expected at most {DEEPEST}"
            raise ValueError(f"{deep}; put stages side by side in chain(...)")
        made: Any = function(*bound.args, **bound.kwargs)
        if made.spec.factory is None:  # otherwise another one made it
            made = replace(made, spec=spec)
        return made  # type: ignore[no-any-return]

    _FACTORIES[name] = make
    return make


def _number(value: Any) -> Any:
    """A number of numpy as one of Python, which has a JSON form; other values are unchanged."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 else value


def encode(value: Any) -> Any:
    """The JSON form, for comparisons: functions have a hash of their code, and objects of other kinds are told by their
    class.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Spec):
        return {"name": value.name, "args": {k: encode(v) for k, v in value.args}}
    if isinstance(getattr(value, "spec", None), Spec):
        return encode(value.spec)
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if hasattr(value, "tolist"):  # a tensor, or an array of numpy
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    if isinstance(value, Mapping):
        return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, functools.partial):
        return {"partial": [encode(v) for v in (value.func, *value.args, *value.keywords, *value.keywords.values())]}
    if callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return {"function": f"{named.__module__}.{named.__qualname__}", "code": _code_hash(value)}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, (set, frozenset)):  # whose order differs between processes
        return {"set": sorted(json.dumps(encode(one)) for one in value)}
    return {"a": type(value).__qualname__}


def _code_hash(function: Any) -> str:
    """A hash of a function's code and default arguments."""
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__") and callable(function):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    defaults = [*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())]
    text = json.dumps([encode(default) for default in defaults]) + code_text(code)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(*parts: Any) -> str:
    """A short hash of transforms and plain data, equal on two ranks iff the parts are.

    Functions are compared by qualified name, code and default arguments, not by the variables in their closures;
    partials by their arguments too.

    Args:
        parts: Transforms, optimizers, schedules, pipelines, numbers, strings, tuples and dicts of them.

    Returns:
        32 hexadecimal digits.

    >>> from fjoin import transforms as tx
    >>> from fjoin.transforms.base.specs import fingerprint
    >>> fingerprint(tx.identity()) == fingerprint(tx.clip_by_value(1.0))
    False
    """
    text = json.dumps([encode(part) for part in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def call_factory(make: Callable[..., Any], args: Iterable[tuple[str, Any]]) -> Any:
    """The result of a factory with the arguments of a spec."""
    bound = inspect.BoundArguments(inspect.signature(make), dict(args))  # type: ignore[arg-type]
    return make(*bound.args, **bound.kwargs)


class Specified:
    """Equality, hash and repr by spec; pickled as a factory and its arguments, since the functions in it have no names."""

    spec: Spec

    def identify(self, **functions: Any) -> None:
        """Give an object that no factory has made a spec of its functions."""
        if self.spec.factory is None:
            object.__setattr__(self, "spec", Spec("custom", tuple(functions.items())))

    def __reduce_ex__(self, protocol: Any) -> Any:
        make = self.spec.factory
        return super().__reduce_ex__(protocol) if make is None else (call_factory, (make, self.spec.args))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash(self.spec)

    def __repr__(self) -> str:
        return repr(self.spec)
