"""The records that the ranks of one run sum: of those that share gradients, and of all that loop together.

When each is sent and read, and the calls between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..groups import Communicator
from ..records import Calls, Requests, StepIds, StepRecord, Sums, numbers
from ..transforms.layout import Bucket
from ..transforms.pipelines import Parts, Plan, Rates, SentRecords, StepPlace, axes_of, records_of
from ._verdict import CountsOfAll, StepCheck


class StepRecords:
    """The records of the steps of one run, and of the calls between its steps.

    The record travels

        at the end of a bucket                    a plain mean or sum in a train_step
        in a message of its own, before           float16, or no bucket of its dtype; scatter_mean; a mean inside other
                                                  stages, which needs the sum of the weights; a registered module
        in a message of its own, after            a hook that leaves the ranks with different gradients
        in no message                             a module's mean over the world, with nothing to compare

    The ranks that loop together may be more than those that share gradients. Then a step sends a record over all of
    them in a message of its own, with a bit for each rank that left out the step before. In a step with other messages
    between these ranks it is read at once. In other steps it is read in the step after, so that no rank waits there for
    another one.

    Attributes:
        plan: How the pipeline runs.
        check: Decides on the steps.
        ids: The numbers of the steps.
        of_all: The record over all ranks that loop together.
        ranks: The number of these ranks.

    Args:
        plan, parts, place: See `records_of`.
        calls: The calls of the run in words, for errors.
        norm: Whether the norm of the gradients is needed.
    """

    def __init__(
        self, mesh: Communicator, plan: Plan, parts: Parts, place: StepPlace, calls: Calls, norm: bool = False
    ) -> None:
        self._mesh, self.plan, self._parts, self._place = mesh, plan, parts, place
        # Where each step has the same.
        self._always = None if plan.always is None else records_of(plan, parts, 0, place)
        self.of_all: StepRecord = StepRecord(mesh, plan.loop_axes)
        self._records = {plan.loop_axes: self.of_all}  # by axes
        self.ranks: int = self.of_all.ranks
        self._layout: tuple[Bucket, ...] | None = None
        self.ids: StepIds = StepIds(mesh, plan.loop_axes, self.ranks, calls)
        self.own_requests = Requests(self.ranks)
        self.check: StepCheck = StepCheck(self.ranks, norm, self._parts.skips, mesh, self.ids, self.own_requests)
        self._late: tuple[int, Sums] | None = None  # the step of a record that has not been read, and its sums
        self._begun: int | None = None  # the step that began last
        self._has_sent = False  # whether a step has sent a record of all ranks

    def fit(self, layout: tuple[Bucket, ...]) -> None:
        """Take the dtype and the device of messages from these buckets."""
        self._layout = layout
        for record in self._records.values():
            record.fit(layout)

    def record(self, axes: tuple[str, ...]) -> StepRecord:
        """The record over these axes."""
        if axes not in self._records:
            self._records[axes] = record = StepRecord(self._mesh, axes)
            if self._layout is not None:
                record.fit(self._layout)
        return self._records[axes]

    def sent_in(self, step: int) -> SentRecords:
        """What the ranks sum in a step beside their gradients."""
        return self._always or records_of(self.plan, self._parts, step, self._place)

    def of_hook(self, step: int) -> StepRecord:
        """The record over the ranks that the hook reduces over in a step."""
        axes = (self.plan.always or self.plan.reduced(step)).axes
        return self._records.get(axes) or self.record(axes)

    def begin(self, step: int, rates: Rates, weight: tuple[float, str] | None = None) -> float:
        """The number of a step that begins with these hyperparameters, and with a weight; see `StepIds`.

        A step from an earlier state leaves behind the steps after it, with what this rank has left out of them. Ranks
        that take steps of their own may differ in their optimizers' counts, and so in the values of a schedule: they
        compare only their first.
        """
        together = self.plan.always is not None and self.plan.always.axes == self.plan.loop_axes
        if self._begun is not None and step <= self._begun:
            self.check.left_out = 0.0
        self._begun = step
        return self.ids.begin(step, rates if together or step == 0 else (), weight)

    def forget(self) -> None:
        """Forget the steps so far: a new run begins. A record that has not been read yet is waited for."""
        late, self._late, self._begun = self._late, None, None
        if late is not None:
            late[1].wait()
        self.check.clear()

    # -- in a step ------------------------------------------------------------------------------

    def send(self, values: dict[str, Any]) -> Sums:
        """Start summing the record of all ranks in a step, from this rank's complete values."""
        self._has_sent = True
        return self.of_all.send(self.of_all.left_out(values, self.check.left_out))

    def read(self, step: int, now: Sums) -> Sequence[CountsOfAll]:
        """The records of all ranks to look at in this step.

        Args:
            now: The record of this step.
        """
        counts = self._take(step)
        # Before the ranks change each other's values.
        if any(axes_of(part, self._mesh.shape, step, at_end=True) for part in self._parts.ends):
            return [*counts, CountsOfAll(1, now.read(self.check.grads.on_device))]
        self._late = step, now
        return counts

    def _take(self, step: int) -> list[CountsOfAll]:
        """The record of an earlier step, mostly the one before, where it has not been read yet.

        It is checked here, before this rank waits for messages that other ranks may not send.
        """
        late, self._late = self._late, None
        if late is None:
            return []
        sums, age = late[1].read(self.check.grads.on_device), step - late[0]
        if age <= 0:  # of a step that has been left behind: only what all ranks have called counts
            self.ids.check(late[0] + 1, sums, 2)
            return []
        counts = CountsOfAll(age + 1, sums)
        self.ids.check(step, counts.sums, counts.late)
        return [counts]

    def has_next(self, sums: Mapping[str, Any]) -> float:
        """The number of ranks that have another batch."""
        self.check.synchronize()
        return self.own_requests.with_next(float(sums["has_next"]))

    @property
    def requests(self) -> Requests:
        """The requests of the ranks, with what is due after the steps so far."""
        self.check.look()
        return self.own_requests

    # -- between steps --------------------------------------------------------------------------

    def begin_flush(self, step: int) -> None:
        """Check that all ranks flush after the same step, and raise for a step that some of them left out.

        The message has the size of the record that begins a step, so that a rank that steps instead receives it as
        such. Where no step sends a record of its own, ranks are never apart, and there is no message.

        Raises:
            NonFinite, DesyncError: on all ranks.
        """
        self.check.drain()
        if not any(self.sent_in(at).apart for at in (step, max(step - 1, 0))):
            return
        self._raise_late(step)
        number = self.ids.of_flush  # and the step travels as the weight
        sums = self._sum({"step_id": number, "weight": float(step)})
        if sums["step_id"] != number * self.ranks or sums["weight"] != step * self.ranks:
            self.ids.refuse_flush(step)
        self.check.raise_left_out(step - 1, sums)

    def drain(self, step: int) -> None:
        """Raise, at the end of a loop, for a last step that changed nothing, or that some ranks left out and others
        took.

        Args:
            step: The number of steps so far.

        Raises:
            NonFinite: on all ranks.
        """
        self.check.drain()
        self._raise_late(step)
        if self._has_sent and not self._parts.skips and self.sent_in(step - 1).apart:
            self.check.raise_left_out(step - 1, self._sum({}))

    def _raise_late(self, step: int) -> None:
        """Read the record of the step before, where it has not been read yet, and raise for it."""
        for late, of_all in self._take(step):
            sums = numbers(of_all, self.check.reads.now)
            self.ids.check(step, sums, late)  # sums on a device have not been checked yet
            self.own_requests.note(sums.get("has_next", 0.0))
            self.check.raise_left_out(step - late, sums)

    def _sum(self, values: dict[str, Any]) -> dict[str, float]:
        """Sum a record outside a step, with the bits of the ranks that left out the last one."""
        sums = self.send(values).wait()
        self.check.left_out = 0.0
        return sums
