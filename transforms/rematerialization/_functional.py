"""Rematerialisation under the transforms of torch.func."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd.forward_ad import _set_fwd_grad_enabled  # type: ignore[attr-defined]

from ..axes import bind_axes, bind_call, bound, bound_call
from ._captured import Captured, Substitute, within
from ._keeper import Keeper, memory_of
from ._modes import function_modes
from ._offload import HOST, Store
from ._plain import HooksRefused, PlainRegion, path_words, refuse_iterators, version_of, written_into
from ._reach import Found, Place, captured, form_of, rebuilt
from ._rerun import Record
from .checkpoint_policies import Keep, Policy, everything_saveable, nothing_saveable


def is_differentiable(x: Tensor) -> bool:
    """Whether a tensor has a dtype that derivatives have."""
    return x.is_floating_point() or x.is_complex()


def with_values(tensors: Sequence[Tensor], places: Sequence[int], values: Sequence[Tensor]) -> list[Tensor]:
    """A list of tensors with others in some places."""
    new = list(tensors)
    for i, value in zip(places, values, strict=True):
        new[i] = value
    return new


def with_graph(
    of: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], functional: bool
) -> tuple[tuple[Tensor, ...], Callable[[Sequence[Tensor]], Sequence[Tensor | None]]]:
    """The results of a function and its pullback, from the gradients of the results to those of the inputs.

    Args:
        of: The function.
        inputs: Its arguments.
        functional: Whether torch.func makes the graph, as for calls under its transforms. In one of plain autograd
            everything works that works there.
    """
    if functional or torch._C._are_functorch_transforms_active():
        made: Any = torch.func.vjp(of, *inputs)
        out, vjp = made
        return out, lambda grads: vjp(tuple(grads))
    higher = torch.is_grad_enabled()
    with torch.enable_grad():
        starts = [x.view_as(x) if higher and x.requires_grad else x.detach().requires_grad_() for x in inputs]
        results = of(*starts)

    def pullback(grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
        ends = [(x, grad) for x, grad in zip(results, grads, strict=True) if x.requires_grad]
        if not ends:
            return [None] * len(starts)
        outs, given = zip(*ends, strict=True)
        return torch.autograd.grad(outs, starts, given, create_graph=higher, allow_unused=True)

    return results, pullback


def run_with_graph(
    of: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], functional: bool
) -> tuple[Tensor, ...]:
    """The results of a function that runs as in `with_graph`; the graph is gone then. They may be of any dtype."""
    if not functional:
        return tuple(x.detach() for x in with_graph(of, inputs, False)[0])
    nothing = torch.zeros(())  # vjp takes at least one input
    made: Any = torch.func.vjp(lambda _, *values: (nothing, of(*values)), nothing, *inputs, has_aux=True)
    return tuple(made[2])


class Region:
    """A call as a function of a flat list of tensors: those in the arguments and those captured.

    Args:
        fn: The function.
        args, kwargs: Its arguments.
        found: The tensors that it can reach.
        record: What the first run leaves for later runs.

    Attributes:
        record: What the first run leaves for later runs.
        tensors: The list, until the first run has ended.
        levels: Those of the transforms around the call.
    """

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any, found: Found, record: Record) -> None:
        given_tree: Any = (args, kwargs)
        leaves, self._form = optree.tree_flatten(given_tree, none_is_leaf=True)
        self._fn, self.record = fn, record
        self._static = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        given = [leaves[i] for i in self._places]
        self._captured = [x for x in found.tracked.values() if all(x is not g for g in given)]
        self._state = {memory_of(x): x for x in found.state.values() if all(x is not g for g in given)}
        self._same = found.state
        self._grads = torch.is_grad_enabled()
        self._axes, self._call = bound(), bound_call()
        self.tensors: list[Tensor] = [*given, *self._captured]
        self.levels = [level.level() for level in torch._C._functorch.get_interpreter_stack() or ()]
        self._moves = [x.requires_grad for x in self.tensors]
        # Those of which the function sees results that require a gradient: the others belong to outer transforms.
        here = max(self.levels, default=-1)
        of = torch._C._functorch.maybe_get_level
        self._seen = [
            i for i, x in enumerate(self.tensors) if self._moves[i] and is_differentiable(x) and of(x) == here
        ]
        # Many operations, and the order of random numbers, are others below a level or with a graph: the first run has
        # what later runs have. A vmap alone takes no level: torch.func would refuse writes into buffers.
        levels = torch._C._functorch.get_interpreter_stack() or ()
        leveled = record.keeper is not None or any(
            one.key() != torch._C._functorch.TransformType.Vmap for one in levels
        )
        self._with_graph = leveled if self.levels else bool(self._seen)
        self.arguments = len(given)  # the number of tensors in the arguments

    def run(self, tensors: Sequence[Tensor], watch: set[int] | None = None) -> Any:
        """Call the function.

        Args:
            tensors: In the place of `self.tensors`.
            watch: The ids of tracked tensors that are no surprise; None where nobody looks for others.

        Returns:
            Its result, a pytree.

        Raises:
            Captured: it has used other tracked tensors.
        """
        values = list(self._static)
        for i, x in zip(self._places, tensors, strict=False):
            values[i] = x
        args, kwargs = cast("tuple[Any, Any]", optree.tree_unflatten(self._form, values))
        end = self.arguments + len(self._captured)
        of = {
            id(old): new
            for old, new in zip(self._captured, tensors[self.arguments : end], strict=True)
            if old is not new
        }
        of.update(self.record.stand_ins)
        moves = dict(zip(map(id, tensors), self._moves, strict=False))
        mode = Substitute(of, dict(self._state), self.record.before, watch, moves=moves, levels=self.levels)
        with bind_axes(self._axes), bind_call(self._call):
            out = self.record.call(self._fn, args, kwargs, mode)
        if mode.foreign:
            raise Captured(list(mode.foreign.values()))
        return out

    def flat(self, tensors: Sequence[Tensor], watch: set[int] | None = None) -> list[Tensor]:
        """Call the function: the tensors in its result that are no arguments, each once."""
        if watch is None or not self._with_graph:
            return self._flat(tensors, watch)
        seen = self._seen

        def of(*values: Tensor) -> tuple[Tensor, ...]:
            new = with_values(tensors, seen, values)
            return tuple(self._flat(new, watch | set(map(id, new))))

        return list(run_with_graph(of, [tensors[i] for i in seen], bool(self.levels)))

    def _flat(self, tensors: Sequence[Tensor], watch: set[int] | None) -> list[Tensor]:
        out = self.run(tensors, watch)
        places = {id(x): Place("argument", i) for i, x in enumerate(self._captured, self.arguments)}
        places |= {id(x): Place("argument", i) for i, x in enumerate(tensors)}
        same = self._same.keys() | set(map(id, self.record.stand_ins.values()))
        found: list[Tensor] = []

        def place(x: Tensor) -> Any:
            if id(x) in same:  # a buffer, which stays what it is
                return x
            if id(x) not in places:
                places[id(x)] = Place("result", len(found))
                found.append(x)
            return places[id(x)]

        form = form_of(out, place)
        if watch is not None:
            self.record.result = form
        return found

    def first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run for the first time; the graph of the run, if any, is gone after it."""
        # Without a graph a view of a leaf would pass for another leaf.
        tensors = [x.detach() for x in tensors]
        versions = [version_of(x) for x in tensors[: self.arguments]]
        with self.record.first(tensors), torch.set_grad_enabled(self._grads):
            # Not the tensors themselves, which would get the graph of the region.
            out = [x.detach() for x in self.flat(tensors, watch=set(map(id, tensors)))]
        if self.record.keeper is not None:
            self.record.keeper.finish()
            self.record.keeper.settle(out)
        for i, (x, before) in enumerate(zip(tensors, versions, strict=False)):
            if version_of(x) != before:
                raise written_into(self._path(i))
        return out

    def again(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run again, with the random numbers, autocast and buffers of the first time."""
        with self.record.again():
            return self.flat(tensors)

    def _path(self, i: int) -> str:
        return path_words(optree.treespec_paths(self._form)[self._places[i]])

    def batched(self, in_dims: Sequence[int | None], randomness: str) -> Batched:
        """The same function of batched tensors."""
        return Batched(self, in_dims, randomness)


class Batched:
    """A region inside a torch.func.vmap."""

    def __init__(self, inner: Any, in_dims: Sequence[int | None], randomness: str) -> None:
        self._inner, self._in_dims, self._randomness = inner, tuple(in_dims), randomness
        self.record: Record = inner.record
        self.arguments: int = inner.arguments
        self._grads: bool = inner._grads
        self.levels: list[int] = inner.levels

    def flat(self, tensors: Sequence[Tensor], watch: set[int] | None = None) -> list[Tensor]:
        """See `Region.flat`; results have their batches first."""

        def one(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(self._inner.flat(values, watch and watch | set(map(id, values))))

        return list(torch.func.vmap(one, self._in_dims, randomness=self._randomness)(*tensors))

    def first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `Region.first`."""
        return Region.first(self, tensors)  # type: ignore[arg-type]

    def again(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `Region.again`."""
        return Region.again(self, tensors)  # type: ignore[arg-type]

    def _path(self, i: int) -> str:
        return str(self._inner._path(i))

    def batched(self, in_dims: Sequence[int | None], randomness: str) -> Batched:
        return Batched(self, in_dims, randomness)


_MOST = 8  # runs that look for tensors that a function uses


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
        ctx.mark_non_differentiable(*(x for x in output if not (x.is_floating_point() or x.is_complex())))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        region, tensors = ctx.region, [torch._C._functorch.unwrap_if_dead(x) for x in ctx.saved_tensors]
        moving = [i for i, x in enumerate(tensors) if ctx.needs_input_grad[i + 1] and is_differentiable(x)]
        used = [i for i, grad in enumerate(grads) if grad is not None]
        out: list[Any] = [None] * len(tensors)
        if used and moving:

            def of(*values: Tensor) -> tuple[Tensor, ...]:
                results = region.again(with_values(tensors, moving, values))
                return tuple(results[i] for i in used)

            pullback = with_graph(of, [tensors[i] for i in moving], bool(region.levels))[1]
            for i, grad in zip(moving, pullback([grads[i] for i in used]), strict=True):  # type: ignore[misc]
                out[i] = grad
        return None, *out

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        region, tensors = ctx.region, ctx.saved_tensors
        moving = [i for i, t in enumerate(tangents) if t is not None]

        def of(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(region.again(with_values(tensors, moving, values)))

        primals, moved = [tensors[i] for i in moving], [tangents[i] for i in moving]
        with _below(primals, moved) as (primals, moved), _set_fwd_grad_enabled(True):
            return cast("tuple[Any, ...]", torch.func.jvp(of, tuple(primals), tuple(moved))[1])

    @staticmethod
    def vmap(info: Any, in_dims: Any, region: Any, *tensors: Tensor) -> tuple[Any, Any]:
        out = _Again.apply(region.batched(in_dims[1:], info.randomness), *tensors)  # type: ignore[no-untyped-call]
        return out, (0,) * len(out)


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
        yield [[torch._C._functorch._unwrap_for_grad(x, level) for x in group] for group in groups]


class How(NamedTuple):
    """How a function is to run.

    policy: Which results to keep.
    store: Where they wait, and the arguments with them; None for the device.
    preserve_rng_state: Whether a later run has the random numbers of the first.
    early_stop: Whether a later run in plain autograd ends once it has what gradients use.
    """

    policy: Policy
    store: Store | None
    preserve_rng_state: bool
    early_stop: bool = True

    def keeper(self) -> Keeper | None:
        """What keeps results in one call."""
        if self.policy is nothing_saveable:
            return None
        if self.store is None:
            return Keeper(self.policy, Keep.SAVE, HOST)
        return Keeper(self.policy, Keep.OFFLOAD, self.store)


def call(fn: Callable[..., Any], how: How, args: Any, kwargs: Any) -> Any:
    """Call a function so that its backward pass runs it again."""
    if how.policy is everything_saveable and how.store is None:
        return fn(*args, **kwargs)
    refuse_iterators(args, kwargs)
    if torch._C._are_functorch_transforms_active():
        return _call_transformed(fn, how, args, kwargs)
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    found = captured(fn, args, kwargs)
    record = Record(how.preserve_rng_state, found.places, how.keeper())
    try:
        return PlainRegion(fn, args, kwargs, found, record, how.store, how.early_stop).first(args, kwargs)
    except HooksRefused:
        return _call_transformed(fn, how, args, kwargs)


def _call_transformed(fn: Callable[..., Any], how: How, args: Any, kwargs: Any) -> Any:
    found = captured(fn, args, kwargs)
    for _ in range(_MOST):
        record = Record(how.preserve_rng_state, found.places, how.keeper(), uncached=True)
        region = Region(fn, args, kwargs, found, record)
        try:
            with within(region.tensors) as tensors, function_modes(()):
                out = _Again.apply(region, *tensors)  # type: ignore[no-untyped-call]
            break
        except Captured as more:
            record.undo()
            found.tracked.update({id(x): x for x in more.found})
    else:
        raise RuntimeError(
            f"remat: each of {_MOST} runs of {fn!r} has used other tensors that require a gradient; pass them as arguments"
        )
    region.tensors = []
    of = {"argument": tensors, "result": out}
    return rebuilt(record.result, lambda place: of[place.kind][place.number])
