"""Transforms: pairs of pure functions on gradients.

    Transform   init(params) -> state
                update(grads, state, params=None, *, weight=None, lane=None, **extra) -> (grads, state)

A transform keeps its memory in the state that it returns.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from .._check import AxisName
from ..spec._spec import Spec, spec_of_function
from ..spec._specified import Specified
from ..tree._tree import State, Tree
from ._call import NAMES, Call
from ._timing import Timing
from ._update import Update


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


class ByNorm(NamedTuple):
    """A factor for all gradients that depends on their norm."""

    factor: Callable[[Any], Any]  # norm, 0-d -> factor, 0-d
    keeps: Callable[[Any], State] | None = None  # norm, 0-d float64 -> the state after the call; None: it has no state


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
            dicts keyed by their paths, inside tuples, NamedTuples, lists and dicts. It may leave out keywords that it does
            not use. Others that it may name:

            - `step`: the number of the pipeline's steps before this one, a host integer, equal on all ranks. Periods
              and warm-ups depend on it. A transform without this keyword counts its own calls.
            - `persistent`: the input is parameters or buffers, which persist between steps. A reduction returns them
              unchanged where no rank has weight, since a mean without weights is 0.
            - `flush`: no step has been taken; a transform that has gathered the weights of several steps runs now, and
              those inside it. Other transforms are not called.
            - `donated`: no caller needs the gradients any more, so `update` may write into them.
            - `sharded_over`: the axis over which the input is sharded.
            - `call`: all of these in one `Call`, for `(grads, state, params, call)` in the place of keywords.
        needs: The requirements of `update` on its input; by default the whole tree.
        reduces: The reduction, for a transform that carries the lane.
        compression: The compression, for a transform that does not send the complete gradient.
        pauses: Whether `update` may return None for the gradients.
        takes: Of an `update` with `call`: the attributes of it that change what it does, as the names of keywords do for
            others: "flush", "donated", "sharded_over", "wire".
        timing: When it runs those inside it, and when its messages change; None: they are the same in each step.
        wraps: "stages": it only runs those inside it, one after the other. "whole": all leaves go through the one inside.
        by_norm: For a transform that only scales all gradients by a function of their norm: that function.
        silent: Whether it is meant to send nothing, where others would warn of that.
        equalizes: Of parameters or buffers, for a transform after which the ranks have equal values in each call: from its
            state to the weight of all ranks in that call.
        spec: The transform as data; `factory` fills it in.

    >>> import torch
    >>> double = Transform(lambda params: (), lambda g, s, params=None: (g * 2, s), needs=Needs.NOTHING)
    >>> double.update(torch.tensor(1.5), ())
    (tensor(3.), ())
    """

    init: Callable[[Tree], State]
    update: Callable[..., tuple[Tree, State]]
    needs: Needs = Needs.TREE
    reduces: Reduction | None = None
    compression: Compression | None = None
    pauses: bool = False
    takes: Collection[str] = ()
    timing: Timing = None
    wraps: Literal["stages", "whole"] | None = None
    by_norm: ByNorm | None = None
    silent: bool = False
    equalizes: Callable[[State], Any] | None = None
    spec: Spec = Spec("")

    def __post_init__(self) -> None:
        if not isinstance(self.needs, Needs):
            raise TypeError(f"needs must be a Needs, such as Needs.LEAVES | Needs.PATHS, got {self.needs!r}")
        update = self.update if isinstance(self.update, Update) else Update(self.update)
        children = [child for child in self.spec.children if isinstance(child, Transform)]

        def set_(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        set_("needs", functools.reduce(operator.or_, (child.needs for child in children), self.needs))
        set_("pauses", self.pauses or any(child.pauses for child in children))
        # Of an `update` by keywords the names say it; what is given may be that of the transform of which it is a copy.
        set_("takes", (frozenset(self.takes) if update.takes_call else frozenset()) | (update.names & NAMES))
        if self.compression is None:
            set_("compression", _compression_of(children))
        set_("update", update.for_transform(self))

    def run(self, grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        """`update` in a given context."""
        update: Any = self.update
        out: tuple[Tree, State] = update.run(grads, state, params, call)
        return out

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

    def accepts(self, keyword: str) -> bool:
        """Whether `update`, or that of a transform inside, does something with this attribute of a call."""
        inside = (child for child in self.spec.children if isinstance(child, Transform))
        return keyword in self.takes or any(child.accepts(keyword) for child in inside)

    def with_spec(self, spec: Spec) -> Transform:
        return replace(self, spec=spec)

    @property
    def _spec(self) -> Spec:
        update: Any = self.update
        return self.spec if self.spec.name else spec_of_function(update.function)


def _compression_of(children: Sequence[Transform]) -> Compression | None:
    """The compression of transforms that run one after the other."""
    found = [child.compression for child in children if child.compression]
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
        hint = "make one with Transform(init, update)"
    raise TypeError(f"{where} must be a Transform, got {value!r}; {hint}")


def init_empty(params: Tree) -> State:
    """The init of a transform without state."""
    del params
    return ()
