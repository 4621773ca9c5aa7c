"""Transforms: pairs of pure functions on gradients.

    Transform   init(params) -> state
                update(grads, state, params=None, *, weight=None, lane=None, **extra) -> (grads, state)

A transform keeps its memory in the state that it returns.
"""

from __future__ import annotations

import enum
import functools
import inspect
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ._axis_env import AxisName, under_vmap
from ._errors import NotVmappable
from ._spec import Spec, Specified, spec_of_function
from ._tree import State, Tree


class Needs(enum.Flag):
    """The requirements of a transform on its input. A chain has the requirements of all its stages."""

    NOTHING = 0  # any part of the elements: the input may be one flat buffer, with zeros between the leaves
    LEAVES = enum.auto()  # each leaf in its own shape; any subset of the leaves, the empty one included
    PATHS = enum.auto()  # the leaves by their paths
    LAYOUT = enum.auto()  # the layout of the buffer, that is its leaves and their order: the result depends on it
    TREE = enum.auto()  # all leaves at once

    def __str__(self) -> str:
        return ", ".join(str(flag.name).lower() for flag in self) or "nothing"


class Reduction(NamedTuple):
    """The reduction of a transform over the ranks."""

    sums: Callable[[State], Any]  # state -> `MeanState`, the total weight and the lane of the last message
    axis: AxisName | None = None  # for a transform that is only a weighted mean or sum: its axes
    over: Literal["weight", "live", "world"] | None = None  # the divisor of that mean; None: it sums
    # Whether the transform is one psum of weight * gradient, weight and lane, then the division, with a `MeanState` as
    # state. A step then sums buckets in place, and leaves the division to the optimizer's kernel.
    fusable: bool = False
    scatters: bool = False  # whether each rank gets only its piece of the result


class Compression(NamedTuple):
    """The lossy compression of a transform's messages.

    `paths` is a function `params -> paths` of the leaves that are not sent completely. `update` stores their residuals
    in `extra["memory"]`, if it is given; see `error_feedback`. None: the transform sends the residuals itself later.
    """

    paths: Callable[[Tree], Collection[str]] | None
    encoded: bool = True  # whether a codec encodes the messages


@dataclass(frozen=True, eq=False, repr=False)
class Transform(Specified):
    """A pair of pure functions on gradients (or, after the optimizer, on parameters).

    Args:
        init: `params -> state`.
        update: `(grads, state, params=None, *, weight=None, lane=None, **extra) -> (grads, state)`.
            `weight` is this rank's share in the step's mean (a number or a 0-d tensor; None is 1), `lane` a dict of
            named scalars that are summed along with the gradients. It may return None for the gradients if there is no
            step in this call (see `accumulate`); then the following stages are not run. The state of parameters is in
            dicts keyed by their paths, inside tuples, NamedTuples, lists and dicts. Keywords in `extra`:

            - `step`: the number of the pipeline's steps before this one, a host integer, equal on all ranks. Periods
              and warm-ups depend on it. A transform without this keyword counts its own calls.
            - `persistent`: the input is parameters or buffers, which persist between steps. A reduction returns them
              unchanged where no rank has weight, since a mean without weights is 0.
            - `first_bucket`: in a call on one of several buckets, its `.get()` returns the new state of the same stage
              in the first bucket's call of this step. `Inner` passes it to a transform inside.
            - `unit`: a power of two that makes sums of weight * gradient fit float16; `mean` multiplies by it before it
              sums.
            - `flush`: no step has been taken; a transform that has gathered the weights of several steps runs now, and
              those inside it. Other transforms are not called.
            - `donated`: no caller needs the gradients any more, so `update` may write into them.
        needs: The requirements of `update` on its input; by default the whole tree.
        reduces: The reduction, for a transform that carries the lane.
        compression: The compression, for a transform that does not send the complete gradient.
        pauses: Whether `update` may return None for the gradients.
        vmappable: Whether `update` runs under the simulator's vmap engine.
        spec: The transform as data; `factory` fills it in.

    >>> import torch
    >>> double = Transform(lambda params: (), lambda g, s, params=None, **extra: (g * 2, s), needs=Needs.NOTHING)
    >>> double.update(torch.tensor(1.5), ())
    (tensor(3.), ())
    """

    init: Callable[[Tree], State]
    update: Callable[..., tuple[Tree, State]]
    needs: Needs = Needs.TREE
    reduces: Reduction | None = None
    compression: Compression | None = None
    pauses: bool = False
    vmappable: bool = True
    spec: Spec = Spec("")

    def __post_init__(self) -> None:
        if not isinstance(self.needs, Needs):
            raise TypeError(f"needs must be a Needs, such as Needs.LEAVES | Needs.PATHS, got {self.needs!r}")
        object.__setattr__(self, "update", adapted(self.update))
        children = [child for child in self.spec.children if isinstance(child, Transform)]
        object.__setattr__(
            self, "needs", functools.reduce(operator.or_, (child.needs for child in children), self.needs)
        )
        object.__setattr__(self, "pauses", self.pauses or any(child.pauses for child in children))
        if self.compression is None:
            object.__setattr__(self, "compression", _compression_of(children))
        if not self.vmappable or not all(getattr(child, "vmappable", True) for child in self.spec.children):
            object.__setattr__(self, "vmappable", False)
            object.__setattr__(self, "update", _refuse_vmap(self.update, self))

    @property
    def sums(self) -> Callable[[State], Any] | None:
        """`Reduction.sums`; None for a transform that does not carry the lane."""
        return self.reduces.sums if self.reduces else None

    @functools.cached_property
    def sharded_over(self) -> str | None:
        """The axis over which the result is sharded; None where each rank gets all of it."""
        if self.reduces and self.reduces.scatters:
            return str(self.reduces.axis)
        inside = (child.sharded_over for child in self.spec.children if isinstance(child, Transform))
        return next(filter(None, inside), None)

    @functools.cached_property
    def keywords(self) -> Collection[str]:
        """The names in the signature of `update`."""
        return inspect.signature(self.update).parameters.keys()

    def accepts(self, keyword: str) -> bool:
        """Whether `update`, or that of a transform inside, has a keyword of this name in its signature."""
        inside = (child for child in self.spec.children if isinstance(child, Transform))
        return keyword in self.keywords or any(child.accepts(keyword) for child in inside)

    def with_spec(self, spec: Spec) -> Transform:
        return replace(self, spec=spec)

    @property
    def _spec(self) -> Spec:
        return self.spec if self.spec.name else spec_of_function(self.update)


