"""The training step: a pipeline, run bucket by bucket while the backward pass goes on."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar

import optree
import torch
from torch import Tensor

from . import _join
from ._agree import check_program, same_values, sum_names
from ._axis import Work
from ._errors import FjoinError, JoinError, NonFinite
from ._guard import Guard, Verdict
from ._mesh import Mesh
from ._mesh import mesh as make_mesh
from ._metrics import Metrics
from ._state import Body, TrainState
from ._storage import Storage
from ._wire import Outgoing, Queue
from .transforms._base import Pipeline, Transform
from .transforms._combine import stages
from .transforms._layout import BUCKET_BYTES, lane_bucket, make_layout
from .transforms._plan import make_plan
from .transforms._spec import Spec
from .transforms._tree import check_dense, path_string
from .transforms.axes._collectives import names as axis_names
from .transforms.axes._env import bind_axes
from .transforms.sync._lane import MASK_BITS, encode_lane, host_words, lane_dtype, step_lane, words_per_scalar
from .transforms.sync._mean import MeanState

B = TypeVar("B")


class TrainStep:
    """One training step on this rank; made by `train_step`.

    Call it as `state, metrics = step(state, batch)`, inside `for batch in step.join(loader)` where
    ranks may hold different numbers of batches.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        pipeline: Pipeline,
        mesh: Mesh,
        donate: bool,
        weight: Callable[[Any], float] | None,
        bucket_bytes: int,
        accumulate: int,
    ) -> None:
        self._loss_fn, self._mesh, self._donate, self._weight = loss_fn, mesh, donate, weight
        self._bucket_bytes, self._accumulate = bucket_bytes, accumulate
        self.pipeline = pipeline
        self._skip = pipeline.spec.name == "skip_if_nonfinite"
        self._plan = make_plan(pipeline.hook)
        reduce = self._plan.reduce
        self._axes = axis_names(reduce.spec["axis"]) if reduce else tuple(mesh.shape)
        self.ranks = math.prod(axis.size for axis in mesh.over(self._axes))
        self.rank = mesh.rank
        self._queue: Queue | None = None
        self._carrier: Outgoing | None = None  # the bucket whose message carries the lane
        self._lane_wire: Tensor | None = None  # the lane's own message, where neither bucket nor hook carries it
        self._names: tuple[str, ...] = ()  # in the lane, once the ranks have agreed
        self._device: torch.device | None = None
        self._handles: list[Any] = []
        self._turn: _join.Turn | None = None
        self._broken: BaseException | None = None
        self._last_step: int | None = None
        self._guard = Guard(self.ranks)
        self._symmetric = False  # the last error was raised by all ranks alike

    # -- set-up ------------------------------------------------------------------------------

    def init(
        self,
        params: Any,
        buffers: dict[str, Tensor] | None = None,
        sync: Literal["broadcast", "check"] | None = "broadcast",
    ) -> TrainState:
        """The state to start from, after a check that all ranks run the same program.

        Args:
            params: A pytree of floating-point tensors; they are copied.
            buffers: Path -> tensor, what `loss_fn` may update without training it. Where given,
                `loss_fn` is called as `loss_fn(params, buffers, batch)` and returns
                `(loss, aux, buffers)`. Each rank keeps its own.
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
            raise self._fail(error) from error

    def _init(self, params: Any, buffers: dict[str, Tensor] | None, sync: str | None) -> TrainState:
        flat, rebuild = _flatten(params)
        optimizer = self.pipeline.optimizer
        if optimizer.check:
            optimizer.check(flat)

        def label(path: str) -> Any:
            part = optimizer.at(path)
            return id(part) if part.elementwise else path

        layout = make_layout(flat, label, self._bucket_bytes)
        check_program(self._mesh, self.pipeline, flat, self._bucket_bytes, self._accumulate, buffers)
        storage = Storage(layout, flat, optimizer)
        own = None if buffers is None else {path: b.detach().clone() for path, b in buffers.items()}
        if sync == "broadcast":
            for tensor in [*storage.flats, *(own or {}).values()]:
                for axis in self._mesh.over(self._axes):
                    if axis.size > 1:
                        tensor.copy_(axis.run("pbroadcast", tensor, 0))
        elif sync == "check":
            same_values(self._mesh, storage.leaves, own)
        by_path = {path: leaf.detach() for path, leaf in storage.leaves.items()}
        hook = self.pipeline.hook.init(by_path)
        after = self.pipeline.after.init(by_path) if self.pipeline.after else ()
        self._queue = None
        self._device = layout[0].device if layout else None
        body = Body(storage, own, hook, after, rebuild)
        self._attach(storage)
        return TrainState(body)

    def _prepare(self, storage: Storage, known: list[str] | None) -> None:
        """Make the buffers of the messages, once all ranks know what the lane holds."""
        layout = storage.layout
        self._names = step_lane(self.ranks, sum_names(self._mesh, known))
        dtype = lane_dtype(bucket.dtype for bucket in layout)
        words = len(self._names) * words_per_scalar(dtype)
        carrier = lane_bucket(layout) if self._plan.reduce else None
        outgoing = [Outgoing(bucket, words if i == carrier else 0) for i, bucket in enumerate(layout)]
        self._queue = Queue(outgoing, self._launch)
        self._carrier = None if carrier is None else outgoing[carrier]
        hook_carries = self._plan.reduce is None and self.pipeline.hook.sums is not None
        alone = carrier is None and not hook_carries
        self._lane_wire = torch.zeros(words, dtype=dtype, device=self._device) if alone else None

    def _write_lane(self, lane: dict[str, Any], wire: Tensor) -> None:
        if wire.device.type == "cpu":
            wire.copy_(torch.tensor(host_words(lane, wire.dtype, self.ranks), dtype=wire.dtype))
        else:
            wire.copy_(encode_lane(lane, wire.dtype, self.ranks, wire.device))

    def _check_names(self, lane: dict[str, Any], live: bool) -> None:
        """Raise where aux["sum"] has not the names of the first step."""
        have = sorted(n.removeprefix("sum.") for n in lane if n.startswith("sum."))
        want = sorted(n.removeprefix("sum.") for n in self._names if n.startswith("sum."))
        if live and have != want:
            raise ValueError(f"aux['sum'] has the names {have}, but in the first step it had {want}; they must stay the same")

    def _launch(self, wire: Tensor) -> Work:
        return self._mesh.reduce_(wire, self._axes)

    def _attach(self, storage: Storage) -> None:
        """Have every leaf tell when its gradient has arrived.

        The hooks know the step weakly: one that held it would keep all its memory for ever.
        """
        me = weakref.ref(self)

        def hook_of(index: int) -> Callable[[Tensor], None]:
            def arrived(_: Tensor) -> None:
                step = me()
                if step is not None and step._queue is not None:
                    step._queue.arrived(index)

            return arrived

        for i, leaves in enumerate(storage.by_bucket):
            for leaf in leaves:
                self._handles.append(leaf.register_post_accumulate_grad_hook(hook_of(i)))
        if not self._donate:
            del self._handles[: -2 * len(storage.leaves) or None]

    def close(self) -> None:
        """Free the step's buffers and hooks; states stay readable."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._queue = self._carrier = self._lane_wire = None

    # -- a step ------------------------------------------------------------------------------

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
        self._symmetric = False
        turn = self._turn
        try:
            if turn is not None:
                if turn.called:
                    raise JoinError(
                        f"the loop body called the step twice in iteration {turn.number}; call it exactly once in each, "
                        f"and use fjoin.train_step(..., accumulate=k) for several batches in one step",
                        step=self._last_step,
                    )
                turn.called = True
            if not isinstance(state, TrainState):
                raise TypeError(f"state must be what step.init returned, got a {type(state).__name__}")
            body = state._claim()
            if not self._donate:
                body = body.clone()
                self._attach(body.storage)
            self._guard.raise_pending()
            self._last_step = body.step
            metrics = self._run(body, batch, turn)
        except NonFinite:  # raised by all ranks at the same place: nothing has changed
            self._symmetric = True
            raise
        except BaseException as error:
            raise self._fail(error) from error
        body.version += 1
        return TrainState(body), metrics

    def _run(self, body: Body, batch: Any, turn: _join.Turn | None) -> Metrics:
        live = turn is None or turn.live
        weight = self._weigh(batch) if live else 0.0
        storage = body.storage
        if self._queue is not None:
            self._queue.stop()
        if not body.window:
            for leaf in storage.leaves.values():
                leaf.grad = None
        loss, aux, buffers = self._forward(body, batch) if weight else (None, None, body.buffers)
        sums = None if loss is None else _user_sums(aux)
        lane = self._lane_values(body, weight, loss, sums)
        if (body.calls + 1) % self._accumulate:  # within a window: nothing is sent
            if loss is not None:
                self._backward(loss, weight)
            body.window, body.buffers, body.calls = lane, buffers, body.calls + 1
            return Metrics(body.step, False, aux, dict, self._guard.raise_pending)

        if self._queue is None:
            known = [n.removeprefix("sum.") for n in lane if n.startswith("sum.")]
            self._prepare(storage, known if lane["weight"] else None)
        lane["has_next"] = float(turn is not None and turn.has_next)
        self._check_names(lane, live=bool(lane["weight"]))
        lane = {name: lane.get(name, 0.0) for name in self._names}
        queue = self._queue
        assert queue is not None
        queue.start(storage.by_bucket, storage.shapes, send=self._plan.reduce is not None)
        alone: Work | None = None
        if self._lane_wire is not None:
            self._write_lane(lane, self._lane_wire)
            alone = self._launch(self._lane_wire)
        elif self._carrier is not None:
            self._write_lane(lane, self._carrier.lane)
        if loss is not None:
            self._backward(loss, weight)
        queue.finish()
        if self._plan.reduce is not None:
            for out in queue.outgoing:
                out.arrive()
        if alone is not None:
            alone.wait()
        return self._finish(body, queue, lane, aux, buffers, turn)

    def _weigh(self, batch: Any) -> float:
        if self._weight is None:
            return 1.0
        value = self._weight(batch)
        weight = float(value)
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"weight(batch) must be a finite number that is not negative, got {value!r} on rank {self.rank}"
            )
        return weight

    def _forward(self, body: Body, batch: Any) -> tuple[Tensor, Any, dict[str, Tensor] | None]:
        params = body.rebuild(dict(body.storage.leaves))
        with torch.enable_grad(), bind_axes(self._mesh.axes):
            if body.buffers is None:
                out = self._loss_fn(params, batch)
            else:
                out = self._loss_fn(params, body.buffers, batch)
        want = "loss or (loss, aux)" if body.buffers is None else "(loss, aux, buffers)"
        parts = out if isinstance(out, tuple) else (out,)
        if (len(parts) != 3) if body.buffers is not None else len(parts) > 2:
            raise TypeError(f"loss_fn must return {want}, got {len(parts)} values")
        loss, aux = parts[0], parts[1] if len(parts) > 1 else None
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            what = f"a tensor of shape {tuple(loss.shape)} and dtype {loss.dtype}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f"loss_fn must return a 0-d floating-point loss, the mean over the local batch, got {what}")
        if not loss.requires_grad:
            raise ValueError("the loss does not depend on params; was it detached, or computed from other tensors?")
        buffers = None if body.buffers is None else {k: b.detach() for k, b in parts[2].items()}
        if buffers is not None and body.buffers is not None and buffers.keys() != body.buffers.keys():
            raise ValueError(f"loss_fn returned buffers {sorted(buffers)}, expected {sorted(body.buffers)}")
        return loss, aux, buffers

    def _share(self, weight: float) -> float:
        """The factor of this rank's gradients in the sum."""
        reduce = self._plan.reduce
        by_weight = reduce is None or reduce.spec.name == "sum_over" or reduce.spec["over"] == "weight"
        return weight if by_weight else float(weight > 0)

    def _lane_values(self, body: Body, weight: float, loss: Tensor | None, own: dict[str, Any] | None) -> dict[str, Any]:
        """The lane of this window so far: this call's values added to those of the calls before."""
        value: Any = 0.0
        if loss is not None:
            value = loss.detach().double()
            value = weight * (value.item() if value.device.type == "cpu" else value)
        lane: dict[str, Any] = {"total": self._share(weight), "weight": weight, "loss": value}
        bit = float(2 ** (self.rank % MASK_BITS))
        mask = f"nonfinite{self.rank // MASK_BITS}"
        if isinstance(value, Tensor):
            lane[mask] = bit * (~torch.isfinite(value)).double()
        else:
            lane[mask] = bit * (not math.isfinite(value))
        lane.update({f"sum.{name}": v for name, v in (own or {}).items()})
        if body.window:
            before = body.window
            lane = {n: lane.get(n, 0.0) + before.get(n, 0.0) for n in {**before, **lane}}
            lane[mask] = torch.clamp(lane[mask], max=bit) if isinstance(lane[mask], Tensor) else min(lane[mask], bit)
        return lane

    def _backward(self, loss: Tensor, weight: float) -> None:
        # Seeding with the share makes the weighting of the gradients free.
        seed = 1.0 if self._plan.reduce is None and self._accumulate == 1 else self._share(weight)
        loss.backward(None if seed == 1.0 else torch.full_like(loss, seed))

    def _finish(
        self, body: Body, queue: Queue, lane: dict[str, Any], aux: Any, buffers: Any, turn: _join.Turn | None
    ) -> Metrics:
        """After all messages: decide whether this step may change anything, and step."""
        hook = body.hook
        if self._carrier is not None or self._lane_wire is not None:
            wire = self._carrier.lane if self._carrier is not None else self._lane_wire
            assert wire is not None
            sums = self._guard.read_lane(wire, self._names, self.ranks)
            if self._plan.reduce is None:
                hook = self._run_hook(body, queue, lane)
        else:  # the hook takes the lane along
            hook = self._run_hook(body, queue, lane)
            carried = self.pipeline.hook.sums(hook)  # type: ignore[misc]
            sums = self._guard.from_tensors({**carried.lane, "total": carried.total})
        divisor: Any = self._divisor(sums)
        if self._plan.rest and self._plan.reduce is not None:
            hook = self._run_rest(body, queue, sums, divisor)
            divisor = 1.0
        elif self._plan.reduce is not None:
            hook = self._reduced_state(sums, divisor)
        if turn is not None:
            turn.others = lambda: self._guard.host(sums)["has_next"]
        verdict = self._guard.judge(body.step, sums, queue.outgoing, divisor, self._plan.clip)
        step = body.step
        if verdict.error is not None and not self._skip:
            body.window = {}
            raise verdict.error
        if verdict.changes:
            self._apply(body, queue, verdict)
            body.hook = hook if verdict.found_inf is None else self._guard.keep(verdict.found_inf, hook, body.hook)
        body.buffers, body.window = buffers, {}
        body.calls, body.step = body.calls + 1, body.step + 1
        return Metrics(step, True, aux, lambda: self._guard.host(sums), self._guard.raise_pending)

    def _divisor(self, sums: Any) -> Any:
        """What the sums are to be divided by."""
        reduce = self._plan.reduce
        if reduce is None or reduce.spec.name == "sum_over":
            return 1.0
        return float(self.ranks) if reduce.spec["over"] == "world" else sums["total"]

    def _reduced_state(self, sums: Any, divisor: Any) -> Any:
        """The state that the pure hook would return after these messages."""
        reduce = self._plan.reduce
        assert reduce is not None
        total = sums["total"] if reduce.spec.name == "sum_over" else divisor
        lane = {n: torch.as_tensor(v, dtype=torch.float64) for n, v in sums.items() if n != "total"}
        state = MeanState(torch.as_tensor(total, dtype=torch.float64), lane)
        return state if len(stages(self.pipeline.hook)) == 1 else (state, *((),) * (self._plan.clip is not None))

    def _run_hook(self, body: Body, queue: Queue, lane: dict[str, Any]) -> Any:
        """Run a hook that is no plain reduction, as it stands, on all gradients; they stay in the buckets."""
        weight = lane["weight"]
        if self._accumulate > 1 and weight:  # the window's sum of weighted gradients, back to their mean
            for out in queue.outgoing:
                out.grads.div_(weight)
        carried = {n: v for n, v in lane.items() if n != "total"} if self.pipeline.hook.sums else None
        return self._run_stages((self.pipeline.hook,), (body.hook,), body, queue, weight=weight, lane=carried)[0]

    def _run_rest(self, body: Body, queue: Queue, sums: Any, divisor: Any) -> Any:
        """Run the stages behind the reduction on all gradients."""
        for out in queue.outgoing:
            out.grads.div_(divisor if not isinstance(divisor, float) or divisor else 1.0)
        first = self._reduced_state(sums, divisor)
        first = first if isinstance(first, MeanState) else first[0]
        old = body.hook[1:]
        return (first, *self._run_stages(self._plan.rest, old, body, queue, weight=first.total, lane=None))

    def _run_stages(
        self, parts: tuple[Transform, ...], states: tuple[Any, ...], body: Body, queue: Queue, **extra: Any
    ) -> tuple[Any, ...]:
        params = {path: leaf.detach() for path, leaf in body.storage.leaves.items()}
        where = {path: grad for out in queue.outgoing for path, grad in out.by_path().items()}
        where = {path: where[path] for path in params}
        grads, new = dict(where), []
        with torch.no_grad(), bind_axes(self._mesh.axes):
            for part, state in zip(parts, states, strict=True):
                grads, after = part.update(grads, state, params, **extra)
                new.append(after)
            if where:
                torch._foreach_copy_(list(where.values()), [grads[path] for path in where])
        return tuple(new)

    def _apply(self, body: Body, queue: Queue, verdict: Verdict) -> None:
        """Step every bucket in place."""
        storage = body.storage
        body.torn = f"step {body.step} failed after it had changed some of the parameters; load a checkpoint, or use donate=False"
        with torch.no_grad():
            for i, out in enumerate(queue.outgoing):
                for optimizer, param, grad, slots in storage.ranges(i, out.grads):
                    optimizer.step_param_(param, grad, slots, grad_scale=verdict.scale, found_inf=verdict.found_inf)
            if self.pipeline.after:
                self._run_after(body, verdict)
        body.torn = ""

    def _run_after(self, body: Body, verdict: Verdict) -> None:
        after = self.pipeline.after
        assert after is not None
        params = {path: leaf.detach() for path, leaf in body.storage.leaves.items()}
        with bind_axes(self._mesh.axes):
            new, body.after = after.update(params, body.after, params)
        if params:
            torch._foreach_copy_(list(params.values()), [new[path] for path in params])

    # -- uneven inputs and failures ------------------------------------------------------------

    def join(
        self, loader: Iterable[B], *, empty: Any = _join.NO_BATCH, throw_on_early_termination: bool = False
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

        Raises:
            EarlyTermination: on all ranks, see above.
            JoinError: the body did not call the step exactly once, or was left early.
        """
        return _join.join(self, loader, empty=empty, throw_on_early_termination=throw_on_early_termination)

    def _begin_join(self) -> None:
        self._usable()
        if self._turn is not None:
            raise JoinError("a loop over this step's join is still running; finish it before starting another")

    def _count(self, value: float) -> float:
        """The sum of one number over the ranks: the one message outside steps."""
        device = self._device if self._device is not None else torch.device("cpu")
        one = torch.full((1,), value, device=device)
        try:
            self._mesh.reduce_(one, self._axes).wait()
        except BaseException as error:
            raise self._fail(error) from error
        return float(one.item())

    def _usable(self) -> None:
        if self._broken is not None:
            error = self._broken
            raise type(error)(f"this step cannot go on: {error}") if isinstance(error, FjoinError) else JoinError(
                f"this step cannot go on, it failed before: {type(error).__name__}: {error}", step=self._last_step
            ) from error

    def _fail(self, error: BaseException) -> BaseException:
        """Let the other ranks know, and say what really happened."""
        if self._broken is None:
            told = self._mesh.account(error, self._last_step)
            self._mesh.failed(told, self._last_step)
            if self._mesh.size > 1:
                self._broken = told
            error = told
        self._turn = None
        if self._queue is not None:
            self._queue.stop()
        return error

    def _leave(self, error: JoinError) -> None:
        """The loop was left before its end."""
        if self._broken is None and self._mesh.size > 1 and not self._symmetric:
            self._broken = error
            self._mesh.failed(error, self._last_step)


def _user_sums(aux: Any) -> dict[str, Any] | None:
    """aux["sum"], the numbers to be summed over all ranks."""
    if not isinstance(aux, dict) or "sum" not in aux:
        return None
    sums = {}
    for name, value in aux["sum"].items():
        if isinstance(value, Tensor):
            if value.dim():
                raise ValueError(f"aux['sum'][{name!r}] must be a scalar, got a tensor of shape {tuple(value.shape)}")
            value = value.detach()
            value = float(value.item()) if value.device.type == "cpu" else value.double()
        elif not isinstance(value, (int, float)):
            raise TypeError(f"aux['sum'][{name!r}] must be a number or a 0-d tensor, got {value!r}")
        sums[name] = value
    return sums


def _flatten(params: Any) -> tuple[dict[str, Tensor], Callable[[dict[str, Any]], Any]]:
    """Path -> leaf in the order in which they were registered, and the way back."""
    with optree.dict_insertion_ordered(True, namespace="fjoin"):
        paths, leaves, structure = optree.tree_flatten_with_path(params, namespace="fjoin")
    names = [path_string(path) for path in paths]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"several leaves of params have the paths {twice}; rename them")
    for name, leaf in zip(names, leaves, strict=True):
        check_dense(f"params[{name!r}]", leaf)

    def rebuild(flat: dict[str, Any]) -> Any:
        return optree.tree_unflatten(structure, [flat[name] for name in names])

    return dict(zip(names, leaves, strict=True)), dict if type(params) is dict and names == list(params) else rebuild


def train_step(
    loss_fn: Callable[..., Any],
    pipeline: Pipeline,
    *,
    mesh: Mesh | None = None,
    donate: bool = True,
    weight: Callable[[Any], float] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    accumulate: int = 1,
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
            each rank that has a batch counts 1.
        bucket_bytes: Gradients are sent once this much is ready.
        accumulate: Micro-batches in a step: the step is called once for each, and sends and steps in
            the last call of each window.

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
    if _contains(pipeline.hook.spec, "accumulate"):
        raise ValueError("the hook holds accumulate(...), which a train_step does itself: pass train_step(..., accumulate=k)")
    return TrainStep(
        loss_fn, pipeline, mesh or make_mesh({"data": -1}), donate, weight, bucket_bytes, accumulate
    )


def _contains(spec: Spec, name: str) -> bool:
    return spec.name == name or any(_contains(child.spec, name) for child in spec.children)
