"""A call under transforms of torch.func: an autograd.Function that runs the function again for each derivative."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any, cast

import optree
import torch
import torch.autograd.forward_ad
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd.forward_ad import _set_fwd_grad_enabled  # type: ignore[attr-defined]
from torch.overrides import _get_current_function_mode_stack

from ._flat_call import FlatCall
from ._keeper import Keeper, Recording, Replaying
from ._rerun import OfOneRun, Rerun, function_modes, version_of

_functorch: Any = torch._C._functorch
# Values in a result in which there are no tensors.
_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, set, frozenset)


class _Swap(OfOneRun):
    """Replaces tensors by others in every function of torch, and refuses those that nobody knows.

    Args:
        of: id -> replacement.
        known: The ids of the arguments; None if no others are looked for.
        levels: Those of the transforms around the region: tensors of others are the function's own.
    """

    def __init__(self, of: dict[int, Tensor], known: set[int] | None, levels: list[int]) -> None:
        super().__init__()
        self.of, self.known, self._levels = of, known, levels
        self.used: set[int] = set()  # the ids of tensors that have been replaced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: self.swap(value) for name, value in kwargs.items()} if kwargs else {}
        return func(*map(self.swap, args), **kwargs)

    def swap(self, x: Any) -> Any:
        """What a function of torch gets instead of an argument."""
        if not isinstance(x, Tensor):
            return type(x)(map(self.swap, x)) if type(x) in (list, tuple) else x
        new = self.of.get(id(x))
        if new is not None:
            self.used.add(id(x))
        elif self.known is not None and id(x) not in self.known and self._is_foreign(x):
            what = f"a tensor of shape {tuple(x.shape)} that requires a gradient and is not reached from it"
            raise RuntimeError(f"a function in remat under torch.func uses {what}; pass it as an argument")
        return x if new is None else new

    def _is_foreign(self, x: Tensor) -> bool:
        """Whether a tensor is a leaf, or belongs to a transform that is not active here."""
        level = _functorch.maybe_get_level(x)
        if level > 0:
            return level in self._levels and level not in _levels()
        return not _functorch.is_functorch_wrapped_tensor(x) and x.requires_grad and x.is_leaf


def _levels() -> list[int]:
    return [one.level() for one in _functorch.get_interpreter_stack() or ()]


def _seen(x: Tensor, around: _Swap | None) -> Tensor:
    """What a tensor is in the region around this one."""
    return x if around is None else around.of.get(id(x), x)


def _differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class Region:
    """A call as a function of a flat list of tensors: those in the arguments, and those captured.

    Args:
        call: The call.
        around: The mode of the region around this one.
        rerun: What later runs find.
        keeper: Keeps results of operations; None if nothing is kept.

    Attributes:
        tensors: The list, until the first run has ended.
        result: The form of the result, once the first run has ended: its structure, and its leaves by kind and value.
    """

    def __init__(self, call: FlatCall, around: _Swap | None, rerun: Rerun, keeper: Keeper | None) -> None:
        self._call, self.rerun, self._keeper, self._levels = call, rerun, keeper, _levels()
        self._count, own = len(call.tensors), set(map(id, call.tensors))
        # Those by which a transform may differentiate, or batch.
        reached = [x for x in call.found.tensors if id(x) not in own]
        wrapped = _functorch.is_functorch_wrapped_tensor
        self._captured = [x for x in reached if x.requires_grad or wrapped(_seen(x, around))]
        self.tensors = [*call.tensors, *self._captured]
        here = max(self._levels, default=-1)
        # Those of which the function sees results that require a gradient: the others belong to outer transforms.
        level = _functorch.maybe_get_level
        moves = [x.requires_grad and _differentiable(x) and level(x) == here for x in self.tensors]
        self._moving = [i for i, one in enumerate(moves) if one]
        self._grads = torch.is_grad_enabled()
        # One object for all batched copies of the region.
        self.result: list[Any] = []
        self._used: set[int] = set()

    def uses(self, i: int) -> bool:
        """Whether a tensor of the list is an argument, or captured and used: others have no gradient."""
        return i < self._count or id(self._captured[i - self._count]) in self._used

    def flat(self, tensors: Sequence[Tensor], first: bool = False) -> list[Tensor]:
        """Call the function; in the first run with a graph, which is gone after it, and a level of torch.func.

        Many operations, and the order of random numbers, are others below a level: the first run has what later runs
        have.

        Args:
            tensors: In the place of `self.tensors`.
            first: Whether this is the first run.

        Returns:
            The tensors in its result that are no arguments, each once.

        Raises:
            RuntimeError: it uses other tensors, by which a transform differentiates.
        """
        if not first:
            return self._flat(tensors, first)
        nothing = torch.zeros(())  # vjp takes at least one input

        def of(_: Tensor, *values: Tensor) -> tuple[Tensor, Any]:
            return nothing, tuple(self._flat(_replaced(tensors, self._moving, values), first))

        made: Any = torch.func.vjp(of, nothing, *(tensors[i] for i in self._moving), has_aux=True)
        return list(made[2])

    def _flat(self, tensors: Sequence[Tensor], first: bool) -> list[Tensor]:
        of = dict(zip(map(id, self._captured), tensors[self._count :], strict=True))
        mode: Any = contextlib.nullcontext()
        if first:
            mode = Recording.of(self._keeper)
        elif not _forward_mode():
            mode = Replaying.of(self._keeper, self._keeper.values if self._keeper else [])
        known = set(map(id, tensors)) if first else None
        with function_modes(self.rerun.functions), _Swap(of, known, self._levels) as swap, mode:
            out = self._call.run(tensors)
        self._used |= swap.used
        leaves, form = optree.tree_flatten(out)
        places = {id(x): ("argument", self._count + i) for i, x in enumerate(self._captured)}
        places |= {id(x): ("argument", i) for i, x in enumerate(tensors)}
        found: list[Tensor] = []
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor):
                if id(x) not in places:
                    places[id(x)] = "result", len(found)
                    found.append(x)
                leaves[i] = places[id(x)]
            elif isinstance(x, _VALUES):
                leaves[i] = "value", x
            else:
                what = f"a {type(x).__name__}, in which no tensors are looked for"
                remedy = "return a list, or register the class as a pytree"
                raise TypeError(f"a function in remat under torch.func has returned {what}; {remedy}")
        if first:
            self.result[:] = form, leaves
        return found

    def first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run for the first time."""
        tensors = [x.detach() for x in tensors]  # without a graph a view of a leaf would pass for another leaf
        versions = list(map(version_of, tensors))
        with self.rerun.first(tensors), torch.set_grad_enabled(self._grads):
            out = [x.detach() for x in self.flat(tensors, True)]
        if self._keeper is not None:
            self._keeper.finish(out)
        self._call.refuse_writes(tensors, versions, self.rerun)
        return out

    def batched(self, in_dims: Sequence[int | None], randomness: str) -> Region:
        """The same function of batched tensors; results have their batches first."""
        new, inner = copy.copy(self), self.flat

        def flat(tensors: Sequence[Tensor], first: bool = False) -> list[Tensor]:
            one = torch.func.vmap(lambda *values: tuple(inner(values, first)), tuple(in_dims), randomness=randomness)
            return list(one(*tensors))

        new.flat = flat  # type: ignore[method-assign]
        return new


