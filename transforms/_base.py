"""The three kinds of thing that compose: Transform, Optimizer, Pipeline.

    Transform   init(params) -> state
                update(grads, state, params=None, *, weight=None, lane=None, **extra) -> (grads, state)
    Optimizer   init_param(param) -> state
                step_param(param, grad, state) -> (param, state)            pure
                step_param_(param, grad, state, *, grad_scale, found_inf)   the same, in place
    Pipeline    init(params) -> state
                step(params, grads, state, *, weight=None, lane=None) -> (params, state)

All of them are pairs of pure functions; whatever they remember is in the state that they return.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from ._errors import NotVmappable
from ._spec import Spec, spec_of_function
from ._tree import State, Tree, fields
from .axes._env import under_vmap
from .axes._primitive import AxisName
from .optimizers._checked import Forms, checked, counted, unchecked
from .optimizers._rates import watched

U = TypeVar("U", bound=Callable[..., Any])
Scope: TypeAlias = Literal["element", "leaf", "message", "tree"]


class Reduction(NamedTuple):
    """A weighted mean, or a weighted sum, of all ranks' gradients."""

    axis: AxisName
    over: Literal["weight", "live", "world"] | None  # what it divides by; None: it sums


class Phase(NamedTuple):
    """What a transform does in some steps, or to some leaves: what runs then, or the `init` of a state in which it does that."""

    when: str  # in words, such as "from step 3"
    what: Transform | Callable[[Tree], State]
    ends: bool = False  # whether it comes to an end, as a warm-up does


@dataclass(frozen=True, eq=False)
class _Specified:
    """Equality, hash and repr by spec."""

    @property
    def _spec(self) -> Spec:
        return self.spec  # type: ignore[attr-defined,no-any-return]

    def with_spec(self, spec: Spec) -> Any:
        return replace(self, spec=spec)  # type: ignore[call-arg]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._spec == other._spec  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self._spec)

    def __repr__(self) -> str:
        return repr(self._spec)


@dataclass(frozen=True, eq=False, repr=False)
class Transform(_Specified):
    """A pair of pure functions on gradients (or, after the optimizer, on parameters).

    Args:
        init: `params -> state`.
        update: `(grads, state, params=None, *, weight=None, lane=None, **extra) -> (grads, state)`.
            `weight` is this rank's share in the step's mean (a number or a 0-d tensor; None is
            1), `lane` a dict of named scalars to be summed along with the gradients. It may
            return None for the gradients: nothing to step with in this call (see `accumulate`);
            then the stages that follow are not run. `carried`, in a call on one of several buckets,
            has with `.get()` the same stage's new state in the first bucket's call of this step; a
            transform that runs others hands them `carried.at(field)`. `step` is the number of the pipeline's steps before this one,
            a host integer, the same on all ranks, which periods and warm-ups are read from; a transform that is given none counts
            its own calls. `persistent` says that parameters or buffers are given, which stay from step to step: a reduction
            gives them back where no rank has weight, since the mean of nothing is 0. `unit` is a power of two with which
            sums of weight * gradient fit float16, which `mean` multiplies in before it sums. The state of parameters lies in
            dicts keyed by their paths, inside tuples, NamedTuples, lists and dicts.
        scope: What `update` may be given: "element" one flat buffer instead of a tree, with zeros
            between the leaves; "leaf" any subset of the leaves, the empty one included; "message" one
            flat buffer whose layout matters; "tree" only the whole tree.
        sums: For a transform that reduces and carries the lane: `state -> MeanState`, the sums that
            the last message brought. None if it does not carry the lane.
        reduction: Of a transform that does nothing but reduce, over what; None for all others.
        vmappable: Whether `update` runs under the simulator's vmap engine.
        wired: Whether `update` sends floats in the form that `extra["wire"]`, a `Codec`, gives them; see `compress`.
        loses: For a transform that does not send all of a gradient: `params -> paths` of those of which it does not, and of
            which it keeps the rest in `extra["memory"]`; see `error_feedback`. None: nothing is lost, or what its parts lose.
        named: Whether `update` looks at paths, or at shapes of leaves although its scope is "message", so that no flat buffer
            may stand for leaves. It is True of itself where a part of a transform of scope "message" has scope "leaf".
        plain: Whether `update` is one psum of weight * gradient, weight and lane, and the division that `reduction` says; its
            state is a `MeanState`. A step then sums buckets in place, and leaves the division to the optimizer's kernel.
        encodes: Whether something that `update` sends is encoded.
        pauses: Whether `update` may return None for the gradients. What is held has these three as its parts do, but for `plain`.
        phases: For a transform that sends one thing in some steps and another in others: what it does when; `explain` shows them.
        spec: The transform as data; `factory` fills it in.

    >>> import torch
    >>> double = Transform(lambda params: (), lambda g, s, params=None, **extra: (g * 2, s), scope="element")
    >>> double.update(torch.tensor(1.5), ())
    (tensor(3.), ())
    """

    init: Callable[[Tree], State]
    update: Callable[..., tuple[Tree, State]]
    scope: Scope = "tree"
    sums: Callable[[State], Any] | None = None
    reduction: Reduction | None = None
    vmappable: bool = True
    wired: bool = False
    loses: Callable[[Tree], Collection[str]] | None = None
    named: bool = False
    plain: bool = False
    encodes: bool = False
    pauses: bool = False
    phases: tuple[Phase, ...] = ()
    spec: Spec = Spec("")

    def __post_init__(self) -> None:
        if self.scope not in ("element", "leaf", "message", "tree"):
            raise ValueError(f"scope must be 'element', 'leaf', 'message' or 'tree', got {self.scope!r}")
        for what in ("wired", "named", "encodes", "pauses"):
            if any(getattr(child, what, False) for child in self.spec.children):
                object.__setattr__(self, what, True)
        if self.scope == "message" and any(getattr(child, "scope", None) == "leaf" for child in self.spec.children):
            object.__setattr__(self, "named", True)
        of_parts = [child.loses for child in self.spec.children if getattr(child, "loses", None)]
        if of_parts and self.loses is None:
            losing = [loses for loses in of_parts if loses is not keeps_all]
            union = lambda params: set[str]().union(*(loses(params) for loses in losing))  # noqa: E731
            object.__setattr__(self, "loses", union if losing else keeps_all)
        if not self.vmappable or not all(getattr(child, "vmappable", True) for child in self.spec.children):
            object.__setattr__(self, "vmappable", False)
            object.__setattr__(self, "update", _refuse_vmap(self.update, self))

    def with_spec(self, spec: Spec) -> Transform:
        return replace(self, spec=spec)

    @property
    def _spec(self) -> Spec:
        return self.spec if self.spec.name else spec_of_function(self.update)


