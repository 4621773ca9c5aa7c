"""`Transform`: its fields, how its update is called, and the call of an inner one."""

from __future__ import annotations

import enum
import functools
import inspect
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from ._call import IN_EXTRA, KEYWORDS, Call, call_of
from .checks import CHECKS, AxisName
from .specs import Spec, Specified
from .timings import Timing
from .trees import State, Tree, with_changes

S = TypeVar("S", bound=NamedTuple)


class Needs(enum.Flag):
    """The requirements of a transform on its input. A chain has the requirements of all its stages."""

    NOTHING = 0  # any part of the elements: the input may be one flat buffer, with zeros between the leaves
    LEAVES = enum.auto()  # each leaf in its own shape; any subset of the leaves, the empty one included
    PATHS = enum.auto()  # the leaves by their paths
    LAYOUT = enum.auto()  # the layout of the buffer, that is its leaves and their order: the result depends on it
    TREE = enum.auto()  # all leaves at once
    VALUES = enum.auto()  # parameters or buffers: in a hook, of gradients, it has no use

    def __str__(self) -> str:
        return ", ".join(str(flag.name).lower() for flag in self) or "nothing"


class Reduction(NamedTuple):
    """The weighted mean or sum over ranks that a transform takes of its input."""

    axis: AxisName
    over: Literal["weight", "live", "world"] | None  # the divisor of the mean; None: it sums
    # Whether it is one psum of share * gradient, without a state. A step then sums weight * gradient in place, and
    # leaves the division to the optimizer's kernel.
    fusable: bool = False
    scatters: bool = False  # whether each rank gets only its piece of the result
    arrives: bool = False  # whether it gets pieces of sums over all ranks already, and only divides


class ByNorm(NamedTuple):
    """A factor for all gradients that depends on their norm."""

    factor: Callable[[Any], Any]  # norm, 0-d -> factor, 0-d
    keeps: Callable[[Any], State] | None = None  # norm, 0-d float64 -> the state after the call; None: it has no state


class Compression(NamedTuple):
    """The lossy compression of a transform's messages.

    `paths` is a function `params -> paths` of the leaves that are not sent completely. Where the call has a `memory`,
    `update` keeps their residuals there; see `error_feedback`. None: the transform sends the residuals itself later.
    """

    paths: Callable[[Tree], Collection[str]] | None
    encoded: bool = True  # whether a codec encodes the messages


class Facts(NamedTuple):
    """What the library may rely on about a transform. The defaults are true of any function of the gradients.

    - `reduces`: The reduction, of a transform that takes one mean or sum of its input.
    - `compression`: The compression, of a transform that does not send the complete gradient.
    - `pauses`: Whether `update` may return None for the gradients.
    - `takes`: Of an `update` with `call`: the attributes of it that change what it does, as the names of keywords do
      for others: "flush", "donated", "sharded_over", "wire".
    - `wraps`: "stages": it only runs those inside it, one after the other. "whole": all leaves go through the one
      inside. "parts": each leaf, or each call, goes through one of those inside.
    - `by_norm`: The factor, of a transform that only scales all gradients by a function of their norm.
    - `silent`: Whether it is meant to send nothing. Other pipelines that send nothing get a warning.
    - `passes`: Whether it only looks at the gradients, and returns them as they are.
    - `equalizes`: Of parameters, buffers or states: the axes over whose ranks they are equal after each call.
    """

    reduces: Reduction | None = None
    compression: Compression | None = None
    pauses: bool = False
    takes: Collection[str] = ()
    wraps: Literal["stages", "whole", "parts"] | None = None
    by_norm: ByNorm | None = None
    silent: bool = False
    passes: bool = False
    equalizes: AxisName | None = None


class TransformInitFn(Protocol):
    """Makes the state of a transform from parameters: a tree of tensors, () for none."""

    def __call__(self, params: Tree, /) -> State: ...


