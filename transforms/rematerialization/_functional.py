"""A call under transforms of torch.func: an autograd.Function that runs the function again for each derivative."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import optree
import torch
import torch.autograd.forward_ad
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd.forward_ad import _set_fwd_grad_enabled  # type: ignore[attr-defined]

from ._flat_call import FlatCall
from ._keeper import Keeper, Recording, Replaying
from ._rerun import OfOneRun, Rerun, function_modes, version_of

_functorch: Any = torch._C._functorch
_MOST = 8  # runs that look for tensors that a function uses
# Values in a result in which there are no tensors.
_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, set, frozenset)


class _Captured(Exception):
    """A function has used tensors, the argument, that a transform differentiates by and that no search had found."""


class _Swap(OfOneRun):
    """Replaces tensors by others in every function of torch, and looks for those that nobody knows.

    Args:
        of: id -> replacement.
        known: The ids of tensors that are no surprise; None where no others are looked for.
        levels: Those of the transforms around the region: tensors of others are the function's own.
    """

    def __init__(self, of: dict[int, Tensor], known: set[int] | None, levels: list[int]) -> None:
        super().__init__()
        self.of, self.known, self._levels = of, known, levels
        self.foreign: dict[int, Tensor] = {}

    def __enter__(self) -> Any:
        _THREADS.swaps.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _THREADS.swaps.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: self.swap(value) for name, value in kwargs.items()} if kwargs else {}
        return func(*map(self.swap, args), **kwargs)

    def swap(self, x: Any) -> Any:
        """What a function of torch gets instead of an argument."""
        if not isinstance(x, Tensor):
            return type(x)(map(self.swap, x)) if type(x) in (list, tuple) else x
        new = self.of.get(id(x))
        if new is None and self.known is not None and id(x) not in self.known and self._is_foreign(x):
            self.foreign[id(x)] = x
        return x if new is None else new

    def _is_foreign(self, x: Tensor) -> bool:
        """Whether a tensor is a leaf, or belongs to a transform that is not active here."""
        level = _functorch.maybe_get_level(x)
        if level > 0:
            return level in self._levels and level not in _levels()
        return not _functorch.is_functorch_wrapped_tensor(x) and x.requires_grad and x.is_leaf


class _Threads(threading.local):
    def __init__(self) -> None:
        self.swaps: list[_Swap] = []


_THREADS = _Threads()


def _levels() -> list[int]:
    return [one.level() for one in _functorch.get_interpreter_stack() or ()]


def _kinds() -> set[Any]:
    return {one.key() for one in _functorch.get_interpreter_stack() or ()}


def _as_seen(x: Tensor) -> Tensor:
    """What a tensor is in the region around this one."""
    return _THREADS.swaps[-1].of.get(id(x), x) if _THREADS.swaps else x


def is_tracked(x: Tensor) -> bool:
    """Whether a transform may differentiate, or batch, by a tensor."""
    return x.requires_grad or bool(_functorch.is_functorch_wrapped_tensor(_as_seen(x)))


def _differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class Region:
    """A call as a function of a flat list of tensors: those in the arguments, and those captured.

    Args:
        call: The call.
        captured: Tensors that a transform differentiates by, beside those that a search finds.
        rerun: What later runs find.
        keeper: Keeps results of operations; None where nothing is kept.

    Attributes:
        tensors: The list, until the first run has ended.
        result: The form of the result, once the first run has ended: its structure, and its leaves by kind and value.
    """

    def __init__(self, call: FlatCall, captured: Sequence[Tensor], rerun: Rerun, keeper: Keeper | None) -> None:
        self._call, self.rerun, self._keeper, self._levels = call, rerun, keeper, _levels()
        self._count, own = len(call.tensors), set(map(id, call.tensors))
        self._captured = [x for x in (*call.found.tensors, *captured) if id(x) not in own and is_tracked(x)]
        self.tensors = [*call.tensors, *self._captured]
        here = max(self._levels, default=-1)
        # Those of which the function sees results that require a gradient: the others belong to outer transforms.
        level = _functorch.maybe_get_level
        moves = [x.requires_grad and _differentiable(x) and level(x) == here for x in self.tensors]
        self._moving = [i for i, one in enumerate(moves) if one]
        # Many operations, and the order of random numbers, are others below a level or with a graph: the first run has
        # what later runs have. A vmap alone takes no level: torch.func would refuse writes into buffers.
        self._with_graph = bool(self._moving or keeper or _kinds() - {_functorch.TransformType.Vmap})
        self.in_plain_autograd, self._grads = not self._levels, torch.is_grad_enabled()
        self.result: list[Any] = []  # one list for all batched copies of the region

    def _run(self, tensors: Sequence[Tensor], known: set[int] | None) -> Any:
        of = dict(zip(map(id, self._captured), tensors[self._count :], strict=True))
        mode: Any = contextlib.nullcontext()
        if known is not None:
            mode = Recording.of(self._keeper)
        elif not _forward_mode():
            mode = Replaying.of(self._keeper, self._keeper.values if self._keeper else [])
        with function_modes(self.rerun.functions), _Swap(of, known, self._levels) as swap, mode:
            out = self._call.run(tensors)
        if swap.foreign:
            raise _Captured(list(swap.foreign.values()))
        return out

    def flat(self, tensors: Sequence[Tensor], known: set[int] | None = None) -> list[Tensor]:
        """Call the function; in the first run with a graph, which is gone after it.

        Args:
            tensors: In the place of `self.tensors`.
            known: In the first run, the ids of tensors that are no surprise.

        Returns:
            The tensors in its result that are no arguments, each once.

        Raises:
            _Captured: it has used other tensors.
        """
        if known is None or not self._with_graph:
            return self._flat(tensors, known)
        nothing = torch.zeros(())  # vjp takes at least one input

        def of(_: Tensor, *values: Tensor) -> tuple[Tensor, Any]:
            new = _replaced(tensors, self._moving, values)
            return nothing, tuple(self._flat(new, known | set(map(id, new))))

        inputs = [tensors[i] for i in self._moving]
        if self._levels:
            made: Any = torch.func.vjp(of, nothing, *inputs, has_aux=True)
            return list(made[2])
        with torch.enable_grad():
            return [x.detach() for x in of(nothing, *(x.detach().requires_grad_() for x in inputs))[1]]

    def _flat(self, tensors: Sequence[Tensor], known: set[int] | None) -> list[Tensor]:
        leaves, form = optree.tree_flatten(self._run(tensors, known))
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
                raise TypeError(
                    f"a function in remat under torch.func has returned a {type(x).__name__}, in which no tensors are looked for; "
                    f"return a list, or register the class as a pytree"
                )
        if known is not None:
            self.result[:] = form, leaves
        return found

    def first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run for the first time."""
        tensors = [x.detach() for x in tensors]  # without a graph a view of a leaf would pass for another leaf
        versions = list(map(version_of, tensors))
        with self.rerun.first(tensors), torch.set_grad_enabled(self._grads):
            out = [x.detach() for x in self.flat(tensors, set(map(id, tensors)))]
        if self._keeper is not None:
            self._keeper.finish(out)
        self._call.refuse_writes(tensors, versions, self.rerun)
        return out

    def again(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run again."""
        with self.rerun.again():
            return self.flat(tensors)

    def batched(self, in_dims: Sequence[int | None], randomness: str) -> Region:
        """The same function of batched tensors; results have their batches first."""
        new, inner = copy.copy(self), self.flat

        def flat(tensors: Sequence[Tensor], known: set[int] | None = None) -> list[Tensor]:
            def one(*values: Tensor) -> tuple[Tensor, ...]:
                return tuple(inner(values, known and known | set(map(id, values))))

            return list(torch.func.vmap(one, tuple(in_dims), randomness=randomness)(*tensors))

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
        ctx.mark_non_differentiable(*(x for x in output if not _differentiable(x)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        region, tensors = ctx.region, [_functorch.unwrap_if_dead(x) for x in ctx.saved_tensors]
        moving = [i for i, x in enumerate(tensors) if ctx.needs_input_grad[i + 1] and _differentiable(x)]
        used = [i for i, grad in enumerate(grads) if grad is not None]
        out: list[Any] = [None] * len(tensors)
        if used and moving:

            def of(*values: Tensor) -> tuple[Tensor, ...]:
                results = region.again(_replaced(tensors, moving, values))
                return tuple(results[i] for i in used)

            pullback = _pullback(of, [tensors[i] for i in moving], region.in_plain_autograd)
            for i, grad in zip(moving, pullback(tuple(grads[i] for i in used)), strict=True):
                out[i] = grad
        return None, *out

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        region, tensors = ctx.region, ctx.saved_tensors
        moving = [i for i, t in enumerate(tangents) if t is not None]

        def of(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(region.again(_replaced(tensors, moving, values)))

        primals, moved = [tensors[i] for i in moving], [tangents[i] for i in moving]
        with _below(primals, moved) as (primals, moved), _set_fwd_grad_enabled(True):
            return cast("tuple[Any, ...]", torch.func.jvp(of, tuple(primals), tuple(moved))[1])

    @staticmethod
    def vmap(info: Any, in_dims: Any, region: Any, *tensors: Tensor) -> tuple[Any, Any]:
        out = _Again.apply(region.batched(in_dims[1:], info.randomness), *tensors)  # type: ignore[no-untyped-call]
        return out, (0,) * len(out)


def call_transformed(call: FlatCall, make: Callable[[], tuple[Rerun, Keeper | None]]) -> Any:
    """Call a function under transforms; `make` gives new records for each attempt."""
    captured: list[Tensor] = []
    for _ in range(_MOST):
        region = Region(call, captured, *make())
        try:
            with _within(region.tensors) as tensors, function_modes(()):
                out = _Again.apply(region, *tensors)  # type: ignore[no-untyped-call]
            break
        except _Captured as more:
            region.rerun.undo()
            captured += more.args[0]
    else:
        raise RuntimeError(
            f"remat: each of {_MOST} runs of {call.fn!r} has used other tensors that require a gradient; pass them as arguments"
        )
    call.tensors, region.tensors = [], []
    of: dict[str, Any] = {"argument": tensors, "result": out}
    form, leaves = region.result
    return optree.tree_unflatten(form, [of[kind][which] if kind in of else which for kind, which in leaves])


@contextlib.contextmanager
def _within(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """A context for a region, with its tensors as the region around it has them; that does not watch what this one does."""
    if not _THREADS.swaps:
        yield tensors
        return
    outer = _THREADS.swaps[-1]
    new = list(map(outer.swap, tensors))
    known, outer.known = outer.known, None
    try:
        yield new
    finally:
        outer.known = known


def _pullback(of: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], plain: bool) -> Callable[[Any], Any]:
    """From the gradients of a function's results to those of its inputs.

    In plain autograd that is what works there, and an input that is not used has no gradient.
    """
    if not plain or torch._C._are_functorch_transforms_active():
        made: Any = torch.func.vjp(of, *inputs)
        return cast("Callable[[Any], Any]", made[1])
    higher = torch.is_grad_enabled()
    with torch.enable_grad():
        starts = [x.view_as(x) if higher and x.requires_grad else x.detach().requires_grad_() for x in inputs]
        results = of(*starts)

    def pullback(grads: Any) -> Any:
        ends = [(x, grad) for x, grad in zip(results, grads, strict=True) if x.requires_grad]
        if not ends:
            return [None] * len(starts)
        outs, given = zip(*ends, strict=True)
        return torch.autograd.grad(outs, starts, given, create_graph=higher, allow_unused=True)

    return pullback


def _replaced(tensors: Sequence[Tensor], places: Sequence[int], values: Sequence[Tensor]) -> list[Tensor]:
    new = list(tensors)
    for i, value in zip(places, values, strict=True):
        new[i] = value
    return new


def _forward_mode() -> bool:
    """Whether a forward-mode derivative is active: it mixes operations on tangents with those of the function."""
    return torch.autograd.forward_ad._current_level >= 0 or _functorch.TransformType.Jvp in _kinds()


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
