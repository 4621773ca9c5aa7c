"""`train_step` and `TrainStep`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

from torch import Tensor

from .._errors import NonFinite
from ..buckets import Storage
from ..groups import Mesh, check_mesh, mesh as make_mesh
from ..records import compare, compare_values, described_tensors
from ..step import StateData, init_ends
from ..transforms.axes import bind_axes
from ..transforms.base import Transform, check_transform, checks, timings
from ..transforms.layout import Bucket, bucket_sizes, labels, make_layout
from ..transforms.pipelines import Pipeline, warn_if_silent
from . import _join
from ._join import InLoop
from ._loss import Loss, refuse_inference
from ._metrics import Metrics
from ._run import Run
from ._state import TrainState, check_buffers, check_state, check_values, flatten
from ._step_failures import StepFailures


def left_open(parts: Iterable[Transform], steps: int, gathers: bool) -> list[str]:
    """What is left undone, in words, with the call that finishes it.

    Args:
        parts: The transforms of the parameters and buffers.
        steps: The number of steps; 0 after a flush, until the next step.
        gathers: Whether there are gradients of an accumulation window.
    """
    found = []
    if steps and (left := [part for part in parts if timings.flushed(part, steps)]):
        found.append(
            f"after step {steps - 1} a window of {left[0]!r} is unfinished, so the ranks' values may differ; call "
            f"state = step.flush(state) at the end of training"
        )
    if gathers:
        found.append(
            "the gradients of an unfinished accumulation window are lost: the last micro-batches have had no step; loop over "
            "step.join(loader), which steps an incomplete window too, or call the step as often as accumulate= says"
        )
    return found


def make_state_data(
    run: Run, params: Any, buffers: dict[str, Tensor] | None, sync: str | None, bucket_bytes: int | None
) -> StateData:
    """Check that all ranks run the same program, and make the data of a state at step 0; see `TrainStep.init`."""
    flat, rebuild = flatten(params)
    pipeline, mesh = run.pipeline, run.mesh
    if sync is not None:
        check_values(flat)
    pipeline.check(flat)

    pieces = None
    if pipeline.sharding is not None:
        with bind_axes(mesh.axes):
            pieces = pipeline.sharding.pieces(flat, bucket_bytes)
    layout = pieces.buckets if pieces else make_layout(flat, labels(pipeline.optimizer), bucket_bytes)
    run.records.ids.number()
    on_buffers = run.on_buffers
    parts = {
        "pipeline": pipeline.spec.canonical(),
        "parameters": described_tensors(flat),
        "buffers": described_tensors(buffers or {}),
        "transform of buffers": "none" if on_buffers is None else on_buffers.spec.canonical(),
        "mesh": str(mesh.shape),
        "bucket_bytes": bucket_sizes(flat.values(), bucket_bytes)[0],
        "accumulate": run.accumulate,
        "weight": "1 for each rank with a batch" if run.loss.weight is None else "weight(batch)",
        "sync": repr(sync),
    }
    compare(mesh, "step.init", parts, shown={"pipeline": repr(pipeline), "transform of buffers": repr(on_buffers)})
    run.loss.check(buffers is not None)
    if run.ranks > 1 and mesh.rank == 0:
        warn_if_silent(pipeline, tuple(mesh.shape), run.ranks, stacklevel=3)

    def memory(bucket: Bucket) -> Tensor | None:  # pieces are gathered without a copy
        return mesh.zeros(bucket.numel, bucket.dtype, bucket.device, (pieces.axis,)) if pieces else None

    storage = Storage(layout, flat, pipeline.optimizer, pieces, memory)
    own = None if buffers is None else {path: b.detach().clone() for path, b in buffers.items()}
    if sync == "broadcast":
        for tensor in [*storage.flats, *(own or {}).values()]:
            for axis in mesh.over(run.axes):
                if axis.size > 1:
                    tensor.copy_(axis.run("pbroadcast", tensor, 0))
    elif sync == "check":
        compare_values(mesh, storage.leaves, own)
    # After `sync`, from the final parameters.
    storage.make_slots(exact=pipeline.sharding is not None and pipeline.sharding.codec is not None)
    held = storage.own_leaves()
    hook = run.reducer.init(storage)
    slots = storage.optimizer_states() if pipeline.ends else {}
    ends = init_ends(pipeline, held, slots, storage.flats)
    run.close()
    run.token = object()  # states of an earlier init may have another layout
    outer = pipeline.skips.begin(()) if pipeline.skips else None
    body = StateData(storage=storage, buffers=own, hook=hook, ends=ends, rebuild=rebuild, owner=run.token, outer=outer)
    body.buffers_before = own
    if own is not None and run.on_buffers is not None:
        body.buffers_state = run.on_buffers.init(own)
    return body


B = TypeVar("B")


class TrainStep:
    """One training step on this rank; made by `train_step`.

    Call it as `state, metrics = step(state, batch)`, inside `for batch in step.join(loader)` where ranks may hold more
    or fewer batches.

    Attributes:
        ranks: The number of ranks that step together.
        rank: This rank in the mesh.
        pipeline: The pipeline that it runs.
        held: The data of the newest state.
    """

    def __init__(self, run: Run, donate: bool, bucket_bytes: int | None) -> None:
        self._donate = donate
        self.run: Run = run
        self.bucket_bytes: int | None = bucket_bytes
        self.pipeline: Pipeline = run.pipeline
        self.ranks: int = run.ranks
        self.rank: int = run.mesh.rank
        self.failures: StepFailures = StepFailures(run)
        self._left = 0, False  # see `left_open`
        self.held: StateData | None = None
        self._in_loop = InLoop(run, self.failures)

    def __repr__(self) -> str:
        return f"train_step({self.pipeline!r}, rank={self.rank}, ranks={self.ranks})"

    def init(
        self,
        params: Any,
        buffers: dict[str, Tensor] | None = None,
        sync: Literal["broadcast", "check"] | None = "broadcast",
    ) -> TrainState:
        """The initial state, after a check that all ranks run the same program.

        Args:
            params: A pytree of floating-point tensors; they are copied.
            buffers: Path -> tensor, untrained values that `loss_fn` may update. It does not write into them
                but returns new ones: it is called as `loss_fn(params, buffers, batch)` and returns
                `(loss, aux, buffers)`.
            sync: "broadcast" gives all ranks rank 0's parameters and buffers, "check" raises where
                they differ, None assumes that they are equal.

        Returns:
            A `TrainState` at step 0.

        Warns:
            UserWarning: on rank 0 of several: nothing in the pipeline reduces, and no `identity` marks this as
                intended.

        Raises:
            DesyncError: on all ranks: another pipeline, path, shape, dtype or setting on some rank.
            TypeError, ValueError: a leaf that cannot be trained, a partition that does not fit, `on_buffers`
                without buffers.
        """
        if sync not in ("broadcast", "check", None):
            raise ValueError(f"sync must be 'broadcast', 'check' or None, got {sync!r}")
        self.failures.check()
        refuse_inference("init")
        check_buffers(buffers)
        if buffers is None and self.run.on_buffers is not None:
            raise ValueError(f"on_buffers={self.run.on_buffers!r} was given, but init got no buffers")
        try:
            body = make_state_data(self.run, params, buffers, sync, self.bucket_bytes)
            self._in_loop.device = body.storage.layout[0].device if body.storage.layout else None
            self.run.records.forget()
            self._left, self.held = (0, False), body
            return TrainState(body)
        except BaseException as error:
            self._in_loop.fail(error)

    def close(self) -> None:
        """Free the step's buffers and hooks; states stay readable, and the step can be called again on all ranks.

        Raises:
            NonFinite: on all ranks: a device has left out one of the last two steps.

        Warns:
            UserWarning: the last steps have not been averaged, see `flush`; or an accumulation window is unfinished.
        """
        self.run.close()
        self.held = None
        left, self._left = self._left, (0, False)
        for text in left_open(self.run.ends, *left) if self.failures.broken is None else ():
            warnings.warn(text, stacklevel=2)
        self.failures.drain()

    def flush(self, state: TrainState) -> TrainState:
        """Average what the ranks have trained since the last average; for the end of training, on all ranks.

        The transforms after the optimizer that would run in later steps, such as those in `every`, run now, with the
        weights since their last run, and so does `on_buffers`. Results that wait for their step are used, in the order
        of their steps. First the ranks compare their steps, in one small message.

        Args:
            state: The state that `init` or the last call returned; its memory is taken, as by a step.

        Returns:
            The new state, with the same `step`.

        Raises:
            NonFinite: on all ranks: some of them left out one of the last two steps. The given state is unchanged.
            DesyncError: on all ranks: others have called a step, or flush after another step.
            TypeError: `state` is no TrainState.
            ValueError: `state` is within an accumulation window.
            PeerLost, CollectiveTimeout, DonatedState, TornState: as a step.
        """
        self.failures.check()
        try:
            body = check_state(state)._claim(self.run.token)
            if body.window:
                raise ValueError("flush within an accumulation window; call it after the last call of a window")
            if not self._donate:
                body = body.clone()
            self._in_loop.compare("step.flush before any step", begins=False)
            self.run.flush(body)
        except NonFinite:  # raised by all ranks at the same place; nothing has changed
            raise
        except BaseException as error:
            self._in_loop.fail(error)
        self._left, self.held = (0, False), body
        body.version += 1
        return TrainState(body)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One step, or one micro-batch of an accumulation window.

        Args:
            state: The state that `init` or the last call returned. The step takes its memory, unless the
                step was made with donate=False.
            batch: The argument of `loss_fn` and `weight`. Ignored where this rank is out of input, except with
                when_exhausted="replay".

        Returns:
            The new state and the step's `Metrics`.

        Raises:
            NonFinite: on all ranks; the given state is unchanged and can be used again.
            PeerLost, CollectiveTimeout: another rank failed, or did not arrive in time.
            DesyncError: on all ranks: they have called different steps of one mesh; nothing has changed.
            DonatedState, TornState: `state` can no longer be stepped.
            TypeError, ValueError: `loss_fn` or `weight` returned an unusable value; the first loss depends on no
                parameter.
        """
        if self.failures.broken is not None:
            self.failures.check()
        iteration, body, given = self._in_loop.iteration, None, None
        try:
            if iteration is not None:
                self._in_loop.called(iteration)
            given = body = check_state(state)._claim(self.run.token)
            if not self._donate:
                body = body.clone()
            if self.run.step_check.reads.under_way:
                self.run.step_check.raise_pending()
            self.failures.last_step = body.step
            if iteration is None and not self._in_loop.compared:
                self._in_loop.compare("a loop without step.join")
            metrics = self.run(body, batch, iteration)
            self._left = body.step, bool(body.window)
        except NonFinite:  # raised by all ranks at the same place; nothing has changed
            if given is not None and body is not None and given is not body:
                given.lose_window(body.calls)
            self.run.stop()
            raise
        except BaseException as error:
            if body is not None and body.window and not body.torn:
                body.lose_window(body.calls - body.calls % self.run.accumulate)
                body.lost = (
                    f"a call failed within an accumulation window, whose gradients are lost: {error!r}. The state can be read; "
                    f"go on from the last completed step with state.clone()"
                )
            self._in_loop.fail(error)
        body.version += 1
        self.held = body
        return TrainState(body), metrics

    def join(
        self,
        loader: Iterable[B],
        *,
        empty: Any = _join.NO_BATCH,
        throw_on_early_termination: bool = False,
        when_exhausted: Literal["shadow", "replay"] = "shadow",
    ) -> _join.JoinedLoader[B]:
        """Iterate over this rank's loader until all ranks are out of input.

        A rank that is out of input gets its last batch again, so that the loop body's code runs; the step computes
        nothing for it and takes part with weight 0. The loop looks one batch ahead, so the ranks end together without
        extra messages; one small message at the start finds out whether any rank has a batch. The body must call the
        step exactly once in each iteration. All ranks may leave it after the same step: a rank that leaves it, also by
        an exception, waits for the others to.

        Args:
            loader: Any iterable of batches, of any length on each rank, 0 included. It must not write the next batch
                into the memory of the current one: a loader that reuses its buffer must yield copies. Writes by tensor
                operations are detected at once, writes by numpy one batch later.
            empty: The batch for a rank that never has one; every use of the default raises `NoBatch`.
            throw_on_early_termination: Raise on all ranks after the step in which the first rank is out of input. This
                waits for the step's messages in every iteration.
            when_exhausted: The behaviour of a rank without input, or with a batch of weight 0. "shadow" computes
                nothing, so on several ranks `loss_fn` must not communicate over the step's axes. "replay" runs
                `loss_fn` on the last batch and discards its gradients: for models that communicate in their forward
                pass. `transforms.current_weight()` is then 0, and a rank that never has a batch needs `empty`.

        Returns:
            A `JoinedLoader`: an iterable of the batches for the body to pass to the step, which also stops the loop on
            all ranks and has a position to resume at. Each `for` loop over it is an epoch.

        Raises:
            EarlyTermination: on all ranks, see above.
            JoinError: the body did not call the step exactly once, or some ranks left it; the loader has written into
                the previous batch; raised by the step: `loss_fn` communicates although ranks without input do not call
                it.
            PeerLost: another rank left the loop, or failed.
        """
        return _join.JoinedLoader([self._in_loop], loader, empty, throw_on_early_termination, when_exhausted)


