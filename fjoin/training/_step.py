"""The training step: a pipeline, run bucket by bucket while the backward pass goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor

from .._errors import DesyncError, FjoinError, JoinError, NonFinite
from ..groups._consistency import same_loops
from ..transforms.combinators._chain import identity
from . import _join_steps as _join
from ._executor import Run
from ._init_state import make_state_data
from ._loss import refuse_inference
from ._metrics import Metrics
from ._params import check_buffers
from ._state import TrainState

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
        self._iteration: _join.Iteration | None = None
        self._last_step: int | None = None
        self._broken: tuple[type[FjoinError], str] | None = None  # what this rank failed of
        self._compared = False  # whether the ranks have compared how they loop
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
                returns `(loss, aux, buffers)`.
            sync: "broadcast" gives all ranks rank 0's parameters and buffers, "check" raises where
                they differ, None trusts that they do not.

        Returns:
            A `TrainState` at step 0.

        Warns:
            UserWarning: on rank 0 of several: nothing in the pipeline reduces, and no `noop` says that this is meant.

        Raises:
            DesyncError: on all ranks: another pipeline, path, shape, dtype or setting on some rank.
            TypeError, ValueError: a leaf that cannot be trained, a partition that does not fit, `on_buffers`
                without buffers.
        """
        if sync not in ("broadcast", "check", None):
            raise ValueError(f"sync must be 'broadcast', 'check' or None, got {sync!r}")
        with self._alone():
            return self._init_alone(params, buffers, sync)

    def _init_alone(self, params: Any, buffers: dict[str, Tensor] | None, sync: str | None) -> TrainState:
        self._usable()
        refuse_inference("init")
        check_buffers(buffers)
        if buffers is None and self._run.on_buffers != identity():
            raise ValueError(f"on_buffers={self._run.on_buffers!r} was given, but init got no buffers")
        try:
            body = make_state_data(self._run, params, buffers, sync, self._bucket_bytes, self._accumulate)
            self._device = body.storage.layout[0].device if body.storage.layout else None
            return TrainState(body)
        except BaseException as error:
            self._raise(error)

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
            DesyncError: on all ranks: they have called different steps of one mesh; nothing has changed.
            JoinError: another thread of this rank runs a step of the same mesh.
            DonatedState, TornState: `state` cannot be stepped any more.
            TypeError, ValueError: what `loss_fn` or `weight` returned cannot be used; the first loss depends on no parameter.
        """
        with self._alone():
            return self._step(state, batch)

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        self._usable()
        self._together = False
        iteration, body, given = self._iteration, None, None
        try:
            if iteration is not None:
                if iteration.number < 0:
                    raise JoinError(
                        "the loader of step.join called the step; only the loop's body may", step=self._last_step
                    )
                if iteration.called:
                    raise JoinError(
                        f"the loop body called the step twice in iteration {iteration.number}; call it exactly once in each, "
                        f"and use fjoin.train_step(..., accumulate=k) for several batches in one step",
                        step=self._last_step,
                    )
                iteration.called = True
            if not isinstance(state, TrainState):
                raise TypeError(f"state must be what step.init or the last step returned, got a {type(state).__name__}")
            given = body = state._claim(self._run.token)
            if not self._donate:
                body = body.clone()
            self._run.step_check.raise_pending()
            self._last_step = body.step
            if iteration is None:
                self._compare_loops("a loop without step.join")
            metrics = self._run(body, batch, iteration)
        except NonFinite:  # raised by all ranks at the same place; nothing has changed
            self._together = True
            if given is not None and body is not None and given is not body:
                given.lose_window(body.calls)
            raise
        except BaseException as error:
            if body is not None and body.window and not body.torn:
                body.lose_window(body.calls - body.calls % self._accumulate)
                body.lost = (
                    f"a call failed within an accumulation window, whose gradients are lost: {error!r}. The state can be read; "
                    f"go on from the last completed step with state.clone()"
                )
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
    ) -> Iterable[B]:
        """Iterate over this rank's loader until all ranks are out of input.

        A rank that is out of input gets its last batch again, so that the loop body's code runs; the
        step knows that it has none, computes nothing and takes part with weight 0. The loop looks one
        batch ahead, so that the ranks end together at no extra message; one small message at the start
        asks whether anybody has a batch. The body must call the step exactly once in each iteration.

        Args:
            loader: Any iterable of batches, of any length on each rank, 0 included. It must not write the next batch into the
                memory of the current one: a loader that reuses its buffer yields copies. Tensor operations that write there
                are noticed at once, numpy's a batch later.
            empty: What a rank that never has a batch gets; every use of the default raises `NoBatch`.
            throw_on_early_termination: Raise on all ranks after the step in which the first is out of
                input. Costs a wait for the step's messages in every iteration.
            when_exhausted: What a rank does without input, or with a batch of weight 0: "shadow" computes nothing, so that on
                several ranks `loss_fn` may not communicate over the step's axes; "replay" runs `loss_fn` on its last batch,
                whose gradients count nothing: for models that communicate in their forward pass.
                `transforms.current_weight()` is 0 then. A rank that never has a batch needs `empty`.

        Returns:
            An iterable of the batches that the body is to hand to the step. Each `for` loop over it is an epoch.

        Raises:
            EarlyTermination: on all ranks, see above.
            JoinError: the body did not call the step exactly once, or was left early; the loader has written into the batch
                that it gave before; out of the step: `loss_fn` communicates although ranks without input do not call it.
            PeerLost: another rank left the loop, or failed.
        """
        return _join.JoinedLoader(
            [self],
            loader,
            empty=empty,
            throw_on_early_termination=throw_on_early_termination,
            when_exhausted=when_exhausted,
        )

    # -- what the loop of join asks for --------------------------------------------------------

    def _begin_join(self) -> None:
        self._usable()
        if self._iteration is not None:
            error = JoinError("a loop over this step's join is still running; finish it before starting another")
            if self.ranks > 1:  # the loop may have been left with its iterator in a variable, so that the others wait
                self._raise(error)
            raise error

    def _count(self, has_batch: bool, throw: bool, replays: bool) -> float:
        """The number of ranks that have a batch: the one message outside steps.

        Raises:
            DesyncError: a rank has other settings of `join`.
        """
        settings = f"throw_on_early_termination={throw}, when_exhausted={'replay' if replays else 'shadow'!r}"
        own = 4.0 ** (throw + 2 * replays)  # no mean of some of these is another one
        words = torch.tensor([has_batch, own], dtype=torch.float32).to(self._device or "cpu")
        with self._alone():
            self._compare_loops(f"step.join(loader, {settings})")
            self._mesh.reduce_(words, self._run.axes).wait()
        have, settings_of_all = words.tolist()
        if settings_of_all != own * self.ranks:
            raise DesyncError(f"some rank differs from rank {self.rank} in the settings of step.join: here {settings}")
        return float(have)

    def _end_join(self) -> None:
        """The loop has ended on all ranks.

        Raises:
            NonFinite: on all ranks: some have left the last step out, and others have not.
        """
        if self._last_step is not None:
            with self._alone():
                self._run.drain(self._last_step + 1)

    def _compare_loops(self, loop: str) -> None:
        """Compare, before the first message, how the ranks loop."""
        if not self._compared:
            same_loops(self._mesh, self._run.axes, loop)
            self._compared = True

    def _leave(self, error: JoinError) -> None:
        """The loop was left before its end: by this rank alone, unless all had raised alike."""
        if self._broken is None and self.ranks > 1 and not self._together:
            self._break(error)
            self._mesh.report_failure(error, self._last_step)

    # -- failures ------------------------------------------------------------------------------

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """Let no other thread of this rank run a step of this mesh meanwhile."""
        return self._mesh.use.alone(self._met) if self.ranks > 1 else contextlib.nullcontext()

    def _met(self, error: JoinError, tells: bool) -> None:
        """Two threads have met: the step cannot go on."""
        if self._broken is None:
            self._break(error)
            if tells:
                self._mesh.report_failure(error, self._last_step)

    def _usable(self) -> None:
        if self._broken is not None:
            kind, text = self._broken
            raise kind(f"this step cannot go on, it failed before: {text}")

    def _break(self, error: BaseException) -> None:
        """Never run again. The error itself is not kept: with its frames it would hold all that they know."""
        self._broken = type(error) if isinstance(error, FjoinError) else JoinError, str(error) or repr(error)

    def _raise(self, error: BaseException) -> NoReturn:
        """Let the other ranks know, and raise what really happened."""
        self._iteration = None
        self._run.stop()
        if self._broken is not None or self.ranks == 1:
            raise error
        try:
            self._mesh.raise_root_cause(error, self._last_step)
        except BaseException as told:
            self._break(told)
            raise