def sums_of_inner(transform: Transform, *own: str) -> Callable[[State], Any] | None:
    """The `sums` of a transform whose state has in `inner` that of another, which does what is to be summed.

    Args:
        own: Names in the lane that it has put there itself, which are nobody else's business.
    """
    sums = transform.sums

    def of_inner(state: State) -> Any:
        assert sums is not None
        found = sums(state.inner)
        return found._replace(lane={name: value for name, value in found.lane.items() if name not in own})

    return None if sums is None else of_inner


def takes_donated(update: U) -> U:
    """Mark an `update` that may be told `donated=True`: its caller needs the gradients no more, no two of which share memory,
    so that what is returned may be written there.

    The function is marked, and not the `Transform`: another `update` put in its place has promised nothing.
    """
    update.takes_donated = True  # type: ignore[attr-defined]
    return update


def lend(to: Transform, donated: bool = True) -> dict[str, bool]:
    """What to tell the `update` of a transform where the gradients that it is given are `donated`."""
    return {"donated": True} if donated and hasattr(to.update, "takes_donated") else {}


def keeps_all(params: Tree) -> Collection[str]:
    """The `loses` of a transform that feeds back itself what is lost inside it."""
    del params
    return ()


def _refuse_vmap(update: Callable[..., Any], owner: Transform) -> Callable[..., Any]:
    update = getattr(update, "_allows_vmap", update)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        if under_vmap():
            raise NotVmappable(f"{owner!r} does not run under the vmap engine; use simulate(..., engine='lockstep')")
        return update(*args, **kwargs)

    guarded._allows_vmap = update  # type: ignore[attr-defined]
    return guarded


