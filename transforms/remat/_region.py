"""One call under transforms of torch.func, as a function of tensors that runs again for each derivative."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import optree
import torch
from torch import Tensor

from .._axis_env import bind_axes, bind_weight, bound, current_weight
from ._captured import Captured, Found, Substitute
from ._kept import memory_of
from ._plain import check_result, path_words, written_into
from ._record import Record


class Region:
    """A call as a function of a flat list of tensors: those in the arguments, those captured, and tokens of axes.

    Attributes:
        record: What the first run leaves for later runs.
        tensors: The list, until the first run has ended.
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
        self._slots = found.slots
        self._axes, self._weight = bound(), current_weight()
        self._tokens = [name for name, axis in self._axes.items() if axis.token is not None]
        tokens = [self._axes[name].token for name in self._tokens]
        self.tensors: list[Tensor] = [*given, *self._captured, *tokens]  # type: ignore[list-item]
        self._moving = [i for i, x in enumerate(self.tensors) if x.is_floating_point() or x.is_complex()]
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
        for held, name, old, _ in self._slots:  # after a functional_call a module has its own parameters again
            now = held.get(name)
            if now is not None and now is not old:
                of[id(now)] = of.get(id(old), old)
        axes = dict(self._axes)
        for name, token in zip(self._tokens, tensors[end:], strict=True):
            axes[name] = copy.copy(axes[name])
            axes[name].token = token
        mode = Substitute(of, dict(self._state), self.record.before, watch)
        with bind_axes(axes), bind_weight(self._weight), mode:
            out = self._fn(*args, **kwargs)
        if mode.foreign:
            raise Captured(list(mode.foreign.values()))
        return out

    def flat(self, tensors: Sequence[Tensor], watch: set[int] | None = None) -> list[Tensor]:
        """Call the function: the tensors in its result that are no arguments, each once."""
        if watch is None or self.record.keeper is None:
            return self._flat(tensors, watch)
        # Some operations are made of others than without a graph, so a run that records has one, as later runs have.
        moving = self._moving
        nothing = torch.zeros(())  # made here: the function's own operations are counted

        def tracked(*values: Tensor) -> Any:
            new = list(tensors)
            for i, value in zip(moving, values, strict=True):
                new[i] = value
            return nothing, tuple(self._flat(new, watch | set(map(id, new))))

        *_, out = torch.func.vjp(tracked, *(tensors[i].detach() for i in moving), has_aux=True)
        return list(cast("tuple[Tensor, ...]", out))

    def _flat(self, tensors: Sequence[Tensor], watch: set[int] | None) -> list[Tensor]:
        out = self.run(tensors, watch)
        leaves, form = optree.tree_flatten(out)
        known: dict[int, Any] = {id(x): ("argument", i) for i, x in enumerate(tensors)}
        found: list[Tensor] = []
        places = []
        for leaf in leaves:
            check_result(leaf)
            if id(leaf) not in known:
                known[id(leaf)] = ("result", len(found))
                found.append(leaf)
            places.append(known[id(leaf)])
        self.record.result = form, places
        return found

    def first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run for the first time, without a graph."""
        # Without a graph a view of a leaf would pass for another leaf.
        tensors = [x.detach() for x in tensors]
        versions = [_version(x) for x in tensors[: self.arguments]]
        with self.record.first(tensors):
            out = self.flat(tensors, watch=set(map(id, tensors)))
        if self.record.keeper is not None:
            self.record.keeper.finish()
            self.record.keeper.settle(out)
        for i, (x, before) in enumerate(zip(tensors, versions, strict=False)):
            if _version(x) != before:
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


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
