"""The training step: a pipeline that runs bucket by bucket during the backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

from torch import Tensor

from .._errors import NonFinite
from ..transforms.pipelines._pipeline import Pipeline
from . import _join_steps as _join
from ._failures import Failures
from ._in_loop import InLoop
from ._init_state import make_state_data
from ._left_open import left_open
from ._run import Run
from .passes._loss import refuse_inference
from .state._metrics import Metrics
from .state._params import check_buffers
from .state._state import TrainState, check_state

B = TypeVar("B")


class TrainStep:
    """One training step on this rank; made by `train_step`.

    Call it as `state, metrics = step(state, batch)`, inside `for batch in step.join(loader)` where ranks may hold more or fewer batches.

    Attributes:
        ranks: The number of ranks that step together.
        rank: This rank in the mesh.
        pipeline: The pipeline that it runs.
    """

    def __init__(self, run: Run, donate: bool, bucket_bytes: int | None) -> None:
        self._donate = donate
        self.run: Run = run
        self.bucket_bytes: int | None = bucket_bytes
        self.pipeline: Pipeline = run.pipeline
        self.ranks: int = run.ranks
        self.rank: int = run.mesh.rank
        self._failures = Failures(run)
        self._left = 0, False  # see `left_open`
        self._in_loop = InLoop(run, self._failures)

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
            UserWarning: on rank 0 of several: nothing in the pipeline reduces, and no `noop` marks this as intended.

        Raises:
            DesyncError: on all ranks: another pipeline, path, shape, dtype or setting on some rank.
            TypeError, ValueError: a leaf that cannot be trained, a partition that does not fit, `on_buffers`
                without buffers.
        """
        if sync not in ("broadcast", "check", None):
            raise ValueError(f"sync must be 'broadcast', 'check' or None, got {sync!r}")
        with self._failures.alone():
            return self._init_alone(params, buffers, sync)

    def _init_alone(self, params: Any, buffers: dict[str, Tensor] | None, sync: str | None) -> TrainState:
        self._failures.check()
        refuse_inference("init")
        check_buffers(buffers)
        if buffers is None and self.run.on_buffers is not None:
            raise ValueError(f"on_buffers={self.run.on_buffers!r} was given, but init got no buffers")
        try:
            body = make_state_data(self.run, params, buffers, sync, self.bucket_bytes)
            self._in_loop.device = body.storage.layout[0].device if body.storage.layout else None
            self.run.agreements.forget()
            self._left = 0, False
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
        left, self._left = self._left, (0, False)
        for text in left_open(self.run.ends, *left) if not self._failures.broken else ():
            warnings.warn(text, stacklevel=2)
        self._failures.drain()

    def flush(self, state: TrainState) -> TrainState:
        """Average what the ranks have trained since the last average; for the end of training, on all ranks.

        The transforms after the optimizer that would run in later steps, such as those in `every`, run now, with the weights
        since their last run, and so does `on_buffers`. Results that wait for their step are used, in the order of their steps.
        First the ranks compare their steps, in one small message.

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
        with self._failures.alone():
            self._failures.check()
            try:
                body = check_state(state)._claim(self.run.token)
                if body.window:
                    raise ValueError("flush within an accumulation window; call it after the last call of a window")
                if not self._donate:
                    body = body.clone()
                self._in_loop.compare("step.flush before any step", begins=False)
                self.run.flush(body)
            except NonFinite:  # raised by all ranks at the same place; nothing has changed
                self._failures.together = True
                raise
            except BaseException as error:
                self._in_loop.fail(error)
        self._left = 0, False
        body.version += 1
        return TrainState(body)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One step, or one micro-batch of an accumulation window.

        Args:
            state: The state that `init` or the last call returned. The step takes its memory, unless the
                step was made with donate=False.
            batch: The argument of `loss_fn` and `weight`. Ignored where this rank is out of input, except with when_exhausted="replay".

        Returns:
            The new state and the step's `Metrics`.

        Raises:
            NonFinite: on all ranks; the given state is unchanged and can be used again.
            PeerLost, CollectiveTimeout: another rank failed, or did not arrive in time.
            DesyncError: on all ranks: they have called different steps of one mesh; nothing has changed.
            JoinError: another thread of this rank runs a step of the same mesh.
            DonatedState, TornState: `state` can no longer be stepped.
            TypeError, ValueError: `loss_fn` or `weight` returned an unusable value; the first loss depends on no parameter.
        """
        with self._failures.alone():
            return self._step(state, batch)

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        self._failures.check()
        self._failures.together = False
        iteration, body, given = self._in_loop.iteration, None, None
        try:
            if iteration is not None:
                self._in_loop.called(iteration)
            given = body = check_state(state)._claim(self.run.token)
            if not self._donate:
                body = body.clone()
            self.run.step_check.raise_pending()
            self._failures.last_step = body.step
            if iteration is None:
                self._in_loop.compare("a loop without step.join")
            metrics = self.run(body, batch, iteration)
            self._left = body.step, bool(body.window)
        except NonFinite:  # raised by all ranks at the same place; nothing has changed
            self._failures.together = True
            if given is not None and body is not None and given is not body:
                given.lose_window(body.calls)
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

        A rank that is out of input gets its last batch again, so that the loop body's code runs; the step computes nothing for
        it and takes part with weight 0. The loop looks one batch ahead, so the ranks end together without extra messages; one
        small message at the start finds out whether any rank has a batch. The body must call the step exactly once in each
        iteration. All ranks may leave it after the same step: a rank that leaves it, also by an exception, waits for the others to.

        Args:
            loader: Any iterable of batches, of any length on each rank, 0 included. It must not write the next batch into the
                memory of the current one: a loader that reuses its buffer must yield copies. Writes by tensor
                operations are detected at once, writes by numpy one batch later.
            empty: The batch for a rank that never has one; every use of the default raises `NoBatch`.
            throw_on_early_termination: Raise on all ranks after the step in which the first rank is out of input. This waits for
                the step's messages in every iteration.
            when_exhausted: The behaviour of a rank without input, or with a batch of weight 0. "shadow" computes
                nothing, so on several ranks `loss_fn` must not communicate over the step's axes. "replay" runs
                `loss_fn` on the last batch and discards its gradients: for models that communicate in their forward
                pass. `transforms.current_weight()` is then 0, and a rank that never has a batch needs `empty`.

        Returns:
            A `JoinedLoader`: an iterable of the batches for the body to pass to the step, which also stops the loop on all
            ranks and has a position to resume at. Each `for` loop over it is an epoch.

        Raises:
            EarlyTermination: on all ranks, see above.
            JoinError: the body did not call the step exactly once, or some ranks left it; the loader has written into the
                previous batch; raised by the step: `loss_fn` communicates although ranks without input do not call it.
            PeerLost: another rank left the loop, or failed.
        """
        return _join.JoinedLoader(
            [self._in_loop],
            loader,
            empty=empty,
            throw_on_early_termination=throw_on_early_termination,
            when_exhausted=when_exhausted,
        )
