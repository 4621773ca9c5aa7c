"""The step of a module's parameters, once the hook has reduced their gradients."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..agreement._step_check import CountsOfAll, Decision, StepCheck
from ..optim._foreach import ForeachStepper, divides
from ..training.passes._loss_weight import unscale
from ..training.state._ends import EndStates, init_ends
from ..transforms.layout._pieces import Pieces
from ..transforms.optimizers.wrappers._inject import compared
from ..transforms.pipelines._pipeline import Pipeline
from ..transforms.plan._plan import Plan
from ..transforms.program._effect import Effect
from ..transforms.tree._check_tree import check_dense
from ..transforms.tree._state_dict import restored
from ._buckets import DDPBucket
from ._late_errors import raise_after_backward
from ._loss_scale import ScaledLoss

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
            unscale(out.grads, 1 / self.outer.scale.double())
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
