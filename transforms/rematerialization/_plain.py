"""Rematerialisation in plain autograd."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..axes import bind_axes, bind_call, bound, bound_call
from ._captured import Substitute
from ._keeper import memory_of
from ._modes import uncounted
from ._offload import Store
from ._reach import Found, tensors_of
from ._rerun import Record, SavedTensors


class Saved(NamedTuple):
    """The form of a tensor that a graph saves."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def refuse_iterators(args: Any, kwargs: Any) -> None:
    """Raise TypeError where an argument is an iterator."""
    given: Any = (args, kwargs)
    leaves, form = optree.tree_flatten(given, none_is_leaf=True)
    for leaf, path in zip(leaves, optree.treespec_paths(form), strict=True):
        if isinstance(leaf, Iterator):
            raise TypeError(
                f"remat: argument {path_words(path)} is an iterator, of which nothing is left when the function runs again; pass a list"
            )


def written_into(path: str) -> ValueError:
    """The error of a write into an argument."""
    return ValueError(
        f"a function in remat has written into its argument {path}, and would do so again in the backward pass; write into a "
        f"copy, and return it"
    )


def path_words(path: tuple[Any, ...]) -> str:
    """A path in (args, kwargs)."""
    _, first, *rest = path
    return repr(first) + "".join(f"[{part!r}]" for part in rest)


def differs(got: str, expected: list[Saved]) -> RuntimeError:
    """The error of a later run whose graph saves something else."""
    want = f"a tensor of shape {tuple(expected[0].shape)} and {expected[0].dtype}" if expected else "nothing more"
    return RuntimeError(
        f"a function in remat did not do the same in the backward pass: its graph saves {got}, before {want}; it must depend on its "
        f"arguments only"
    )


class _Outside(NamedTuple):
    """A tensor that exists without the function, such as a parameter."""

    x: Tensor
    version: int


class _Enough(BaseException):
    """All that a backward pass needs has been computed again."""


class HooksRefused(Exception):
    """The function uses a transform of torch.func, within which there are no hooks on saved tensors."""


HOOKS_REFUSED = "don't yet support saved tensor hooks"


