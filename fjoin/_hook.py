"""Hooks that are no plain reduction: run on each bucket while backward goes on, and on the whole tree after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._axis import Work
from ._hook_state import FLAT, Form, HookState
from ._mesh import Mesh
from ._storage import Storage, apart, put
from ._waves import Waves, travel
from ._wire import Outgoing
from .transforms._base import Transform
from .transforms._bucketwise import Carried, restrict
from .transforms._combine import stages
from .transforms._plan import Plan, takes_flat
from .transforms.axes._env import bind_axes, bound
from .transforms.sync._lane import lane_dtype


class HookRun:
    """Runs a hook that is no plain reduction, in one step after the other."""

    def __init__(self, hook: Transform, plan: Plan, mesh: Mesh) -> None:
        self._hook, self._early, self._mesh = hook, plan.early, mesh
        self._stages = stages(hook)
        self._flat = plan.early is not None and takes_flat(plan.early)
        # What a reduction returns is nobody else's, so it can take the gradients' place as it is.
        last = stages(plan.early)[-1:] if plan.early is not None else []
        self._fresh = any(part.spec.name in ("mean", "sum_over") for part in last)
        self._waves: Waves | None = None
        self._calls: list[_Call] = []
        self._bound: dict[str, Any] = {}
        self._lane_dtype = torch.float32
        self._side: Any = None  # on CUDA, the stream that buckets' hooks run in
        self._stream: Any = None  # it, between steps

    def init(self, storage: Storage) -> Any:
        """The state to start from; `HookState.whole` of it is `hook.init(params)`."""
        by_path = {path: leaf.detach() for path, leaf in storage.leaves.items()}
        layout, early = storage.layout, self._early
        buckets: tuple[Any, ...] = ()
        if early is not None and self._flat:
            buckets = tuple(early.init({FLAT: flat}) for flat in storage.flats)
        elif early is not None:
            full = early.init(by_path)
            buckets = tuple(restrict(full, by_path, bucket.paths) for bucket in layout)
        count = len(stages(early)) if early is not None and buckets else 0
        rest = tuple(part.init(by_path) for part in self._stages[count:])
        buckets, rest = apart((buckets, rest), storage.flats)
        return HookState(buckets, rest, Form(layout, storage.shapes, self._flat, count, len(self._stages)))

    # -- bucket by bucket -----------------------------------------------------------------------

    def start(self, state: HookState, storage: Storage, weight: float, lane: Any, given: float) -> None:
        """Make ready for the buckets of a step.

        Args:
            weight: This rank's.
            lane: What rides along with the first bucket, or None.
            given: The weight that the gradients have already.
        """
        self.stop()
        axes, layout = self._mesh.axes, storage.layout
        self._waves = Waves(axes) if travel(axes, layout, "cpu") else None
        self._side = None
        if travel(axes, layout, "cuda"):
            self._stream = self._side = self._stream or torch.cuda.Stream(layout[0].device)
        self._lane_dtype = lane_dtype(bucket.dtype for bucket in layout)
        self._bound = {**bound(), **axes}  # backward may run in a thread where nothing is bound
        self._calls = []
        for i, bucket_state in enumerate(state.buckets):
            params = {FLAT: storage.flats[i]} if self._flat else None
            if params is None:
                params = {path: storage.leaves[path].detach() for path in storage.layout[i].paths}
            first = self._calls[0] if i else None
            self._calls.append(_Call(self, bucket_state, params, weight, lane, given, first))

    def launch(self, index: int, out: Outgoing) -> Work:
        """Run one bucket's hook until its first message is on its way; `wait` brings it to its end."""
        call = self._calls[index]
        call.out = out
        if self._waves is not None:
            return self._waves.start(call)
        if self._side is None:
            with torch.no_grad(), bind_axes(self._bound):
                call()
            return call
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side), torch.no_grad(), bind_axes(self._bound):
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
        after = self.run(self._stages[old.form.n_early :], old.rest, storage, outgoing, weight, lane)
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
                grads, after = part.update(grads, state, params, weight=weight, lane=lane, lane_dtype=self._lane_dtype)
                new.append(apart(after, [*(out.grads for out in outgoing), *storage.flats]))
                if part.sums is not None:
                    sums = part.sums(after)
                    weight, lane = sums.total, sums.lane
            put(held, grads)
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
        self, run: HookRun, old: Any, params: dict[str, Tensor], weight: float, lane: Any, given: float, first: Any
    ) -> None:
        assert run._early is not None
        self._update, self._flat, self._fresh, self._lane_dtype = (
            run._early.update,
            run._flat,
            run._fresh,
            run._lane_dtype,
        )
        self._old, self._params, self._weight, self._given = old, params, weight, given
        self._lane = lane if first is None else None
        self._first, self.done = first, False
        self.state: Any = None
        self.out: Any = None
        self._pause: Callable[[], None] | None = None

    def _state_of_first(self) -> Any:
        while not self._first.done and self._pause is not None:
            self._pause()  # it may be asked for before this bucket has sent anything
        return self._first.state

    def __call__(self, pause: Callable[[], None] | None = None) -> None:
        out, self._pause = self.out, pause
        carried = None if self._first is None else Carried(self._state_of_first)
        flat = self._flat
        if self._given != 1.0:
            out.grads.div_(self._given)
        grads = {FLAT: out.grads} if flat else out.by_path()
        new, state = self._update(
            grads,
            self._old,
            self._params,
            weight=self._weight,
            lane=self._lane,
            carried=carried,
            lane_dtype=self._lane_dtype,
        )
        self.state = apart(state, [out.grads, *self._params.values()])
        if new is None:
            raise ValueError(
                "the hook returned None in the place of gradients; in a train_step every call must give them"
            )
        if flat and self._fresh and new[FLAT].shape == out.grads.shape and new[FLAT].dtype is out.grads.dtype:
            out.grads = new[FLAT]
        else:
            put(grads, new)
        if flat:
            out.clear_padding()  # of which a hook may have made anything
        self.done = True
        self._pause = self._first = self._old = None  # a cycle would keep the old state until Python looks for cycles

    def wait(self) -> None:
        return None


class _OnStream:
    """Work of a side stream, for which the current stream waits."""

    def __init__(self, side: Any) -> None:
        self._side = side

    def wait(self) -> None:
        torch.cuda.current_stream(self._side.device).wait_stream(self._side)
