"""A pipeline's step in the backward pass of a module."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..agreement import Record
from ..groups import Communicator
from ..optim import ForeachStepper, divides
from ..step import CountsOfAll, Decision, EndStates, StepCheck, init_ends, multiply_
from ..transforms.axes import Axis
from ..transforms.base import check_dense, merge, restored, restrict, sum_of_pieces
from ..transforms.layout import Pieces
from ..transforms.optimizers import compared
from ..transforms.pipelines import Effect, Pipeline, Plan
from ._buckets import DDPBucket, raise_after_backward


class UsedParameters:
    """Records the parameters that get a gradient, on this rank and on the others.

    Args:
        params: Path -> parameter.
        mesh: The ranks.
    """

    def __init__(self, params: Mapping[str, Tensor], mesh: Communicator) -> None:
        self._record = Record(mesh, tuple(mesh.shape), list(params), small=True)
        self._here = here = set[str]()
        for path, p in params.items():
            p.register_post_accumulate_grad_hook(lambda _, path=path: here.add(path))  # type: ignore[misc]

    def anywhere(self) -> set[str]:
        """The parameters that have had a gradient on some rank since the last call; sends one small message."""
        bits = {path: float(path in self._here) for path in self._record.names}
        self._here.clear()
        return {path for path, bit in self._record.send(bits).wait().items() if bit}


def keep_unused_state(
    used: set[str] | None, new: tuple[Any, ...], old: tuple[Any, ...], paths: Mapping[str, Any]
) -> tuple[Any, ...]:
    """A hook's states after a pass, with the old state for parameters that no rank has used.

    Args:
        used: The parameters that some rank has used; None for all.
    """
    if used is None or len(used) == len(paths):
        return new
    rest = paths.keys() - used
    return tuple(
        merge([restrict(after, paths, used), restrict(before, paths, rest)], paths)
        for after, before in zip(new, old, strict=True)
    )


class ModuleScatter:
    """The message of one bucket: each rank sends every other rank the slices that this one owns.

    The slices of a rank travel in the order of the module's bucket.
    """

    def __init__(self, out: DDPBucket, axis: Axis) -> None:
        assert out.pieces is not None
        self._out, self._rank = out, out.pieces.rank
        grads = {path: grad.reshape(-1) for path, grad in out.by_path().items()}
        parts = [
            [grads[path][start:stop] for path in out.bucket.paths for start, stop in (slices[path],) if stop]
            for slices in out.pieces.slices_of_all
        ]
        empty = out.grads[:0]
        self._own = torch.cat([empty, *parts[self._rank]])
        give, take = [sum(map(len, of)) for of in parts], [len(self._own)] * len(parts)
        give[self._rank] = take[self._rank] = 0
        sent = torch.cat([empty, *(part for rank, of in enumerate(parts) if rank != self._rank for part in of)])
        self._received = axis.begin("all_to_all_single", sent, (tuple(give), tuple(take)))

    def wait(self) -> None:
        """Add the slices."""
        self._out.scatter(sum_of_pieces(self._received(), len(self._own), self._own, self._rank))


class ScaledLoss:
    """Scales losses, and detects backward passes of losses that were not scaled.

    Attributes:
        missed: Whether a pass since the last step came from a loss that was not scaled.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.missed: bool = False
        self._running: Callable[[], _Pass | None] = _nothing
        me = weakref.ref(self)

        def arrived(_: Tensor) -> None:
            scaling = me()
            if scaling is not None:
                scaling.check()

        for p in params:
            p.register_post_accumulate_grad_hook(arrived)

    def __call__(self, loss: Tensor, scale: Tensor) -> Tensor:
        """The loss times its scale, with a hook that marks its backward pass as running."""
        scaled = loss * scale.to(loss.device)

        def begins(grad: Tensor) -> None:
            # Only the pass holds this object, until it ends or fails. Nested passes, of checkpoints, are part of it.
            running = _Pass()
            self._running = weakref.ref(running)
            torch.autograd.Variable._execution_engine.queue_callback(running)  # type: ignore[attr-defined]

        scaled.register_hook(begins)
        return scaled

    def check(self) -> None:
        """Record whether the current backward pass comes from a scaled loss; called in every backward pass."""
        self.missed = self.missed or self._running() is None

    def take_error(self) -> RuntimeError | None:
        """The error to raise in this step, or None; clears `missed`."""
        missed, self.missed = self.missed, False
        if not missed:
            return None
        return RuntimeError(
            "the pipeline takes gradients of a scaled loss, and a backward pass since its last step had none; write "
            "handle.scale(loss).backward(), under no_sync too. This step is left out; call zero_grad()"
        )


class _Pass:
    """A backward pass of a scaled loss."""

    def __call__(self) -> None: ...


def _nothing() -> _Pass | None:
    return None