class TransformUpdateFn(Protocol):
    """Transforms gradients: `(grads, state, params=None, *, weight=None, **extra) -> (grads, state)`.

    `weight` is this rank's weight in the step's mean (a number or a 0-d tensor; None is 1). The result may be None for
    the gradients if there is no step in this call (see `accumulate`); then the following stages are not run. The state
    of parameters is in dicts keyed by their paths, inside tuples, NamedTuples, lists and dicts. A function may leave
    out keywords that it does not use. Others that it may name:

    - `step`: the number of the pipeline's steps before this one, a host integer, equal on all ranks. Periods
      and warm-ups depend on it. A transform without this keyword counts its own calls.
    - `persistent`: the input is parameters or buffers, which persist between steps. A reduction returns them
      unchanged if no rank has weight, since a mean without weights is 0.
    - `flush`: no step has been taken; a transform that has gathered the weights of several steps runs now, and
      those inside it. Other transforms are not called.
    - `donated`: no caller needs the gradients any more, so the function may write into them.
    - `sharded_over`: the axis over which the input is sharded.
    - `call`: all of these in one `Call`, for `(grads, state, params, call)` in the place of keywords. Its `share` is
      this rank's factor in a mean: `psum(call.share(axis).times(grad), axis)` is that mean.
    """

    def __call__(self, grads: Tree, state: State, /, *args: Any, **extra: Any) -> tuple[Tree, State]: ...


