"""Hooks that are no plain reduction: run on each bucket while backward goes on, and on the whole tree after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ._axis import Work
from ._mesh import Mesh
from ._storage import Storage, apart, views
from ._waves import Waves, can_pause
from ._wire import Outgoing
from .transforms._base import Transform
from .transforms._bucketwise import Carried, merge, restrict
from .transforms._combine import stages
from .transforms._layout import Bucket
from .transforms._plan import Plan, takes_flat
from .transforms.axes._env import bind_axes

# Where a bucket is one flat tensor, it is a tree with this path.
_FLAT = ""


class _Form(NamedTuple):
    """How the parts of a hook's state make up the whole."""

    layout: tuple[Bucket, ...]
    shapes: Mapping[str, torch.Size]
    flat: bool
    early: int  # stages run bucket by bucket
    stages: int


class HookState(NamedTuple):
    """The state of a hook as a step keeps it."""

    buckets: tuple[Any, ...]  # of the stages run bucket by bucket, for each of them
    rest: tuple[Any, ...]  # of the stages run on the whole tree
    form: _Form

    def whole(self) -> Any:
        """The state as the pure hook has it: keyed by path."""
        form = self.form
        early: Any = ()
        if form.early:
            parts = list(self.buckets)
            if form.flat:
                parts = [_by_path(p, bucket, form.shapes) for p, bucket in zip(parts, form.layout, strict=True)]
            merged = merge(parts, form.shapes)
            early = merged if form.early > 1 else (merged,)
        whole = (*early, *self.rest)
        return whole if form.stages > 1 else whole[0] if whole else ()


def _by_path(state: Any, bucket: Bucket, shapes: Mapping[str, torch.Size]) -> Any:
    """A state on a flat bucket, with views of its leaves in the place of the flat tensors."""
    if isinstance(state, dict):
        if state.keys() == {_FLAT}:
            return dict(zip(bucket.paths, views(bucket, state[_FLAT], shapes), strict=True))
        return {key: _by_path(part, bucket, shapes) for key, part in state.items()}
    if isinstance(state, (tuple, list)):
        children = [_by_path(part, bucket, shapes) for part in state]
        return type(state)(*children) if hasattr(state, "_fields") else type(state)(children)
    return state


