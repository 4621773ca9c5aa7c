"""The stages of a hook on buckets and on the whole tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..buckets import GradBuffer, assign_
from ..groups import Communicator
from ..transforms.axes import Work, bind_axes, bound
from ..transforms.base import Call, Totals, Transform, trees
from ..transforms.combinators import behind, stages
from ..transforms.layout import Bucket, Pieces, bind_pieces
from ..transforms.pipelines import Plan
from ._body import Params
from ._hook_state import FLAT
from ._interleave import Interleaver, SideStreams, travel


def run_stages(
    parts: Sequence[Transform],
    states: Any,
    storage: Params,
    buckets: Sequence[GradBuffer],
    mesh: Communicator,
    call: Call,
) -> tuple[Any, ...]:
    """Run stages on all gradients, one after the other, and write the result in place; returns the new states.

    Args:
        call: The call of the first stage.
    """
    if not parts:
        return ()
    params = {path: leaf.detach() for path, leaf in storage.leaves.items()}
    of = {path: grad for bucket in buckets for path, grad in bucket.by_path().items()}
    held = {path: of[path] for path in params}
    grads, new, pieces = dict(held), [], storage.pieces
    if pieces is not None and all(bucket.scattered for bucket in buckets):
        params, call = pieces.own(params), call.inside(sharded_over=pieces.axis)
    with torch.no_grad(), bind_axes(mesh.axes), bind_pieces(pieces):
        for part, state in zip(parts, states, strict=True):
            grads, after = part.run(grads, state, params, call)
            new.append(trees.copy_if_aliased(after, [*(bucket.grads for bucket in buckets), *storage.flats]))
            call = behind(part, call)
            if part.sharded_over and pieces is not None:
                params = pieces.own(params)
                for bucket in buckets:
                    bucket.scatter(bucket.pack_own(grads))
                held = {path: grad for bucket in buckets for path, grad in bucket.by_path().items()}
        assign_(held, grads)
    return tuple(new)


class BucketStages:
    """Runs the stages of a hook in one step after the other.

    Attributes:
        parts: All stages.
        n_early: The number of stages that run on each bucket.

    Args:
        flat: Whether these get a bucket as one flat tensor.
        fresh: Whether their result is freshly allocated, so that it may take the place of the gradient buffer.
    """

    def __init__(self, plan: Plan, mesh: Communicator, flat: bool = False, fresh: bool = False) -> None:
        self._early, self._mesh, self.flat, self.fresh = plan.early, mesh, flat, fresh
        self.parts: list[Transform] = stages(plan.hook)
        self.n_early: int = 0 if plan.early is None else len(stages(plan.early))
        self._call = Call()  # of the first stage, in this step
        self._calls: list[BucketCall] = []
        self._bound: dict[str, Any] = {}
        self._layout: tuple[Bucket, ...] = ()
        self._in_waves = False  # whether messages of its buckets travel while others are filled
        self._interleaver: Interleaver | None = None
        self._side: SideStreams | None = None  # on an accelerator

    def init(self, params: dict[str, Tensor], pieces: Pieces | None, first: int = 0) -> tuple[Any, ...]:
        """The states of the stages from the `first` on; those behind one that shards get this rank's slices."""
        states = []
        with bind_axes(self._mesh.axes), bind_pieces(pieces):
            for i, part in enumerate(self.parts):
                if i >= first:
                    states.append(part.init(params))
                if part.sharded_over and pieces is not None:
                    params = pieces.own(params)
        return tuple(states)

    def begin(self, call: Call, layout: tuple[Bucket, ...], sends: bool) -> None:
        """Prepare for the buckets of a step.

        Args:
            call: The call of the first stage, to which the gradients are given up.
            layout: The buckets.
            sends: Whether the hook sends anything in this step.
        """
        self.stop()
        axes, self._call = self._mesh.axes, call
        self._bound = {**bound(), **axes}  # backward may run in a thread where no axis is bound
        if self._layout is not layout:
            self._layout, self._in_waves = layout, travel(axes, layout, False)
            self._side = SideStreams(layout[0].device) if travel(axes, layout, True) else None
        self._interleaver = Interleaver(axes) if sends and self._in_waves else None
        if self._side is not None:
            self._side.begin()

    def launch(self, bucket: GradBuffer, old: Any, params: dict[str, Tensor], pieces: Pieces | None) -> Work | None:
        """Run the stages of one bucket until their first message is under way; the `wait` of the work runs the rest.

        Args:
            old: The states of these stages for the bucket.
            params: Path -> parameter of the bucket.
            pieces: The pieces of the bucket, where these stages shard.
        """
        call = BucketCall(self, bucket, old, params, pieces)
        self._calls.append(call)
        if self._interleaver is not None:
            return self._interleaver.start(call)
        with torch.no_grad(), bind_axes(self._bound):
            if self._side is not None:
                return self._side.start(call)
            call()
        return None

    def update(self, grads: Any, state: Any, params: Any, pieces: Pieces | None) -> tuple[Any, Any]:
        """Call the stages of a bucket; returns their gradients and state."""
        assert self._early is not None
        with bind_pieces(pieces):
            return self._early.run(grads, state, params, self._call)

    def finish(
        self,
        buckets: Sequence[GradBuffer],
        old: Sequence[Any],
        storage: Params,
        reduced: tuple[tuple[str, ...], Totals] | None = None,
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Run the stages behind those of the buckets on all gradients, whose messages have arrived.

        Args:
            old: The states of these stages.
            reduced: The axes of the first stage and the sums of the weights over them, where it is a plain reduction
                that has been run elsewhere.

        Returns:
            The states of the buckets, and the states of these stages.
        """
        states, call = tuple(one.state for one in self._calls), self._call
        self.stop()
        count = self.n_early if states else int(reduced is not None)
        parts, rest = self.parts[count:], tuple[Any, ...]()
        if parts:
            call = call.inside(donated=False)
            if reduced is not None:
                call.know(*reduced)
            for part in self.parts[:count]:
                call = behind(part, call)
            rest = run_stages(parts, old, storage, buckets, self._mesh, call)
        return states, rest

    def stop(self) -> None:
        """Discard a step that has failed."""
        if self._interleaver is not None:
            self._interleaver.clear()
        self._interleaver, self._calls = None, []


class BucketCall:
    """One bucket's call of the stages that run on buckets, in one step."""

    def __init__(
        self, run: BucketStages, bucket: GradBuffer, old: Any, params: dict[str, Tensor], pieces: Pieces | None
    ) -> None:
        self._run, self._old, self._params, self._pieces = run, old, params, pieces
        self.bucket, self.state = bucket, None

    def __call__(self) -> None:
        bucket, run = self.bucket, self._run
        grads = {FLAT: bucket.grads} if run.flat else bucket.by_path()
        new, state = run.update(grads, self._old, self._params, self._pieces)
        self.state = trees.copy_if_aliased(state, [bucket.grads, *self._params.values()])
        if new is None:
            raise ValueError("the hook returned None for gradients; in a train_step every call must give them")
        if self._pieces is not None:
            bucket.scatter(new[FLAT] if run.flat else bucket.pack_own(new))
        elif run.flat and run.fresh and new[FLAT].shape == bucket.grads.shape and new[FLAT].dtype is bucket.grads.dtype:
            bucket.grads = new[FLAT]
        else:
            assign_(grads, new)
        if run.flat and not bucket.scattered:
            bucket.clear_padding()  # a hook may have left any values there
        self._old = None  # it is not needed any more
