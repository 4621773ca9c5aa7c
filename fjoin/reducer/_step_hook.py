"""What a step asks of its hook."""

from __future__ import annotations

from typing import Any, Protocol

from ..agreement._step_check import Clip
from ..agreement._step_record import StepRecord
from ..buckets._flat_params import Storage
from ..buckets._grad_buffer import GradBuffer
from ..transforms._axis_env import Work


class StepHook(Protocol):
    """Runs the hook of a step on its buckets: `AllReduceHook` or `BucketHook`.

    Attributes:
        unit: The factor that scales gradients in messages. The initial value serves all dtypes except float16.
        by_weight: Whether a rank counts by its weight. Otherwise each rank with a batch counts 1.
    """

    unit: float
    by_weight: bool

    @property
    def clip(self) -> Clip | None:
        """The function from the norm of the reduced gradients to their clip factor; None where nothing is clipped."""

    def init(self, storage: Storage) -> Any:
        """The initial state."""

    def loss_factor(self, share: Any) -> Any:
        """The factor of the loss, given this rank's share in the mean."""

    def prepare(self, storage: Storage) -> list[GradBuffer]:
        """The buffers of the messages."""

    def start(self, state: Any, storage: Storage, record: StepRecord, values: dict[str, Any], step: int) -> None:
        """Prepare for the buckets of a step.

        Args:
            record: The record over the axes that the hook reduces over in this step.
            values: This rank's values in it.
            step: The number of steps before this one.
        """

    def launch(self, index: int, out: GradBuffer) -> Work | None:
        """Start the messages of a full bucket."""

    def finish(
        self, old: Any, storage: Storage, outgoing: list[GradBuffer], values: dict[str, Any]
    ) -> tuple[dict[str, Any] | None, Any]:
        """Complete the messages after backward, and look at the gradients.

        Returns:
            The summed record, or None where it takes a verdict; the divisor of the gradients.
        """

    def new_state(self, sums: dict[str, Any], outgoing: list[GradBuffer]) -> Any:
        """The state after the step, or a function that makes it; once."""

    def stop(self) -> None:
        """Discard a step that has failed."""

    def close(self) -> None:
        """Free the buffers."""
