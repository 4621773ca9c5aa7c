"""The training step: a pipeline, run bucket by bucket while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor

from . import _join
from ._agree import check_program, same_values
from ._errors import FjoinError, JoinError, NonFinite
from ._loss import Loss
from ._make_mesh import mesh as make_mesh
from ._mesh import Mesh
from ._metrics import Metrics
from ._params import flatten
from ._run import Run
from ._state import Body, TrainState
from ._storage import Storage, apart
from .transforms._base import Pipeline
from .transforms._layout import BUCKET_BYTES, make_layout
from .transforms._plan import make_plan
from .transforms._spec import Spec

B = TypeVar("B")


class TrainStep:
    """One training step on this rank; made by `train_step`.

    Call it as `state, metrics = step(state, batch)`, inside `for batch in step.join(loader)` where
    ranks may hold different numbers of batches.

    Attributes:
        ranks: How many ranks the gradients are averaged over.
        rank: This rank in the mesh.
    """

    def __init__(self, run: Run, donate: bool, bucket_bytes: int, accumulate: int) -> None:
        self._run, self._donate = run, donate
        self._bucket_bytes, self._accumulate = bucket_bytes, accumulate
        self._mesh, self.pipeline = run.mesh, run.pipeline
        self.ranks, self.rank = run.ranks, run.mesh.rank
        self._device: torch.device | None = None
        self._turn: _join.Turn | None = None
        self._last_step: int | None = None
        self._broken: tuple[type[FjoinError], str] | None = None  # what this rank failed of
        self._together = False  # the last error was raised by all ranks alike

    def init(
        self,
        params: Any,
        buffers: dict[str, Tensor] | None = None,
        sync: Literal["broadcast", "check"] | None = "broadcast",
    ) -> TrainState:
        """The state to start from, after a check that all ranks run the same program.

        Args:
            params: A pytree of floating-point tensors; they are copied.
            buffers: Path -> tensor, what `loss_fn` may update without training it, not by writing into
                it but by returning new ones: it is called as `loss_fn(params, buffers, batch)` then, and
                returns `(loss, aux, buffers)`. Each rank keeps its own.
            sync: "broadcast" gives all ranks rank 0's parameters and buffers, "check" raises where
                they differ, None trusts that they do not.

        Returns:
            A `TrainState` at step 0.

        Raises:
            DesyncError: on all ranks: another pipeline, path, shape, dtype or setting on some rank.
            TypeError, ValueError: a leaf that cannot be trained, a partition that does not fit.
        """
        if sync not in ("broadcast", "check", None):
            raise ValueError(f"sync must be 'broadcast', 'check' or None, got {sync!r}")
        self._usable()
        try:
            return self._init(params, buffers, sync)
        except BaseException as error:
            self._raise(error)

    def _init(self, params: Any, buffers: dict[str, Tensor] | None, sync: str | None) -> TrainState:
        flat, rebuild = flatten(params)
        optimizer = self.pipeline.optimizer
        if optimizer.check:
            optimizer.check(flat)

        def label(path: str) -> Any:
            part = optimizer.at(path)
            return id(part) if part.elementwise else path

        layout = make_layout(flat, label, self._bucket_bytes)
        check_program(self._mesh, self.pipeline, flat, self._bucket_bytes, self._accumulate, self._run.weighs, buffers)
        storage = Storage(layout, flat, optimizer)
        own = None if buffers is None else {path: b.detach().clone() for path, b in buffers.items()}
        if sync == "broadcast":
            for tensor in [*storage.flats, *(own or {}).values()]:
                for axis in self._mesh.over(self._run.axes):
                    if axis.size > 1:
                        tensor.copy_(axis.run("pbroadcast", tensor, 0))
        elif sync == "check":
            same_values(self._mesh, storage.leaves, own)
        storage.make_slots()  # from the parameters that all ranks now have
        by_path = {path: leaf.detach() for path, leaf in storage.leaves.items()}
        after = self.pipeline.after
        hook_state, after_state = (
            self._run.hook.init(storage),
            apart(after.init(by_path), storage.flats) if after else (),
        )
        self._device = layout[0].device if layout else None
        self._run.close()
        self._run.token = object()  # states of an earlier init may have another layout
        skipped = torch.zeros((), dtype=torch.int64) if self._run.skips else None
        return TrainState(Body(storage, own, hook_state, after_state, rebuild, owner=self._run.token, skipped=skipped))

    def close(self) -> None:
        """Free the step's buffers and hooks; states stay readable."""
        self._run.close()

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One step, or one micro-batch of an accumulation window.

        Args:
            state: What `init` or the last call returned. Its memory is taken over, unless the step
                was made with donate=False.
            batch: What `loss_fn` and `weight` take. Not looked at where the loop of `join` says that
                this rank has none.

        Returns:
            The new state and the step's `Metrics`.

        Raises:
            NonFinite: on all ranks; the state given stays as it was and can be used again.
            PeerLost, CollectiveTimeout: another rank failed or did not come.
            DonatedState, TornState: `state` cannot be used any more.
            TypeError, ValueError: what `loss_fn` or `weight` returned cannot be used.
        """
        self._usable()
        self._together = False
        turn, body, given = self._turn, None, None
        try:
            if turn is not None:
                if turn.number < 0:
                    raise JoinError(
                        "the loader of step.join called the step; only the loop's body may", step=self._last_step
                    )
                if turn.called:
                    raise JoinError(
                        f"the loop body called the step twice in iteration {turn.number}; call it exactly once in each, "
                        f"and use fjoin.train_step(..., accumulate=k) for several batches in one step",
                        step=self._last_step,
                    )
                turn.called = True
            if not isinstance(state, TrainState):
                raise TypeError(f"state must be what step.init or the last step returned, got a {type(state).__name__}")
            given = body = state._claim(self._run.token)
            if not self._donate:
                body = body.clone()
            self._run.guard.raise_pending()
            self._last_step = body.step
            metrics = self._run(body, batch, turn)
        except NonFinite:  # raised by all ranks at the same place; nothing has changed
            self._together = True
            if given is not None and body is not None and given is not body:
                given.lose_window(body.calls)
            raise
        except BaseException as error:
            if body is not None and body.window and not body.torn:
                body.torn = f"a call failed within an accumulation window, whose gradients are lost: {error!r}"
            self._raise(error)
        body.version += 1
        return TrainState(body), metrics

    def join(
        self,
        loader: Iterable[B],
        *,
        empty: Any = _join.NO_BATCH,
        throw_on_early_termination: bool = False,
        when_exhausted: Literal["shadow", "replay"] = "shadow",
    ) -> Iterator[B]:
        """Iterate over this rank's loader until all ranks are out of input.

        A rank that is out of input gets its last batch again, so that the loop body's code runs; the
        step knows that it has none, computes nothing and takes part with weight 0. The loop looks one
        batch ahead, so that the ranks end together at no extra message; one small message at the start
        asks whether anybody has a batch. The body must call the step exactly once in each iteration.

        Args:
            loader: Any iterable of batches, of any length on each rank, 0 included.
            empty: What a rank that never has a batch gets; every use of the default raises `NoBatch`.
            throw_on_early_termination: Raise on all ranks after the step in which the first is out of
                input. Costs a wait for the step's messages in every iteration.
            when_exhausted: What a rank does without input, or with a batch of weight 0: "shadow" computes
                nothing; "replay" runs `loss_fn` on its last batch, whose gradients count nothing: for models
                that communicate in their forward pass. `transforms.current_weight()` is 0 then. A rank that
                never has a batch needs `empty`.

        Returns:
            An iterator over the batches that the body is to hand to the step.

        Raises:
            EarlyTermination: on all ranks, see above.
            JoinError: the body did not call the step exactly once, or was left early.
            PeerLost: another rank left the loop, or failed.
        """
        return _join.join_steps(
            [self],
            loader,
            empty=empty,
            throw_on_early_termination=throw_on_early_termination,
            when_exhausted=when_exhausted,
        )

    # -- what the loop of join asks for --------------------------------------------------------

    def _begin_join(self) -> None:
        self._usable()
        if self._turn is not None:
            raise JoinError("a loop over this step's join is still running; finish it before starting another")

    def _count(self, value: float) -> float:
        """The sum of one number over the ranks: the one message outside steps."""
        one = torch.full((1,), value, device=self._device)
        self._mesh.reduce_(one, self._run.axes).wait()
        return float(one.item())

    def _leave(self, error: JoinError) -> None:
        """The loop was left before its end: by this rank alone, unless all had raised alike."""
        if self._broken is None and self.ranks > 1 and not self._together:
            self._break(error)
            self._mesh.failed(error, self._last_step)

    # -- failures ------------------------------------------------------------------------------

    def _usable(self) -> None:
        if self._broken is not None:
            kind, text = self._broken
            raise kind(f"this step cannot go on, it failed before: {text}")

    def _break(self, error: BaseException) -> None:
        """Never run again. The error itself is not kept: with its frames it would hold all that they know."""
        self._broken = type(error) if isinstance(error, FjoinError) else JoinError, str(error)

    def _raise(self, error: BaseException) -> NoReturn:
        """Let the other ranks know, and raise what really happened."""
        self._turn = None
        self._run.stop()
        if self._broken is not None or self.ranks == 1:
            raise error
        try:
            self._mesh.end(error, self._last_step)
        except BaseException as told:
            self._break(told)
            raise


def train_step(
    loss_fn: Callable[..., Any],
    pipeline: Pipeline,
    *,
    mesh: Mesh | None = None,
    donate: bool = True,
    weight: Callable[[Any], float] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    accumulate: int = 1,
    overlap_step: bool = False,
) -> TrainStep:
    """Make the training step of this rank from a loss and a pipeline.

    Gradients travel in buckets while the backward pass goes on, weighted so that the result is that
    of one process on all ranks' batches together; every rank then takes the same optimizer step.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`: the mean over the local batch, 0-d. With
            buffers: `(params, buffers, batch) -> (loss, aux, buffers)`. Numbers under aux["sum"] are
            summed over the ranks in the same messages, and come back in `metrics.sums`.
        pipeline: What `fuse` makes.
        mesh: The ranks; by default all of them, as the axis "data".
        donate: Let a step take the memory of the state it is given. False keeps the old state whole, at
            the price of a copy in each step.
        weight: `batch -> float`, this batch's weight in the mean: its samples, its tokens. By default
            each rank that has a batch counts 1. A 16-bit loss rounds it to its own precision.
        bucket_bytes: Gradients are sent once this much is ready.
        accumulate: Micro-batches in a step: the step is called once for each, and sends and steps in
            the last call of each window.
        overlap_step: Step each bucket as soon as its message is here, behind the messages that are
            still under way, where the hook is a plain reduction and the tensors are on the CPU. A
            loss that is not finite still changes nothing; a gradient that is not finite although all
            losses are is then noticed when buckets before it have been stepped, and leaves a torn
            state. The default checks all gradients before it changes anything.

    Returns:
        A `TrainStep`.

    Raises:
        TypeError, ValueError: an argument that cannot be used.

    Same as: torch's DistributedDataParallel, Join and optimizer in one, without their faults.

    >>> from fjoin import transforms as tx
    >>> def loss_fn(params, batch):
    ...     return ((params["w"] * batch - 1) ** 2).mean()
    >>> step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)), weight=len)
    >>> state = step.init({"w": torch.tensor(0.0)})
    >>> for batch in step.join([torch.ones(2), torch.ones(1)]):
    ...     state, metrics = step(state, batch)
    >>> state.params["w"], metrics.weight
    (tensor(0.3600), 1.0)
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, got {loss_fn!r}")
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"pipeline must be a Pipeline, got {pipeline!r}; write fuse(hook, optimizer)")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate must be a whole number, at least 1, got {accumulate!r}")
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be a whole number, at least 1, got {bucket_bytes!r}")
    mesh = mesh or make_mesh({"data": -1})
    reduce = make_plan(pipeline.hook, tuple(mesh.shape)).reduce
    if accumulate > 1 and reduce is not None and reduce.spec.name == "mean" and reduce.spec["over"] != "weight":
        raise ValueError(
            f"accumulate={accumulate} needs mean(..., over='weight'): the micro-batches of a window are weighted by what they "
            f"hold, got over={reduce.spec['over']!r}"
        )
    if pipeline.after is not None and _contains(pipeline.after.spec, "accumulate"):
        raise ValueError("after=... holds accumulate(...), but parameters cannot be accumulated; use every(steps, ...)")
    if _contains(pipeline.hook.spec, "accumulate"):
        raise ValueError(
            "the hook holds accumulate(...), which a train_step does itself: pass train_step(..., accumulate=k)"
        )
    run = Run(Loss(loss_fn, weight), pipeline, mesh, accumulate, overlap_step)
    return TrainStep(run, donate, bucket_bytes, accumulate)


def _contains(spec: Spec, name: str) -> bool:
    return spec.name == name or any(_contains(child.spec, name) for child in spec.children)