class Inner:
    """A transform inside another one, whose state is a field of the outer state.

    Args:
        transform: The inner transform.
        field: The name of the field.
    """

    def __init__(self, transform: Transform, field: str = "inner") -> None:
        self.transform, self.field = transform, field

    def update(
        self, grads: Tree, state: Any, params: Tree, *, first_bucket: Any = None, donated: bool = False, **extra: Any
    ) -> tuple[Tree, State]:
        """Call the inner transform with the arguments of the outer call, and return its result and its new state.

        Args:
            state: The outer state.
        """
        own = first_bucket.substate(self.field) if first_bucket is not None else None
        lent = donate_kwargs(self.transform, donated)
        if not hasattr(state, self.field):
            raise other_state(state)
        return self.transform.update(grads, getattr(state, self.field), params, first_bucket=own, **lent, **extra)

    def reduction(self, *own: str, same: bool = False) -> Reduction | None:
        """The reduction of the outer transform.

        Args:
            own: The names that the outer transform has put into the lane itself.
            same: Whether the outer transform computes the same mean or sum as the inner one, in another form.
        """
        if self.transform.reduces is None:
            return None
        sums = self.transform.reduces.sums

        def of_inner(state: State) -> Any:
            found = sums(getattr(state, self.field))
            return found._replace(lane={name: value for name, value in found.lane.items() if name not in own})

        axis, over = self.transform.reduces.axis, self.transform.reduces.over
        return Reduction(of_inner, axis, over) if same else Reduction(of_inner)


def adapted(update: Callable[..., Any]) -> Callable[..., Any]:
    """An `update` that ignores the keywords that are not in its signature, as optax's do.

    Raises:
        TypeError: it does not take gradients and a state.
    """
    try:
        parameters = inspect.signature(update).parameters
    except (TypeError, ValueError):  # a builtin
        return update
    kinds = [p.kind for p in parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return update
    named = {n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    many = inspect.Parameter.VAR_POSITIONAL in kinds
    places = sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    if places < 2 and not many:
        raise TypeError(
            f"update is called as update(grads, state, params=None, ...), but {update!r} takes {places} arguments"
        )

    @functools.wraps(update)
    def with_known(*args: Any, **kwargs: Any) -> Any:
        return update(*(args if many else args[:places]), **{n: v for n, v in kwargs.items() if n in named})

    with_known.adapts = update  # type: ignore[attr-defined]
    return with_known


def other_state(state: Any, expected: str = "the state") -> ValueError:
    """The error for the state of another transform."""
    return ValueError(
        f"state is a {type(state).__name__}, expected {expected} that this transform's init or update returned; it is another "
        f"pipeline's state"
    )


def donate_kwargs(to: Transform, donated: bool = True) -> dict[str, bool]:
    """The keywords for `update` if its caller needs the gradients no more: `donated`, where the signature has it.

    No two of these gradients share memory, so `update` may write its results into them.
    """
    return {"donated": True} if donated and "donated" in to.keywords else {}


def flush_kwargs(to: Transform, flush: bool) -> dict[str, bool]:
    """The keywords for `update` in a flush: `flush`, where the signature has it."""
    return {"flush": True} if flush and to.accepts("flush") else {}


def _compression_of(children: Sequence[Transform]) -> Compression | None:
    """The compression of transforms that run one after the other."""
    found = [child.compression for child in children if child.compression]
    functions = [one.paths for one in found if one.paths]
    if not found:
        return None

    def paths(params: Tree) -> set[str]:
        return set[str]().union(*(function(params) for function in functions))

    return Compression(paths if functions else None, any(one.encoded for one in found))


def _refuse_vmap(update: Callable[..., Any], owner: Transform) -> Callable[..., Any]:
    update = getattr(update, "_allows_vmap", update)

    @functools.wraps(update)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if under_vmap():
            raise NotVmappable(f"{owner!r} does not run under the vmap engine; use simulate(..., engine='lockstep')")
        return update(*args, **kwargs)

    guarded._allows_vmap = update  # type: ignore[attr-defined]
    return guarded


def check_transform(value: Any, where: str) -> Transform:
    """Raise TypeError unless `value` is a Transform."""
    if isinstance(value, Transform):
        return value
    if type(value).__name__.startswith("GradientTransformation"):
        hint = "a transformation of optax becomes a stage by from_optax(...)"
    elif hasattr(type(value), "instead_of_transform"):
        hint = type(value).instead_of_transform
    elif callable(value):
        hint = "did you forget to call the factory, or do you want stateless(function)?"
    else:
        hint = "make one with Transform(init, update)"
    raise TypeError(f"{where} must be a Transform, got {value!r}; {hint}")


def init_empty(params: Tree) -> State:
    """The init of a transform without state."""
    del params
    return ()
