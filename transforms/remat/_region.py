"""One call of a function that runs again in the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import optree
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._axis_env import bind_axes, bind_weight, bound, current_weight
from ._captured import Captured, Found, Substitute
from ._graph import is_known
from ._offload import Store
from ._record import Record
from ._shelf import Shelf, give, take


class Region:
    """A call as a function of a flat list of tensors: those in the arguments, those captured, and tokens of axes.

    Attributes:
        record: What the first run leaves for later runs.
        plain: Whether the call is under no torch.func transform.
        shelves: Where arguments wait that are not kept by the graph, by position.
    """

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any, found: Found, record: Record) -> None:
        given_tree: Any = (args, kwargs)
        leaves, self._form = optree.tree_flatten(given_tree, none_is_leaf=True)
        for leaf, path in zip(leaves, optree.treespec_paths(self._form), strict=True):
            if isinstance(leaf, Iterator):
                raise TypeError(
                    f"remat: argument {path_words(path)} is an iterator, of which nothing is left when the function runs again; pass a list"
                )
        self._fn, self.record = fn, record
        self._static = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        given = [leaves[i] for i in self._places]
        self._captured = [x for x in found.tracked.values() if all(x is not g for g in given)]
        self._state = {i: x for i, x in found.state.items() if all(x is not g for g in given)}
        self._slots = found.slots
        self.plain = not torch._C._are_functorch_transforms_active()
        self.shelves: dict[int, Shelf] = {}
        self._axes, self._weight = bound(), current_weight()
        self._tokens = [name for name, axis in self._axes.items() if axis.token is not None]
        tokens = [self._axes[name].token for name in self._tokens]
        self.tensors: list[Tensor] = [*given, *self._captured, *tokens]  # type: ignore[list-item]
        self.arguments = len(given)  # the number of tensors in the arguments

    def shelve(self, tensors: Sequence[Tensor], store: Store) -> list[Tensor]:
        """Let the arguments that are results of other operations wait in a store; returns what is left of them."""
        self.shelves = {
            i: Shelf(store) for i, x in enumerate(tensors[: self.arguments]) if _is_float(x) and _is_activation(x)
        }
        return [give(self.shelves[i], x) if i in self.shelves else x for i, x in enumerate(tensors)]

    def taken(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, those included that wait elsewhere."""
        return [take(self.shelves[i], x) if i in self.shelves else x for i, x in enumerate(tensors)]

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
        keeper = self.record.keeper
        moving = [i for i, x in enumerate(self.tensors) if x.requires_grad or not self.plain and _is_float(x)]

        def tracked(*values: Tensor) -> Any:
            new = list(tensors)
            for i, value in zip(moving, values, strict=True):
                new[i] = value
            return torch.zeros(()), tuple(self._flat(new, watch | set(map(id, new))))

        if self.plain:
            with torch.enable_grad(), saved_tensors_hooks(keeper.uses, _unused):
                out = tracked(*(tensors[i].detach().requires_grad_() for i in moving))[1]
            keeper.graph_known = is_known(out)
            return [x.detach() for x in out]
        *_, out = torch.func.vjp(tracked, *(tensors[i].detach() for i in moving), has_aux=True)
        return list(cast("tuple[Tensor, ...]", out))

    def _flat(self, tensors: Sequence[Tensor], watch: set[int] | None) -> list[Tensor]:
        out = self.run(tensors, watch)
        leaves, form = optree.tree_flatten(out)
        known: dict[int, Any] = {id(x): ("argument", i) for i, x in enumerate(tensors)}
        found: list[Tensor] = []
        places = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"a function in remat must return tensors, got {type(leaf).__name__} in its result; return other values "
                    f"outside of it"
                )
            if id(leaf) not in known:
                known[id(leaf)] = ("result", len(found))
                found.append(leaf)
            places.append(known[id(leaf)])
        self.record.result = form, places
        return found

    def first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run for the first time, without a graph."""
        # Without a graph a view of a leaf would pass for another leaf.
        tensors = [x.detach() for x in self.taken(tensors)]
        versions = [_version(x) for x in tensors[: self.arguments]]
        with self.record.first(tensors):
            out = self.flat(tensors, watch=set(map(id, tensors)))
        if self.record.keeper is not None:
            self.record.keeper.settle(out)
        for shelf in self.shelves.values():
            shelf.settle()
        for i, (x, before) in enumerate(zip(tensors, versions, strict=False)):
            if _version(x) != before:
                raise ValueError(
                    f"a function in remat has written into its argument {self._path(i)}, and would do so again in the backward "
                    f"pass; write into a copy, and return it"
                )
        return out

    def again(self, tensors: Sequence[Tensor], whole: bool = True) -> list[Tensor]:
        """Run again, with the random numbers, autocast and buffers of the first time; for `whole` see `Record.again`."""
        tensors = self.taken(tensors)
        with self.record.again(whole) as mode:
            out = self.flat(tensors)
        if whole or mode is None or mode.finish(out):
            return out
        with self.record.again(whole=True):  # the function has stored what was left out
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
        self.shelves: dict[int, Shelf] = inner.shelves
        self.plain = False

    def flat(self, tensors: Sequence[Tensor], watch: set[int] | None = None) -> list[Tensor]:
        """See `Region.flat`; results have their batches first."""

        def one(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(self._inner.flat(values, watch and watch | set(map(id, values))))

        return list(torch.func.vmap(one, self._in_dims, randomness=self._randomness)(*tensors))

    def first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `Region.first`."""
        return Region.first(self, tensors)  # type: ignore[arg-type]

    def again(self, tensors: Sequence[Tensor], whole: bool = True) -> list[Tensor]:
        """See `Region.again`."""
        return Region.again(self, tensors, whole)  # type: ignore[arg-type]

    def taken(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `Region.taken`."""
        return Region.taken(self, tensors)  # type: ignore[arg-type]

    def _path(self, i: int) -> str:
        return str(self._inner._path(i))

    def batched(self, in_dims: Sequence[int | None], randomness: str) -> Batched:
        return Batched(self, in_dims, randomness)


def path_words(path: tuple[Any, ...]) -> str:
    """A path in (args, kwargs)."""
    _, first, *rest = path
    return repr(first) + "".join(f"[{part!r}]" for part in rest)


def _unused(x: Any) -> Any:
    raise RuntimeError("the graph of a first run is not used")


def _is_activation(x: Tensor) -> bool:
    """Whether a tensor is the result of an operation that a derivative goes through, and no view of a parameter."""
    return x.grad_fn is not None and not (x._is_view() and x._base is not None and x._base.is_leaf)


def _is_float(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
