"""The record of a step, and the requests in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._errors import JoinError
from ..groups import Communicator
from ..transforms.axes import Work, axis_index, bind_axes
from ..transforms.base import record_words, trees
from ..transforms.layout import Bucket
from ._compare import common_names
from ._device_reads import numbers, read_now

# With more ranks than this the three counts of a message are not exact in float32.
_MOST_RANKS = 4096


class Requests:
    """What this rank asks of all ranks, and what they must do. No message grows by it.

    A rank asks at any time. The request travels once, in the next record of a step, and all ranks know it after the
    same step: after the step that sent it, or, where no rank waits for that record, after the step that follows.

    The record's scalar `has_next` holds three counts of ranks, as digits of the base ranks + 1: with another batch,
    that ask to save, that ask to stop.

    Attributes:
        saves_due: The number of times that a record which all ranks have read asked to save.
        stop_due: Whether such a record asked to stop; `begin` resets it.
        in_loop: Whether a loop runs.
        signalled: Whether a request to stop by this rank's `ask_stop` has travelled.
        over: Whether the ranks have saved since, so that no other loop of the run begins.

    Args:
        ranks: The number of ranks whose records are summed.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self._digit = ranks, float(ranks + 1)
        self._asked = set[str]()
        self.saves_due, self.stop_due, self.in_loop = 0, False, False
        self.signalled, self.over = False, False

    def ask_save(self) -> None:
        """Ask all ranks to save after one of the next steps. A signal handler may call it."""
        self._ask("save")

    def ask_stop(self) -> None:
        """Ask all ranks to stop after one of the next steps. A signal handler may call it."""
        self._ask("stop")

    def ask_end_of_loop(self) -> None:
        """As `ask_stop`, for the loop that runs: `end` withdraws a request that has not travelled."""
        self._ask("loop")

    def _ask(self, what: str) -> None:
        if self._ranks > _MOST_RANKS:
            raise JoinError(f"a request to {what} travels between at most {_MOST_RANKS} ranks; here are {self._ranks}")
        self._asked.add(what)

    def begin(self) -> None:
        """A loop begins: a stop that was due in an earlier one does not stop it."""
        self.stop_due, self.in_loop = False, True

    def end(self) -> None:
        """A loop has ended."""
        self._asked.discard("loop")
        self.in_loop = False

    def forget(self) -> None:
        """Withdraw what signals asked: the run is over, and another one may begin."""
        self._asked -= {"save", "stop"}
        self.signalled, self.over = False, False

    def write(self, has_next: bool) -> float:
        """The scalar `has_next` of this rank's next record, with the requests that have not travelled yet."""
        if not self._asked:
            return float(has_next)
        asked, self._asked = self._asked, set()
        self.signalled |= "stop" in asked
        return has_next + self._digit * ("save" in asked) + self._digit**2 * bool(asked & {"stop", "loop"})

    def note(self, *sums: float) -> None:
        """Take the requests of all ranks from sums of `has_next`, which all ranks read after the same step."""
        asked = [has_next // self._digit for has_next in sums if has_next >= self._digit and math.isfinite(has_next)]
        if asked:
            self.saves_due += any(save_and_stop % self._digit > 0 for save_and_stop in asked)
            self.stop_due |= any(save_and_stop >= self._digit for save_and_stop in asked)

    def with_next(self, has_next: float) -> float:
        """The number of ranks with another batch, from the sum of `has_next`."""
        return has_next % self._digit


class Record:
    """Named scalars that ranks sum over some axes. A flag takes a bit for each rank, so that the ranks are known.

    Attributes:
        axes: The axes; there may be none.
        ranks: The number of ranks along them.
        names: The names of the scalars, in the order in which they travel.
        dtype, device: Those of a message of its own.

    Args:
        names: The names of the scalars; the same on all ranks, in the same order.
        flags: The names of the flags.
        small: Whether the sums are whole numbers below 2^24, which take one word of float32 each.
        device: The device of its messages; by default that of the mesh's small messages.
    """

    def __init__(
        self,
        mesh: Communicator,
        axes: tuple[str, ...],
        names: Sequence[str],
        flags: Sequence[str] = (),
        small: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.mesh: Communicator = mesh
        self.axes, self._small = axes, small
        self.ranks: int = math.prod(axis.size for axis in mesh.over(axes))
        with bind_axes(mesh.axes):
            self._word, self._bit = record_words.rank_bit(int(axis_index(axes)) if axes else 0)
        self.names: tuple[str, ...] = (*names, *(word for flag in flags for word in flag_words(flag, self.ranks)))
        self.dtype, self.device = torch.float32 if small else torch.float64, device or mesh.device

    @property
    def n_words(self) -> int:
        """The number of elements of a message."""
        return len(self.names) * (1 if self._small else record_words.words_per_scalar(self.dtype))

    def flagged(self, values: Mapping[str, Any], flag: str, on: Any = 1.0) -> dict[str, Any]:
        """The values, with this rank's bit of a flag also set where `on` is 1."""
        name = f"{flag}{self._word}"
        old = values.get(name, 0.0)
        if not isinstance(on, Tensor):
            return {**values, name: max(float(old), on * self._bit)}
        new = on * self._bit
        if isinstance(old, Tensor):
            return {**values, name: torch.maximum(trees.to_device(on.device, old, on.dtype), new)}
        return {**values, name: torch.clamp(new, min=old) if old else new}

    def words(self, values: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Tensor:
        """This rank's values as the words of a message; names that `values` lacks are 0."""
        own = [values.get(name, 0.0) for name in self.names]
        if self._small:
            return torch.tensor(own, dtype=dtype)
        return record_words.words_of(self.names, own, dtype, self.ranks, device)

    def read(self, words: Tensor, as_tensors: bool = False) -> dict[str, Any]:
        """The sums by name: numbers where the host may read the words without waiting, otherwise tensors.

        Args:
            as_tensors: Return tensors in any case.
        """
        if self._small:
            return dict(zip(self.names, words.tolist(), strict=True))
        sums = record_words.numbers_of(words, self.ranks, words.device.type == "cpu" and not as_tensors)
        return dict(zip(self.names, sums, strict=True))

    def send(self, values: Mapping[str, Any]) -> Sums:
        """Start summing this rank's values in a message of their own."""
        if not self.axes and not any(isinstance(value, Tensor) for value in values.values()):
            return Sums(self, known={name: float(values.get(name, 0.0)) for name in self.names})
        words = self.words(values, self.dtype, self.device).to(self.device)
        return Sums(self, words, self.mesh.reduce_(words, self.axes))

    def alike(self, values: Mapping[str, Any]) -> Sums:
        """The sums where all ranks have these values, without a message."""
        return Sums(self, known={name: values.get(name, 0.0) * self.ranks for name in self.names})


class Sums:
    """The sums of a record, whose message may be under way. The first look waits for it."""

    def __init__(
        self,
        record: Record,
        words: Tensor | None = None,
        work: Work | None = None,
        known: dict[str, float] | None = None,
    ) -> None:
        self._record, self._words, self._work, self._known = record, words, work, known

    def wait(self) -> dict[str, float]:
        """The sums by name, as numbers."""
        if self._known is None:
            self._known = numbers(self.read(), partial(read_now, self._record.mesh))
        return self._known

    def read(self, as_tensors: bool = False) -> dict[str, Any]:
        """The sums by name, see `Record.read`."""
        if self._words is None:
            if not as_tensors:
                return self.wait()
            return {name: torch.tensor(value, dtype=torch.float64) for name, value in self.wait().items()}
        work, self._work = self._work, None  # which holds connections
        if work is not None:
            work.wait()
        return self._record.read(self._words, as_tensors)

    def __getitem__(self, name: str) -> float:
        """The sum of a scalar."""
        return self.wait()[name]

    def ranks(self, flag: str) -> tuple[int, ...]:
        """The ranks that have set a flag."""
        sums = self.wait()
        return record_words.ranks_in([sums[name] for name in flag_words(flag, self._record.ranks)])


def flag_words(flag: str, ranks: int) -> list[str]:
    """The names of the words that hold a flag of these ranks."""
    return [f"{flag}{i}" for i in range(record_words.mask_words(ranks))]


class StepRecord(Record):
    """The record of the steps of one rank, summed over some axes; see `record_names`."""

    def __init__(self, mesh: Communicator, axes: tuple[str, ...]) -> None:
        super().__init__(mesh, axes, ())
        self.names, self._sums = record_words.record_names(self.ranks), list[str]()  # the names in aux["sum"], sorted
        self._fine = frozenset[str]()  # the names of values that have been checked

    def take_names(self, values: dict[str, Any]) -> bool:
        """Agree on the names in the first step: only ranks with a batch know the names of aux["sum"].

        Returns:
            Whether any rank knew them.
        """
        found = common_names(self.mesh, self.axes, _sums_in(values) if values["weight"] else None)
        self._sums, self._fine = list(found or ()), frozenset()
        self.names = record_words.record_names(self.ranks, self._sums)
        return found is not None

    def fit(self, layout: tuple[Bucket, ...]) -> None:
        """Take the dtype and the device that go with these buckets."""
        self.dtype = record_words.words_dtype(bucket.dtype for bucket in layout)
        self.device = layout[0].device if layout else torch.device("cpu")

    def check(self, values: dict[str, Any]) -> None:
        """Raise ValueError unless aux["sum"] has the names of the first step."""
        if not values["weight"] or values.keys() == self._fine:
            return
        have, want = sorted(_sums_in(values)), self._sums
        if have != want:
            raise ValueError(
                f"aux['sum'] has the names {have}, but in the first step it had {want}; they must stay the same"
            )
        self._fine = frozenset(values)

    def complete(self, values: dict[str, Any], step_id: float, has_next: float = 0.0) -> dict[str, Any]:
        """This rank's record, from its `own_values`.

        Args:
            step_id: The number of the step, see `StepIds`.
            has_next: See `Requests.write`.
        """
        known, bad = {**values, "has_next": has_next, "step_id": step_id}, values.get("bad", 0.0)
        own = {name: known.get(name, 0.0) for name in self.names}
        return own if type(bad) is float and not bad else self.flagged(own, record_words.NONFINITE, bad)

    def left_out(self, values: dict[str, Any], left_out: Any) -> dict[str, Any]:
        """A record whose bit means that this rank left out the step before, and not that the present one is bad.

        Args:
            left_out: 1 if this rank has left it out, otherwise 0.
        """
        own = {name: value for name, value in values.items() if not name.startswith(record_words.NONFINITE)}
        return self.flagged(own, record_words.NONFINITE, left_out)


def own_values(weight: float, loss: Tensor | None, sums: dict[str, Any], window: dict[str, Any]) -> dict[str, Any]:
    """What a rank knows before its gradients, added to that of earlier calls of the window.

    Args:
        weight: Its weight in the mean.
        sums: The user's sums.
        window: The values of the earlier calls.
    """
    value: Any = 0.0 if loss is None else weight * host_number(loss.detach())
    own: dict[str, Any] = {"live": float(weight > 0), "weight": weight, "loss": value}
    if isinstance(value, Tensor):
        own["bad"] = (~torch.isfinite(value)).to(torch.float64)
    else:
        own["bad"] = float(not math.isfinite(value))
    if sums:
        own.update({f"sum.{name}": v for name, v in sums.items()})
    if window:
        own = {name: own.get(name, 0.0) + window.get(name, 0.0) for name in {**window, **own}}
        bad = own["bad"]
        own["bad"] = torch.clamp(bad, max=1.0) if isinstance(bad, Tensor) else min(bad, 1.0)
        own["live"] = min(own["live"], 1.0)
    return own


def host_number(value: Tensor) -> Any:
    """A 0-d tensor on the CPU as a number; any other, whose value would have to be awaited, as a float64 tensor."""
    return float(value.item()) if value.device.type == "cpu" else value.detach().to(torch.float64)


def _sums_in(names: Any) -> list[str]:
    return [name.removeprefix("sum.") for name in names if name.startswith("sum.")]
