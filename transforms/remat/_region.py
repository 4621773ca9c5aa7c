"""One call under transforms of torch.func, as a function of tensors that runs again for each derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import optree
import torch
from torch import Tensor

from .._axis_env import bind_axes, bound
from .._call_env import bind_call, bound_call
from ._messages import path_words, written_into
from ._plain import version_of
from ._pullback import is_differentiable, run_with_graph, with_values
from .record._record import Record
from .surroundings._captured import Captured, Substitute
from .surroundings._reach import Found
from .surroundings._result import Place, form_of
from .values._memory import memory_of


class Region:
    """A call as a function of a flat list of tensors: those in the arguments, those captured, and tokens of axes.

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