class HookRun:
    """Runs a hook that is no plain reduction, in one step after the other."""

    def __init__(self, hook: Transform, plan: Plan, mesh: Mesh) -> None:
        self._hook, self._early, self._mesh = hook, plan.early, mesh
        self._stages = stages(hook)
        self._flat = plan.early is not None and takes_flat(plan.early)
        self._waves: Waves | None = None
        self._calls: list[_Call] = []
        self._side: Any = None  # on CUDA, the stream that buckets' hooks run in

    def init(self, storage: Storage) -> Any:
        """The state to start from; `HookState.whole` of it is `hook.init(params)`."""
        by_path = {path: leaf.detach() for path, leaf in storage.leaves.items()}
        layout, early = storage.layout, self._early
        buckets: tuple[Any, ...] = ()
        if early is not None and self._flat:
            buckets = tuple(early.init({_FLAT: flat}) for flat in storage.flats)
        elif early is not None:
            full = early.init(by_path)
            buckets = tuple(restrict(full, by_path, bucket.paths) for bucket in layout)
        count = len(stages(early)) if early is not None and buckets else 0
        rest = tuple(part.init(by_path) for part in self._stages[count:])
        buckets, rest = apart((buckets, rest), storage.flats)
        return HookState(buckets, rest, _Form(layout, storage.shapes, self._flat, count, len(self._stages)))

    # -- bucket by bucket -----------------------------------------------------------------------

    def start(self, state: HookState, storage: Storage, weight: float, lane: Any, given: float) -> None:
        """Make ready for the buckets of a step.

        Args:
            weight: This rank's.
            lane: What rides along with the first bucket, or None.
            given: The weight that the gradients have already.
        """
        self.stop()
        device = storage.layout[0].device if storage.layout else torch.device("cpu")
        self._waves = Waves(self._mesh.axes) if can_pause(self._mesh.axes, device) else None
        if device.type == "cuda" and self._side is None:
            self._side = torch.cuda.Stream(device)
        self._calls = []
        for i, bucket_state in enumerate(state.buckets):
            params = {_FLAT: storage.flats[i]} if self._flat else None
            if params is None:
                params = {path: storage.leaves[path].detach() for path in storage.layout[i].paths}
            first = self._calls[0] if i else None
            self._calls.append(_Call(self._early, bucket_state, params, weight, lane, given, first))

    def launch(self, index: int, out: Outgoing) -> Work:
        """Run one bucket's hook until its first message is on its way; `wait` brings it to its end."""
        call = self._calls[index]
        call.out = out
        if self._waves is not None:
            return self._waves.start(call)
        if self._side is None:
            with torch.no_grad(), bind_axes(self._mesh.axes):
                call()
            return call
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side), torch.no_grad(), bind_axes(self._mesh.axes):
            call()
        return _OnStream(self._side)

    def stop(self) -> None:
        """Forget a step that has failed."""
        if self._waves is not None:
            self._waves.clear()
        self._calls = []

    # -- on the whole tree ----------------------------------------------------------------------

    def finish(self, old: HookState, storage: Storage, outgoing: list[Outgoing], weight: Any, lane: Any) -> HookState:
        """After all buckets: run the other stages; the new state."""
        buckets = tuple(call.state for call in self._calls)
        if buckets and self._early is not None and self._early.sums is not None:
            sums = self._early.sums(buckets[0])
            weight, lane = sums.total, sums.lane
        after = self.run(self._stages[old.form.early :], old.rest, storage, outgoing, weight, lane)
        self.stop()
        return HookState(buckets, after, old.form)

    def run(
        self,
        parts: Sequence[Transform],
        states: Any,
        storage: Storage,
        outgoing: list[Outgoing],
        weight: Any,
        lane: Any,
    ) -> tuple[Any, ...]:
        """Run stages on all gradients, one after the other; their new states."""
        if not parts:
            return ()
        params = {path: leaf.detach() for path, leaf in storage.leaves.items()}
        of = {path: grad for out in outgoing for path, grad in out.by_path().items()}
        held = {path: of[path] for path in params}
        grads, new = dict(held), []
        with torch.no_grad(), bind_axes(self._mesh.axes):
            for part, state in zip(parts, states, strict=True):
                grads, after = part.update(grads, state, params, weight=weight, lane=lane)
                new.append(apart(after, [*(out.grads for out in outgoing), *storage.flats]))
                if part.sums is not None:
                    sums = part.sums(after)
                    weight, lane = sums.total, sums.lane
            _put(list(held.values()), [grads[path] for path in held])
        return tuple(new)

    def sums(self, state: HookState) -> Any:
        """What the hook's last reduction has summed besides the gradients."""
        for part, inner in zip(self._stages[: -len(state.rest) - 1 : -1], state.rest[::-1], strict=True):
            if part.sums is not None:
                return part.sums(inner)
        return self._early.sums(state.buckets[0])  # type: ignore[union-attr,misc]


class _Call:
    """One bucket's call of the hook in one step."""

    def __init__(
        self, early: Any, old: Any, params: dict[str, Tensor], weight: float, lane: Any, given: float, first: Any
    ) -> None:
        self._early, self._old, self._params, self._weight, self._given = early, old, params, weight, given
        self._lane = lane if first is None else None
        self._first = first
        self.state: Any = None
        self.out: Any = None
        self._pause: Callable[[], None] | None = None

    def _state_of_first(self) -> Any:
        while self._first.state is None and self._pause is not None:
            self._pause()  # it may be asked for before this bucket has sent anything
        return self._first.state

    def __call__(self, pause: Callable[[], None] | None = None) -> None:
        out, self._pause = self.out, pause
        carried = None if self._first is None else Carried(self._state_of_first)
        flat = self._params.keys() == {_FLAT}
        if self._given != 1.0:
            out.grads.div_(self._given)
        grads = {_FLAT: out.grads} if flat else out.by_path()
        new, state = self._early.update(
            grads, self._old, self._params, weight=self._weight, lane=self._lane, carried=carried
        )
        self.state = apart(state, [out.grads, *self._params.values()])
        if flat and _is_spare(new[_FLAT], out.grads, self.state):
            out.grads = new[_FLAT]
        else:
            _put(list(grads.values()), [new[path] for path in grads])

    def wait(self) -> None:
        return None


class _OnStream:
    """Work of a side stream, for which the current stream waits."""

    def __init__(self, side: Any) -> None:
        self._side = side

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self._side)


def _is_spare(new: Tensor, old: Tensor, state: Any) -> bool:
    """Whether a result can take the place of the gradients as it is: nothing else needs its memory."""
    return (
        (new.shape, new.dtype, new.is_contiguous()) == (old.shape, old.dtype, True)
        and apart(new, (leaf for leaf in optree.tree_leaves(state) if isinstance(leaf, Tensor))) is new
    )  # fmt: skip


def _put(places: list[Tensor], values: list[Tensor]) -> None:
    """Write what a hook has returned to where the gradients are."""
    if places and any(place is not value for place, value in zip(places, values, strict=True)):
        torch._foreach_copy_(places, values)