def train_step(
    loss_fn: Callable[..., Any],
    pipeline: Pipeline,
    *,
    mesh: Mesh | None = None,
    donate: bool = True,
    weight: Callable[[Any], float] | None = None,
    bucket_bytes: int | None = None,
    accumulate: int = 1,
    on_buffers: Transform | None = None,
) -> TrainStep:
    """Make the training step of this rank from a loss and a pipeline.

    >>> from fjoin import transforms as tx
    >>> def loss_fn(params, batch):
    ...     return ((params["w"] * batch - 1) ** 2).mean()
    >>> step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)), weight=len)
    >>> state = step.init({"w": torch.tensor(0.0)})
    >>> for batch in step.join([torch.ones(2), torch.ones(1)]):
    ...     state, metrics = step(state, batch)
    >>> state.params["w"], metrics.weight
    (tensor(0.3600), 1.0)

    Gradients travel in buckets during the backward pass, weighted so that the result equals that of one
    process on all ranks' batches together; every rank then takes the same optimizer step.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`: the mean over the local batch, 0-d. With
            buffers: `(params, buffers, batch) -> (loss, aux, buffers)`. Numbers under aux["sum"] are
            summed over the ranks in the same messages, and returned in `metrics.sums`.
        pipeline: A `Pipeline`, made by `fuse`.
        mesh: The ranks; by default all ranks, as the axis "data".
        donate: Whether a step takes the memory of the state it is given. False keeps the old state usable,
            at the cost of a copy in each step.
        weight: `batch -> float`, this batch's weight in the mean: its samples, its tokens; 0, or from 1e-30 to 1e30. By
            default each rank that has a batch counts 1. It is a number of the host: for a tensor on a device the host
            waits in each step. In a window of several calls a 16-bit loss rounds it to its own precision. Gradients of
            float16 travel times this rank's share of the sum of the weights, so that weights of thousands do not
            overflow in a `mean`.
        bucket_bytes: The size in bytes at which a bucket of gradients is sent; by default 5 MiB on the CPU and 25 MiB
            on accelerators. More, such as 20 * 2**20, can be faster where a hook sends little of each bucket in several
            messages, as `power_sgd` does.
        accumulate: The number of micro-batches in a step: the step is called once for each, and sends and steps in
            the last call of each window. In a loop of `join` a window at the end may be shorter, also where a rank ends
            in the middle of one; its weights count as they are.
        on_buffers: The transform of the buffers at the end of a step: `average_buffers(axis)`,
            `broadcast_buffers(axis)`, different ones for different buffers with `partition`, or only in some steps with
            `every`. By default each rank keeps its own buffers.

    Returns:
        A `TrainStep`.

    Raises:
        TypeError, ValueError: an argument that cannot be used.

    Same as: torch's DistributedDataParallel, Join and optimizer in one.
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, got {loss_fn!r}")
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"pipeline must be a Pipeline, got {pipeline!r}; write fuse(hook, optimizer)")
    if weight is not None and not callable(weight):
        raise TypeError(f"weight must be a function of the batch, or None, got {weight!r}")
    checks.flag("donate", donate)
    checks.whole_number("accumulate", accumulate, 1)
    if bucket_bytes is not None:
        checks.whole_number("bucket_bytes", bucket_bytes, 1)
    mesh = check_mesh("train_step", make_mesh({"data": -1}) if mesh is None else mesh)
    if any(part.facts.pauses for part in pipeline.ends):
        raise ValueError("after or on_state holds accumulate(...), but parameters do not add up; use every(steps, ...)")
    if pipeline.hook.facts.pauses:
        raise ValueError("the hook holds accumulate(...), which a train_step does itself: pass accumulate=k to it")
    if on_buffers is not None:
        check_transform(on_buffers, "train_step: on_buffers")
        if on_buffers.facts.pauses:
            raise ValueError("on_buffers holds accumulate(...), but buffers are not accumulated; use every(steps, ...)")
    run = Run(Loss(loss_fn, weight), pipeline, mesh, accumulate, on_buffers)
    return TrainStep(run, donate, bucket_bytes)