@dataclass(frozen=True, eq=False, repr=False)
class Transform(Specified):
    """A pair of pure functions on gradients (or, after the optimizer, on parameters).

    Args:
        init: `params -> state`, see `TransformInitFn`.
        update: `(grads, state, params=None, *, weight=None, **extra) -> (grads, state)`, see `TransformUpdateFn`.
        needs: The requirements of `update` on its input; by default the whole tree.
        timing: When it runs those inside it, and when its messages change; None: they are the same in each step.
        facts: What else the library may rely on.
        spec: The transform as data; `factory` fills it in.

    >>> import torch
    >>> double = Transform(lambda params: (), lambda g, s, params=None: (g * 2, s), needs=Needs.NOTHING)
    >>> double.update(torch.tensor(1.5), ())
    (tensor(3.), ())
    """

    init: TransformInitFn
    update: TransformUpdateFn
    needs: Needs = Needs.TREE
    timing: Timing | None = None
    facts: Facts = Facts()
    spec: Spec = Spec("")

    # Made of these.
    _function: Callable[[Tree, State, Tree, Call], tuple[Tree, State]] = field(init=False)
    _flushes: bool = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.needs, Needs):
            raise TypeError(f"needs must be a Needs, such as Needs.LEAVES | Needs.PATHS, got {self.needs!r}")
        given = self.update.function if isinstance(self.update, _Update) else self.update
        function, names = _with_call(given)
        self.identify(function=given)
        children = _inside(self)

        def set_(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        set_("needs", functools.reduce(operator.or_, (child.needs for child in children), self.needs))
        facts = self.facts
        pauses = facts.pauses or any(child.facts.pauses for child in children)
        # What is given beside keywords may be that of the transform of which it is a copy.
        takes = frozenset(facts.takes) if names is None else names.intersection(KEYWORDS)
        compression = facts.compression or _compression_of(children)
        set_("facts", facts._replace(pauses=pauses, takes=takes, compression=compression))
        set_("update", _Update(given, self))
        set_("_function", function)
        set_("_flushes", self.accepts("flush"))

    def run(self, grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        """`update` in a given context."""
        if call.flush and not self._flushes:
            return grads, state
        if call.donated and "donated" not in self.facts.takes:
            call = call.inside(donated=False)
        return self._function(grads, state, params, call)

    @functools.cached_property
    def is_reducing(self) -> bool:
        """Whether it, or a transform inside it, takes a mean or a sum over ranks."""
        return self.facts.reduces is not None or any(child.is_reducing for child in _inside(self))

    @property
    def one_reduction(self) -> Reduction | None:
        """The only reduction through which all leaves go; None if there are none or several."""
        if self.facts.reduces is not None or self.facts.wraps not in ("stages", "whole"):
            return self.facts.reduces
        inside = [child for child in _inside(self) if child.is_reducing]
        return inside[0].one_reduction if len(inside) == 1 else None

    @functools.cached_property
    def sharded_over(self) -> str | None:
        """The axis over which the result is sharded; None if each rank gets all of it."""
        if self.facts.reduces and self.facts.reduces.scatters:
            return str(self.facts.reduces.axis)
        return next(filter(None, (child.sharded_over for child in _inside(self))), None)

    def accepts(self, keyword: str) -> bool:
        """Whether `update`, or that of a transform inside, does something with this attribute of a call."""
        return keyword in self.facts.takes or any(child.accepts(keyword) for child in _inside(self))


@dataclass(frozen=True, slots=True)
class _Update:
    """The `update` of a transform, as it is called with keywords."""

    function: Callable[..., tuple[Tree, State]]  # that was given
    transform: Transform

    def __call__(self, grads: Tree, state: State, params: Tree = None, **keywords: Any) -> tuple[Tree, State]:
        call = call_of(keywords)
        if "call" not in keywords:
            Call.check_late_weight(call, grads)
        return self.transform.run(grads, state, params, call)


def _with_call(function: Callable[..., Any]) -> tuple[Callable[..., Any], frozenset[str] | None]:
    """A user's function as `(grads, state, params, call)`, and the keywords that it names; None if it is one
    already.
    """
    kind, parameters = inspect.Parameter, inspect.signature(function).parameters.values()
    by_place = [p.name for p in parameters if p.kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD)]
    given = by_place[: 2 if by_place[2:] and by_place[2] in ("call", *KEYWORDS) else 3]
    required = {
        p.name: p.default is kind.empty
        for p in parameters
        if p.kind in (kind.KEYWORD_ONLY, kind.POSITIONAL_OR_KEYWORD) and p.name not in given
    }
    kinds = {p.kind for p in parameters}
    places = 3 if kind.VAR_POSITIONAL in kinds else len(given)
    if places < 2 or "params" in required:
        raise TypeError(f"update must take (grads, state, params=None, ...), but {function!r} takes {places} by place")
    if "call" in required:
        return function, None
    return functools.partial(_by_keywords, function, places, required, kind.VAR_KEYWORD in kinds), frozenset(required)


def _by_keywords(
    function: Any,
    places: int,
    named: dict[str, bool],
    others: bool,
    grads: Tree,
    state: State,
    params: Tree,
    call: Call,
) -> Any:
    """Call a function with the keywords that it names, or with all but a few.

    Args:
        places: The number of arguments that it takes by place.
        named: The names in its signature, and whether they have no default.
        others: Whether it takes any keyword. It then gets `call` too, to hand on what has no keyword.
    """
    found = {name: value for name, value in call.extra.items() if others or name in named}
    for name, unset in KEYWORDS.items():
        if name in named or (others and name in IN_EXTRA):
            value = getattr(call, name)
            if value is not unset or named.get(name, True):
                found[name] = value
    if others:
        found["call"] = call.inside(donated=False, handed=KEYWORDS.keys() & found.keys())
    return function(*(grads, state, params)[:places], **found)


def _inside(transform: Transform) -> list[Transform]:
    return [child for child in transform.spec.children if isinstance(child, Transform)]


def _compression_of(children: Sequence[Transform]) -> Compression | None:
    """The compression of transforms that run one after the other."""
    found = [child.facts.compression for child in children if child.facts.compression]
    functions = [one.paths for one in found if one.paths]
    if not found:
        return None

    def paths(params: Tree) -> set[str]:
        return set[str]().union(*(function(params) for function in functions))

    return Compression(paths if functions else None, any(one.encoded for one in found))


def check_transform(value: Any, where: str) -> Transform:
    """Raise TypeError unless `value` is a Transform."""
    if isinstance(value, Transform):
        return value
    if hasattr(type(value), "instead_of_transform"):
        hint = type(value).instead_of_transform
    elif callable(value):
        hint = "did you forget to call the factory, or do you want stateless(function)?"
    else:
        hint = f"write mean({value!r})" if isinstance(value, str) else "make one with Transform(init, update)"
    raise TypeError(f"{where} must be a Transform, got {value!r}; {hint}")


CHECKS["Transform"] = lambda where, value: check_transform(value, where)


def own_state(state: Any, kind: type[S], call: Call | None = None) -> S:
    """The state of a transform, in which the call's step replaces its own count of calls.

    Raises:
        ValueError: it is not of this kind.
    """
    if not isinstance(state, kind):
        expected = f"the {kind.__name__} that this transform's init or update returned"
        raise ValueError(f"state is a {type(state).__name__}, expected {expected}; it is another pipeline's state")
    return state if call is None or call.step is None else with_changes(state, step=call.step)