@dataclass(frozen=True, eq=False, repr=False)
class Optimizer(_Specified):
    """An optimizer in step_param style: what it does to one parameter, pure and in place.

    Args:
        init_param: `param -> state`, a NamedTuple of tensors, of None and of such NamedTuples: each tensor has
            the parameter's shape or is 0-d. `state.step`, float32, 0-d, counts the steps taken.
        step_param: `(param, grad, state) -> (param, state)`, pure, in differentiable and vmappable
            operations.
        step_param_: `(param, grad, state, *, grad_scale=None, found_inf=None) -> None`, the same in
            place on `param` and on the state's tensors. `grad_scale`, 0-d: divide the gradient by it
            first; `grad` is then scratch. `found_inf`, 0-d float32: change nothing where it is 1. Gradient and state are
            checked before it runs: ValueError or TypeError for another shape, dtype or device than the parameter's, and for what
            cannot be written, such as a parameter that requires grad outside `torch.no_grad`.
        step_params_: The same for lists of parameters, gradients and states, in one kernel; states
            that share 0-d fields are of one age. None: `step_param_` is called for each.
        elementwise: Whether a flat buffer of many parameters may stand for one parameter.
        select: `path -> Optimizer`, for one that is not the same everywhere (see `partition`).
        check: `params -> None`, raises where these parameters cannot be served.
        spec: The optimizer as data; `factory` fills it in.
    """

    init_param: Callable[[Tensor], State]
    step_param: Callable[[Tensor, Tensor, State], tuple[Tensor, State]]
    step_param_: Callable[..., None]
    step_params_: Callable[..., None] | None = None
    elementwise: bool = True
    select: Callable[[str], Optimizer] | None = None
    check: Callable[[Tree], Any] | None = None
    spec: Spec = Spec("")
    forms: Forms = field(init=False)

    def __post_init__(self) -> None:
        forms = Forms(self.init_param)
        object.__setattr__(self, "forms", forms)
        object.__setattr__(self, "step_param", counted(self.step_param))
        object.__setattr__(self, "step_param_", checked(forms, self.step_param_, lists=False))
        if self.step_params_ is not None:
            object.__setattr__(self, "step_params_", checked(forms, self.step_params_, lists=True))

    def with_spec(self, spec: Spec) -> Optimizer:
        return replace(self, spec=spec)

    @property
    def _spec(self) -> Spec:
        return self.spec if self.spec.name else spec_of_function(unchecked(self.step_param))

    def at(self, path: str) -> Optimizer:
        """The optimizer of the parameter at `path`."""
        return self.select(path) if self.select else self

    @functools.cached_property
    def common(self) -> tuple[bool, ...]:
        """For each field of the state, whether one value serves all elements of a flat buffer."""
        probe = self.init_param(torch.empty(3, device="meta"))
        return tuple(f is not None and f.dim() == 0 for f in fields(probe))

    @functools.cached_property
    def watched(self) -> tuple[tuple[str, Any], ...]:
        """Its hyperparameters that may turn out not to be finite while training."""
        return watched(self.spec)

    def init(self, params: Tree) -> State:
        """The states of all parameters: the tree of `params` with a state at every leaf."""
        from .optimizers._lift import init

        return init(self, params)

    def step(self, params: Tree, grads: Tree, state: State) -> tuple[Tree, State]:
        """One step of every parameter: `(params, state)`, new tensors; the arguments stay as they are.

        Raises:
            ValueError, TypeError: `grads` or `state` has not the structure, shapes, dtypes and devices that belong to `params`;
                a state's `step` is negative or not finite, where looking at it waits for no device.
        """
        from .optimizers._lift import step

        return step(self, params, grads, state)


class Skips(NamedTuple):
    """The state of a pipeline around that of another one, whose steps it leaves out where they are not finite."""

    begin: Callable[[State], Any]  # state of what it runs -> its own, which has that in the field `inner`
    settle: Callable[[Any, Tensor], Any]  # (state, fine) -> state, after a step; `fine`, 0-d bool: with effect
    scaled: bool = False  # whether it takes gradients of the loss times `state.scale`


@dataclass(frozen=True, eq=False, repr=False)
class Pipeline(_Specified):
    """Gradient transform, then optimizer, then parameter transform; made by `fuse`.

    Args:
        init: `params -> state`, the state being `PipelineState(hook, optimizer, after, step, window)`.
        step: `(params, grads, state, *, weight=None, lane=None) -> (params, state)`, pure.
        hook, optimizer, after: What it is made of; `after` may be None.
        spec: The pipeline as data.
        skips: For one that leaves out steps that are not finite, how it keeps count of them; else None.
    """

    init: Callable[[Tree], State]
    step: Callable[..., tuple[Tree, State]]
    hook: Transform
    optimizer: Optimizer
    after: Transform | None = None
    spec: Spec = Spec("")
    skips: Skips | None = None

    def with_spec(self, spec: Spec) -> Pipeline:
        return replace(self, spec=spec)


def check_transform(value: Any, where: str) -> Transform:
    """Raise TypeError unless `value` is a Transform."""
    if isinstance(value, Transform):
        return value
    if isinstance(value, Optimizer):
        hint = "an optimizer comes last: write fuse(hook, optimizer)"
    elif isinstance(value, Pipeline):
        hint = "a pipeline is complete already; put the transform into its hook"
    elif callable(value):
        hint = "did you forget to call the factory, or do you want stateless(function)?"
    else:
        hint = "make one with Transform(init, update)"
    raise TypeError(f"{where} must be a Transform, got {value!r}; {hint}")


def init_empty(params: Tree) -> State:
    """The init of a transform without state."""
    del params
    return ()
