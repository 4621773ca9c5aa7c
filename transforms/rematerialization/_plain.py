"""A call in plain autograd: hooks leave numbers in place of what the graph saves, and a second run makes it again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ._flat_call import FlatCall
from ._keeper import Keeper, Recording, Replaying, differs, memory_of, moved
from ._offload import Stashed
from ._rerun import Rerun, version_of


class _Outside(NamedTuple):
    """A tensor that exists without the function, such as a parameter."""

    x: Tensor
    version: int


_SAVED = object()


class _Enough(BaseException):
    """All that a backward pass needs has been computed again."""


class HooksRefused(Exception):
    """The function uses a transform of torch.func, within which there are no hooks on saved tensors."""


class PlainRegion:
    """A call of a function.

    Args:
        call: The call.
        rerun: What later runs find.
        keeper: Keeps results of operations; None if nothing is kept.
        offload: Whether those arguments wait on the host that are results of other operations.
        early_stop: Whether a second run ends once it has what gradients use.
    """

    def __init__(self, call: FlatCall, rerun: Rerun, keeper: Keeper | None, offload: bool, early_stop: bool) -> None:
        self._call, self._rerun, self._keeper = call, rerun, keeper
        self._offload, self._early_stop = offload, early_stop
        tensors = call.tensors
        first = {id(x): i for i, x in reversed(list(enumerate(tensors)))}
        # Which arguments are one tensor, and which are results of operations: functions may ask.
        self._first_place = [first[id(x)] for x in tensors]
        self._results = [not x.is_leaf for x in tensors]
        self._moves = [x.requires_grad for x in tensors]
        self._own = set(map(memory_of, tensors))
        # With the tensors, so that their memory is not used for others.
        self._outside = {memory: x for x in call.found.tensors if (memory := memory_of(x)) not in self._own}
        self._forms: list[Any] = []  # of the tensors that the graph has saved, by number
        self._values: dict[int, Tensor] = {}  # those computed again and not yet read
        self._lock = threading.RLock()
        self._saver: Any = None  # the result of a node that saves the arguments, and what is kept
        self._waiting: list[Any] = []  # what is not saved there, such as handles, and `_SAVED` for the others

    def first(self, args: Any, kwargs: Any) -> Any:
        """Run for the first time."""
        keeper, last = self._keeper, 0
        tensors = self._call.tensors
        watched = [*tensors, *self._outside.values()]
        versions = list(map(version_of, watched))

        def pack(x: Tensor) -> Any:
            nonlocal last
            if self._is_outside(x, self._own):
                return _Outside(x, version_of(x))
            self._forms.append((x.shape, x.dtype, x.device))
            if keeper is not None:  # a second run now would be recorded with the first
                last, self._values[len(self._forms) - 1] = keeper.count, x.detach()
            return len(self._forms) - 1

        try:
            with self._rerun.first(tensors), Recording.of(keeper), saved_tensors_hooks(pack, self._unpack):
                out = self._call.fn(*args, **kwargs)
        except RuntimeError as error:
            if "don't yet support saved tensor hooks" not in str(error):
                raise
            self._rerun.undo()
            raise HooksRefused from None
        finally:
            self._values = {}
        self._call.refuse_writes(watched, versions, self._rerun)
        if keeper is not None:
            keeper.finish(out, last)
        if self._forms:
            self._save(tensors)
        self._call.tensors = []
        return out

    def _save(self, tensors: Sequence[Tensor]) -> None:
        """Save the arguments, and what is kept, by a node: hooks around the call see them, and versions are checked."""
        values: list[Any] = [x.detach() for x in tensors]
        if self._offload:
            away = [i for i, x in enumerate(tensors) if x.grad_fn is not None and memory_of(x) not in self._outside]
            for i, value in zip(away, moved([values[i] for i in away]), strict=True):
                values[i] = value
                if isinstance(value, Stashed):
                    value.settle()
        if self._keeper is not None:
            values += self._keeper.values
            self._keeper.values = []
        saved = [x for x in values if isinstance(x, Tensor)]
        self._waiting = [_SAVED if isinstance(x, Tensor) else x for x in values]
        with torch._C.DisableTorchFunction():  # a region around this one does not take it for a part of its function
            self._saver = _Save.apply(torch.empty(0, requires_grad=True), *saved)  # type: ignore[no-untyped-call]

    def _load(self) -> tuple[list[Tensor], list[Any]]:
        """The arguments, and what is kept."""
        if self._saver is None:  # the first run asks for a gradient
            return self._call.tensors, []
        saved = iter(self._saver.grad_fn.saved_tensors)
        values = [next(saved) if x is _SAVED else x for x in self._waiting]
        count = len(self._moves)
        return [x.get() if isinstance(x, Stashed) else x for x in values[:count]], values[count:]

    def _inputs(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The tensors in the arguments of a second run."""
        with torch.no_grad():
            leaves = [x.detach().requires_grad_(moves) for x, moves in zip(given, self._moves, strict=True)]
        inputs = [x.view_as(x) if result else x for x, result in zip(leaves, self._results, strict=True)]
        return [inputs[i] for i in self._first_place]

    def _is_outside(self, x: Tensor, own: Collection[int], stands: Collection[int] = ()) -> bool:
        memory = memory_of(x)
        outside = memory in self._outside or memory in stands
        return memory not in own and (outside or x.is_leaf and x.requires_grad)

    # -- the backward pass -----------------------------------------------------------------------

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Outside):
            if version_of(packed.x) != packed.version:
                text = "one of the variables needed for gradient computation has been modified by an inplace operation"
                what = f"a tensor of shape {tuple(packed.x.shape)} that a function in remat uses"
                raise RuntimeError(f"{text}: {what}")
            return packed.x
        with self._lock:
            if packed not in self._values:
                self._again()
            return self._values.pop(packed)

    def _again(self) -> None:
        """Compute again what the graph has saved."""
        found: list[Tensor] = []
        given, kept = self._load()
        with contextlib.ExitStack() as stack:
            stands = stack.enter_context(self._rerun.again())
            stack.enter_context(torch.enable_grad())
            tensors = self._inputs(given)
            own = set(map(memory_of, tensors))

            def pack(x: Tensor) -> Tensor:
                if self._is_outside(x, own, stands):
                    return x
                self._compare((x.shape, x.dtype, x.device), len(found))
                found.append(x.detach())
                # An operation may save noise before it draws it, as that of RReLU does.
                if self._early_stop and len(found) == len(self._forms) and self._rerun.has_drawn():
                    raise _Enough
                return found[-1]

            stack.enter_context(Replaying.of(self._keeper, kept))
            with contextlib.suppress(_Enough), saved_tensors_hooks(pack, lambda x: x):
                self._call.run(tensors)
        if len(found) < len(self._forms):
            self._compare(None, len(found))
        self._values = dict(enumerate(found))

    def _compare(self, form: Any, number: int) -> None:
        """Raise RuntimeError if the graph of a second run saves something else than that of the first."""
        before = self._forms[number] if number < len(self._forms) else None
        if form != before:
            raise differs(f"its graph saves {_words(form)}, before {_words(before)}")


def _words(form: Any) -> str:
    return "nothing more" if form is None else f"a tensor of shape {tuple(form[0])} and {form[1]}"


class _Save(torch.autograd.Function):
    """Saves tensors as any operation does. Nothing depends on its result, so it has no backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)
