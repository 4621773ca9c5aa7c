"""`Members`: a generation of ranks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import JoinError
from ..groups import Communicator, connect_generation
from ..step import StateData
from ..training import JoinedLoader, TrainState, TrainStep, loaded
from ..transforms.base import trees
from ..transforms.pipelines import buffers_placement, params_placement, placed
from ._membership import SILENT_S, Membership

B = TypeVar("B")
_CONNECT_S = 2.0  # for a member that dies while it connects; doubled after each failure
_JOIN_S = 1.0  # how long the end waits for the thread
_NOTHING = -1, -1  # the generation and the step of a process without a state


class NewGeneration(BaseException):
    """The generation ends, since others want to join it. No `except Exception` of the training function catches it."""


class Members:
    """The ranks of one generation; made by `elastic`.

    Attributes:
        mesh: The ranks, as the axis "data".
        generation: Its number, from 1.
    """

    def __init__(self, membership: Membership, timeout_s: float, options: Mapping[str, Any]) -> None:
        self._membership, self._timeout_s, self._options = membership, timeout_s, options
        self._closed, self._connecting = threading.Event(), 0
        self._mesh: Communicator | None = None
        self._step: TrainStep | None = None
        self._body: StateData | None = None  # of the newest state of this process
        self._commit = _NOTHING  # the generation in which its last step was taken, and its number of steps
        self._streams: tuple[int, Any] = -1, None  # the number of a step, and the random streams before it
        self._batches: JoinedLoader[Any] | None = None
        self._asked = False  # whether this process has ended the loop, for those who wait
        self._watcher = threading.Thread(target=membership.watch, args=(self._look, self._closed), daemon=True)
        self._watcher.start()

    @property
    def generation(self) -> int:
        return self._membership.generation

    @property
    def mesh(self) -> Communicator:
        if self._mesh is None:
            raise JoinError("this generation has ended; use members only inside the function that elastic calls")
        return self._mesh

    def begin(self) -> None:
        """Connect the members of this generation."""
        of = self._membership
        of.arrive()
        limit_s = min(self._timeout_s, _CONNECT_S * 2**self._connecting)
        self._connecting += 1
        store = dist.distributed_c10d.PrefixStore(f"generation {of.generation}", of.store.store)
        rank, size = of.members.index(of.number), len(of.members)
        self._mesh = connect_generation(store, rank, size, limit_s, **self._options)
        self._mesh.generation = of.generation
        self._connecting, self._asked = 0, False

    def end(self, error: BaseException | None = None) -> None:
        """Keep the newest state, and disconnect. The others learn of an error, so that none waits for this rank."""
        mesh, self._mesh, step, self._step, self._batches = self._mesh, None, self._step, None, None
        if mesh is not None:
            mesh.__exit__(None, error, None)
        if step is not None and (body := step.held or self._body) is not None:
            if body.window:
                body.lose_window(body.step * step.run.accumulate)
            if body.torn or (body.ended and body.ended.failed):
                self._body, self._commit = None, _NOTHING
            else:
                self._body = body
                self._commit = self._commit if body.step == self._commit[1] else (self.generation, body.step)
        if dist.is_initialized():
            dist.destroy_process_group()

    def finish(self) -> None:
        """Wait until all ranks have come to the end of the training function.

        Raises:
            JoinError: this rank has left a loop in which others go on.
        """
        if self._step is not None:
            self._step.failures.check()
        self.mesh.exchange("the end of training", None, len)

    def close(self) -> None:
        """Take part no more."""
        self._closed.set()
        self._watcher.join(_JOIN_S)
        self._membership.leave()

    def _look(self, waits: bool) -> None:
        """In the thread that watches: end the loop for those who wait, and report members that are silent."""
        mesh, batches, silent = self._mesh, self._batches, self._membership.silent()
        if mesh is not None and silent:
            for rank, number in enumerate(self._membership.members):
                if number in silent:
                    mesh.report_silent(rank, f"rank {rank}, on another host, gives no sign of life for {SILENT_S:g} s")
        if waits and batches is not None:
            self._asked = True
            with contextlib.suppress(JoinError):
                batches.stop()

    def resume(
        self,
        step: TrainStep,
        params: Any,
        buffers: dict[str, Tensor] | None = None,
        otherwise: Callable[..., TrainState] | None = None,
    ) -> TrainState:
        """The newest state of any member; on all ranks.

        Args:
            step: From `train_step(..., mesh=members.mesh)`.
            params, buffers: As for `step.init`; used if no member has a state.
            otherwise: Called as `otherwise(params, buffers, data=False)` if no member has a state, in place of
                `step.init`: `Checkpoints(folder, step).restore`. Without it a run whose ranks have all died begins
                anew.

        Returns:
            The state, the same on all ranks.

        Raises:
            ValueError: the state has values that each rank has for itself, so that they would be lost with it; `step`
                has another mesh.
        """
        mesh = self.mesh
        if step.run.mesh is not mesh or self._step is not None:
            raise ValueError("members.resume takes one step of this generation: train_step(..., mesh=members.mesh)")
        own = self._commit
        held = [tuple(one) for one in mesh.exchange("members.resume", own, list)]
        newest = max(held)
        if newest == _NOTHING:
            state = step.init(params, buffers) if otherwise is None else otherwise(params, buffers, data=False)
        else:
            state = step.init(params, buffers, sync=None)
            source = state if self._body is None or own != newest else TrainState(self._body)
            rest = source.pipeline, source.buffers, source.on_buffers, source.batches
            tree: Any = trees.named_leaves(source.params), *rest
            leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
            if any(one != newest for one in held):
                leaves = self._from(held.index(newest), leaves)
            values: Any = optree.tree_unflatten(structure, leaves)  # the state that has them is dropped
            state = loaded(state, step.run, *values)
        self._refuse(step, state)
        self._body, self._step = step.held, step
        self._commit = newest if newest != _NOTHING else (0, state.step)
        return state

    def _from(self, rank: int, leaves: list[Any]) -> list[Any]:
        """The leaves of a rank."""
        axis, numbers = self.mesh.axes["data"], [None if torch.is_tensor(leaf) else leaf for leaf in leaves]
        numbers = self.mesh.exchange("the numbers of the newest state", numbers, lambda found: found[rank])
        return [
            axis.run("pbroadcast", leaf.detach().contiguous(), rank) if torch.is_tensor(leaf) else number
            for leaf, number in zip(leaves, numbers, strict=True)
        ]

    def _refuse(self, step: TrainStep, state: TrainState) -> None:
        """Raise ValueError where each rank has values for itself."""
        shape = self.mesh.shape
        places = {"params": params_placement(step.pipeline, shape)}
        if state.buffers:
            places["buffers"] = buffers_placement(step.run.on_buffers, shape)
        for leaf in placed(step.pipeline, state.pipeline, shape):
            if leaf.placement is not None and not leaf.name.endswith("window"):  # which is empty after a step
                places[f"pipeline.{leaf.name}"] = leaf.placement
        if found := [name for name, place in places.items() if place.equal != tuple(shape)]:
            raise ValueError(
                f"elastic keeps what is alike on all ranks, but each rank has its own {', '.join(found[:3])}"
                f"{', ...' if len(found) > 3 else ''}, which would be lost with it; restart all ranks from fjoin.Checkpoints "
                f"instead, and average buffers by on_buffers=tx.average_buffers('data')"
            )

    def join(self, step: TrainStep, loader: Iterable[B], *, epochs: int = 1, **options: Any) -> Iterator[B]:
        """Iterate over the batches from the state's step on, as `step.join` does, until all epochs are over.

        The loop ends on all ranks after the same step if a newcomer waits: `elastic` calls its function again.

        Args:
            step: As given to `resume`.
            loader: A loader whose `batch_sampler` is a `fjoin.Shuffled` over `members.mesh`.
            epochs: The number of epochs of the whole run.
            options: As for `step.join`.

        Raises:
            ValueError: the loader has another sampler; `resume` has not been called with this step.
            JoinError, PeerLost: as `step.join`.
        """
        if step is not self._step or self._body is None:
            raise ValueError("members.join takes the step whose state members.resume has returned in this generation")
        batches, begun = step.join(loader, **options), self._body.step
        if self._streams[0] != begun:
            self._streams = begun, batches.streams
        batches.begin_at(begun, step.run.accumulate, self._streams[1])
        self._batches = batches
        while batches.epoch < epochs:
            for batch in batches:
                yield batch
                self._body = step.held or self._body  # a step that is closed holds none
                if not self._body.window:
                    self._streams = self._body.step, batches.streams
            self._streams = self._body.step, batches.streams
            if batches.stopped and self.mesh.exchange("a loop that was stopped", self._asked, any):
                raise NewGeneration
            if batches.stopped:
                break
        self._batches = None