# By the size of an element in bytes: a dtype whose sums are exact.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class ModuleStep:
    """The state of a pipeline on a module's own parameters, and the decisions on its steps; `ModuleMemory` takes them.

    Args:
        leaves: Path -> parameter.
        pieces: The pieces that ranks own, for a pipeline that shards.

    Attributes:
        stepper: Steps parameters; holds the optimizer's states.
        ends, outer: The states of the transforms after the optimizer, and of `skip_if_nonfinite` or `dynamic_loss_scale`.
        scaling: For a pipeline in `dynamic_loss_scale`.
    """

    pipeline: Pipeline

    def __init__(
        self,
        pipeline: Pipeline,
        plan: Plan,
        check: StepCheck,
        leaves: Mapping[str, Tensor],
        pieces: Pieces | None = None,
    ) -> None:
        self.pipeline, self._plan, self._leaves = pipeline, plan, leaves
        self._pieces = pieces
        self._skips = skips = pipeline.skips
        self._loaded_checksum = 0
        held = {path: p.detach() for path, p in leaves.items()}
        for path, p in held.items():
            check_dense(f"parameter {path!r}", p)
        pipeline.check(held)
        self._flats = list(held.values())  # which the states of pure functions must not share
        held = held if pieces is None else pieces.own(held)
        self.outer: Any = skips.begin(()) if skips else None
        at = pipeline.optimizer.at
        items = [(path, at(path), p, None) for path, p in held.items()]
        self.stepper: ForeachStepper = ForeachStepper()
        self.stepper.begin(items)
        slots = self.stepper.states
        sharding = pipeline.sharding
        self.gather_state: Any = () if sharding is None or pieces is None else sharding.init(pieces, held, dict(slots))
        self.ends: EndStates = init_ends(pipeline, held, slots, self._flats)
        self._watched = [item for item in items if compared(item[1], slots[item[0]])]
        self._divides = all(divides(part, dtype) for part, dtype in {(at(path), p.dtype) for path, p in held.items()})
        self.check = check
        self.scaling: ScaledLoss | None = ScaledLoss(leaves.values()) if skips and skips.scaled else None
        self._error: TypeError | ValueError | None = None  # of this pass's hyperparameters

    def rates(self) -> list[tuple[str, float]]:
        """The hyperparameters of the next step that may differ between ranks, by name."""
        return self.stepper.check_rates(self._watched)

    def own(self) -> dict[str, Tensor]:
        """Path -> the values that this rank steps: parameters, or slices of them."""
        held = {path: p.detach() for path, p in self._leaves.items()}
        sharding = self.pipeline.sharding
        if self._pieces is None or sharding is None:
            return held
        own: dict[str, Tensor] = sharding.held(self._pieces, held, self.gather_state)
        return own

    def fits(self) -> bool:
        """Whether the module has the parameters that go with the loaded state."""
        return self._loaded_checksum == self.checksum()

    def checksum(self) -> int:
        """A checksum of the parameters; 0 where all ranks have equal parameters after each step."""
        if not self.pipeline.ends:
            return 0
        words = (p.detach().reshape(-1).view(_WORDS[p.itemsize]) for p in self._leaves.values())
        return zlib.crc32(repr([int(each.sum(dtype=torch.int64)) for each in words]).encode())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state made by `state_dict`, for the same pipeline and parameters.

        Raises:
            ValueError: the state of another pipeline, or of other parameters; nothing is loaded.
        """
        outer = restored("the state of the outer", self.outer, state_dict["outer"])
        after = restored("the state of the after", self.ends.after, state_dict["after"])
        on_state = restored("the state of on_state", self.ends.on_state, state_dict["on_state"])
        gather = restored("the state of the gather", self.gather_state, state_dict["gather"])
        if self.pipeline.sharding is not None and self._pieces is not None:
            self.pipeline.sharding.check(self._pieces, gather)
        saved, at = state_dict["optimizer"], self.pipeline.optimizer.at
        if self.stepper.states.keys() != saved.keys():
            raise ValueError(
                f"the optimizer's state is of {sorted(saved)}, but the module has {sorted(self.stepper.states)}"
            )
        own = self.own()
        self.stepper.adopt(self.stepper.prepared((path, at(path), own[path], s) for path, s in saved.items()))
        self.outer, self.ends, self.gather_state = outer, EndStates(after, on_state), gather
        self._loaded_checksum = state_dict["parameters"]

    def begin(self, step: int, scaled: bool) -> list[tuple[str, float]]:
        """Begin a pass; returns the hyperparameters of its step.

        Args:
            scaled: Whether its gradients must come from a scaled loss; if not, the rank has no input.
        """
        if self.scaling is not None and scaled:
            self.scaling.check()
        self.check.grads.begin(self._plan, step)
        self._error = None
        try:
            return self.rates()
        except (TypeError, ValueError) as error:
            self._error = error
            return []

    def before_hook(self, out: DDPBucket) -> None:
        """Divide the gradients of a bucket, not yet sent, by the scale of the loss; note whether they are finite."""
        if self.scaling is not None:
            multiply_(out.grads, 1 / self.outer.scale.double())
            if self.scaling.missed:
                out.grads.fill_(math.nan)  # makes all ranks leave the step out
        self.check.grads.before_hook(out)

    def decide(
        self, step: int, outs: list[DDPBucket], sums: dict[str, float], counts: Sequence[CountsOfAll] | None
    ) -> tuple[Decision, bool]:
        """Decide on a step.

        Args:
            outs: The buckets, each observed, not yet divided.
            sums: The record, summed over the ranks that share the gradients.
            counts: See `StepCheck.decide`.

        Returns:
            The decision, and whether the step ends here with an error, which is raised after the backward pass.
        """
        if self._error is not None:
            raise_after_backward(self._error)
            return Decision(Effect(True, False)), True
        decision = self.check.decide(step, sums, outs, 1.0, None, counts)
        if self.scaling is not None and (missed := self.scaling.take_error()) is not None:
            raise_after_backward(missed)
        if self._skips is not None:
            self.outer = decision.effect.update_counters(self._skips, self.outer)
        elif decision.error is not None:
            raise_after_backward(decision.error)
            return decision, not decision.changes
        return decision, False

    def by_kernels(self, decision: Decision, outs: list[DDPBucket], used: set[str] | None) -> bool:
        """Whether the optimizer's kernels may divide the gradients."""
        return self._divides and decision.changes and used is None and self.check.grads.readable_without_sync(outs)