class _Again(torch.autograd.Function):
    """Runs a region, and again for each derivative."""

    @staticmethod
    def forward(region: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(region.first(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.region, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        region, tensors = ctx.region, [_functorch.unwrap_if_dead(x) for x in ctx.saved_tensors]
        needed = [i for i, needs in enumerate(ctx.needs_input_grad[1:]) if needs and region.uses(i)]
        moving = [i for i in needed if _differentiable(tensors[i])]
        used = [i for i, grad in enumerate(grads) if grad is not None]
        out: list[Any] = [None] * len(tensors)
        if used and moving:

            def of(*values: Tensor) -> tuple[Tensor, ...]:
                results = region.flat(_replaced(tensors, moving, values))
                return tuple(results[i] for i in used)

            with region.rerun.again():
                made: Any = torch.func.vjp(of, *(tensors[i] for i in moving))
            out = _replaced(out, moving, made[1](tuple(grads[i] for i in used)))
        return None, *out

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        region, tensors = ctx.region, ctx.saved_tensors
        moving = [i for i, t in enumerate(tangents) if t is not None]

        def of(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(region.flat(_replaced(tensors, moving, values)))

        primals, moved = [tensors[i] for i in moving], [tangents[i] for i in moving]
        with region.rerun.again(), _below(primals, moved) as (primals, moved), _set_fwd_grad_enabled(True):
            return cast("tuple[Any, ...]", torch.func.jvp(of, tuple(primals), tuple(moved))[1])

    @staticmethod
    def vmap(info: Any, in_dims: Any, region: Any, *tensors: Tensor) -> tuple[Any, Any]:
        out = _Again.apply(region.batched(in_dims[1:], info.randomness), *tensors)  # type: ignore[no-untyped-call]
        return out, (0,) * len(out)


def call_transformed(call: FlatCall, rerun: Rerun, keeper: Keeper | None) -> Any:
    """Call a function under transforms."""
    modes = reversed(_get_current_function_mode_stack())
    around = next((mode for mode in modes if isinstance(mode, _Swap)), None)
    with function_modes(()):  # the mode around this region does not take it for a part of its function
        region = Region(call, around, rerun, keeper)
        tensors = [_seen(x, around) for x in region.tensors]
        out = _Again.apply(region, *tensors)  # type: ignore[no-untyped-call]
    if around is not None:
        for i, x in enumerate(region.tensors):
            if region.uses(i):
                around.swap(x)
    call.tensors, region.tensors = [], []
    of: dict[str, Any] = {"argument": tensors, "result": out}
    form, leaves = region.result
    return optree.tree_unflatten(form, [of[kind][which] if kind in of else which for kind, which in leaves])


def _replaced(values: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    new = list(values)
    for i, other in zip(places, others, strict=True):
        new[i] = other
    return new


def _forward_mode() -> bool:
    """Whether a forward-mode derivative is active: it mixes operations on tangents with those of the function."""
    kinds = [one.key() for one in _functorch.get_interpreter_stack() or ()]
    return torch.autograd.forward_ad._current_level >= 0 or _functorch.TransformType.Jvp in kinds


@contextlib.contextmanager
def _below(*groups: list[Any]) -> Iterator[Any]:
    """A context in which the innermost transform is inactive, with the values that tensors have there.

    A forward-mode derivative within a forward-mode derivative needs it: each level may have one tangent.
    """
    if not torch._C._are_functorch_transforms_active():
        yield groups
        return
    inner = retrieve_current_functorch_interpreter()
    level = inner.level()
    with inner.lower():
        yield [[_functorch._unwrap_for_grad(x, level) for x in group] for group in groups]