class PlainRegion:
    """A call of a function.

    Args:
        fn: The function.
        args, kwargs: Its arguments.
        found: The tensors that it can reach.
        record: What the first run leaves for later runs.
        store: Where those arguments wait that are results of other operations; None where the graph holds them.
        early_stop: Whether a second run ends once it has what gradients use.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
        found: Found,
        record: Record,
        store: Store | None,
        early_stop: bool = True,
    ) -> None:
        given: Any = (args, kwargs)
        leaves, self._form = optree.tree_flatten(given, none_is_leaf=True)
        self._fn, self._record, self._early_stop = fn, record, early_stop
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._static = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensors = [leaves[i] for i in self._places]
        self._moves = [x.requires_grad for x in tensors]
        # Which arguments are one tensor, and which are results of operations: functions may ask.
        place = {id(x): i for i, x in reversed(list(enumerate(tensors)))}
        self._first_place = [place[id(x)] for x in tensors]
        self._results = [not x.is_leaf for x in tensors]
        self._axes, self._call = bound(), bound_call()
        own = {memory_of(leaves[i]) for i in self._places}
        reached = {memory_of(x): x for x in (*found.tracked.values(), *found.state.values())}
        self._state = {memory: x for memory, x in reached.items() if memory not in own}
        self._outside = set(self._state)
        self._forms: list[Saved] = []  # of the tensors that the graph has saved, by number
        self._values: dict[int, Any] = {}  # those computed again and not yet read
        self._unpack_outer: Callable[[Any], Tensor] = _same
        self._saved: SavedTensors | None = None
        self._lock = threading.RLock()
        self._moves_inside = False
        self._store = store
        self._now: list[Tensor] | None = None  # the arguments, while the function runs for the first time

    def first(self, args: Any, kwargs: Any) -> Any:
        """Run for the first time."""
        given: Any = (args, kwargs)
        leaves = optree.tree_leaves(given, none_is_leaf=True)
        tensors = [leaves[i] for i in self._places]
        versions = [version_of(x) for x in tensors]
        own = {memory_of(x): i for i, x in enumerate(tensors)}
        mode = Substitute(
            {}, self._state, self._record.before, None, lambda memory: self._refuse_write(own.get(memory))
        )
        last, keeper = 0, self._record.keeper

        def pack(x: Tensor) -> Any:
            nonlocal last
            if self._is_outside(x, own):
                return _Outside(x, version_of(x))
            self._forms.append(Saved(x.shape, x.dtype, x.device))
            if keeper is not None:
                last = keeper.count
                with uncounted():  # a second run now would be recorded with the first
                    self._values[len(self._forms) - 1] = x.detach()
            return len(self._forms) - 1

        self._now = tensors
        try:
            with self._record.first(tensors), saved_tensors_hooks(pack, self._unpack):
                out = self._record.call(self._fn, args, kwargs, mode)
        except RuntimeError as error:
            if HOOKS_REFUSED not in str(error):
                raise
            self._record.undo()
            raise HooksRefused from None
        finally:
            self._now, self._values = None, {}
        self._moves_inside = mode.moves
        results = tensors_of(out)
        for i, (x, before) in enumerate(zip(tensors, versions, strict=True)):
            if version_of(x) != before:
                self._refuse_write(i)
        if keeper is not None:
            keeper.finish(last)
            keeper.settle(results)
        if self._forms:
            self._saved = SavedTensors(tensors, self._outside, self._record, self._store)
        return out

    def _arguments(self) -> list[Tensor]:
        """The arguments of a second run."""
        with torch.no_grad(), self._record.surroundings.subclasses():
            tensors = self._now
            if tensors is None:
                assert self._saved is not None
                tensors = self._saved.load()
            leaves = [x.detach().requires_grad_(moves) for x, moves in zip(tensors, self._moves, strict=True)]
        with torch.enable_grad(), self._record.surroundings.subclasses():
            # A region inside that moves its arguments asks whether they are views of leaves.
            result_of = torch.clone if self._moves_inside else lambda x: x.view_as(x)
            found = [result_of(x) if result else x for x, result in zip(leaves, self._results, strict=True)]
        return [found[i] for i in self._first_place]

    def _is_outside(self, x: Tensor, own: Any, stand_ins: Collection[int] = ()) -> bool:
        memory = memory_of(x)
        outside = memory in self._outside or memory in stand_ins
        return memory not in own and (outside or x.is_leaf and x.requires_grad)

    # -- the backward pass -----------------------------------------------------------------------

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Outside):
            if version_of(packed.x) != packed.version:
                raise RuntimeError(
                    f"one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
                    f"shape {tuple(packed.x.shape)} that a function in remat uses is at version {version_of(packed.x)}, expected "
                    f"version {packed.version}"
                )
            return packed.x
        with self._lock:
            if packed not in self._values:
                self._again()
            return self._unpack_outer(self._values.pop(packed))

    def _again(self) -> None:
        """Compute again what the graph has saved."""
        # Hooks around the backward pass see the tensors too; within the first run they are its own.
        hooks = None if self._now is not None else torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack_outer, self._unpack_outer = hooks or (_same, _same)
        found: list[Tensor] = []

        tensors = self._arguments()
        own = {memory_of(x) for x in tensors}

        def pack(x: Tensor) -> Tensor:
            if self._is_outside(x, own, stand_ins):
                return x
            number = len(found)
            if number >= len(self._forms) or self._forms[number] != Saved(x.shape, x.dtype, x.device):
                raise differs(f"a tensor of shape {tuple(x.shape)} and {x.dtype}", self._forms[number:])
            with uncounted():
                found.append(x.detach())
            if self._early_stop and len(found) == len(self._forms):
                raise _Enough
            return found[number]

        leaves = list(self._static)
        for i, x in zip(self._places, tensors, strict=True):
            leaves[i] = x
        args, kwargs = cast("tuple[Any, Any]", optree.tree_unflatten(self._form, leaves))
        with self._record.again():
            stand_ins = {memory_of(x) for x in self._record.stand_ins.values()}
            of = {memory_of(x): x for x in self._state.values()}
            mode = Substitute(dict(self._record.stand_ins), of, self._record.before, None)
            try:
                with (
                    torch.enable_grad(),
                    bind_axes(self._axes),
                    bind_call(self._call),
                ):
                    with saved_tensors_hooks(pack, _same):
                        self._record.call(self._fn, args, kwargs, mode)
                    if len(found) < len(self._forms):
                        raise differs("nothing more", self._forms[len(found) :])
            except _Enough:
                pass
        self._record.values = None
        self._values = {number: pack_outer(x) for number, x in enumerate(found)}

    def _refuse_write(self, i: int | None) -> None:
        if i is not None:
            raise written_into(path_words(optree.treespec_paths(self._form)[self._places[i]]))


def _same(x: Any) -> Any:
    return x


def version_of(x: Tensor) -> int:
    """How often a tensor has been written into."""
    return 0 if x.is_inference() else x._version
