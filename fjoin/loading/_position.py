"""The position of a loop over a loader, and its random streams."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from torch.utils.data import DataLoader

from .._errors import EarlyTermination, JoinError, NonFinite, described
from ..records import Requests
from ..transforms.base import checks
from ._fingerprint import fingerprint
from ._generators import Streams, generators_of
from ._shuffled import Shuffled

B = TypeVar("B")
END: Any = object()


def check_position(state: Any) -> None:
    """Look at every value of a position but the loader's own.

    Raises:
        ValueError: it is not what `state_dict` of a joined loop returns.
    """
    try:
        numbers = [state[name] for name in ("epoch", "batches", "steps", "rank", "ranks")]
        if any(type(one) is not int or one < 0 for one in numbers) or type(state["ended"]) is not bool:
            raise ValueError(f"its numbers are {numbers}, and ended is {state['ended']!r}")
        if "now" not in {name: Streams.of(one) for name, one in state["streams"].items()}:
            raise ValueError("it has no streams of random numbers")
    except Exception as error:  # of any value, whatever takes it first
        text = "load_state_dict takes what state_dict() of a joined loop returned, got"
        found = sorted(state) if isinstance(state, Mapping) else state
        raise ValueError(f"{text} {found!r}: {described(error)}") from error


_CAUSES = (
    "Likely causes: set_epoch with another number than loop.epoch; another seed, dataset, batch size or number of workers; a sampler or "
    "dataset that counts its epochs, or has random numbers elsewhere than in its attributes; augmentation in persistent workers; batches, "
    "or objects in them, that change when they are used"
)


class BeforeBatch(NamedTuple):
    """What a rank needs to load a batch again: taken before it was loaded."""

    streams: Streams
    loader: Any  # the loader's own state; None if it has none


class Position(Generic[B]):
    """Loads the batches of a loop over uneven inputs, and knows where it is.

    A batch is loaded in an iteration before the one that uses it. A resumed run loads it again. So the streams of
    random numbers are those of three moments: before the loader's `iter`, since that draws the order of
    `DataLoader(shuffle=True)`; before the batch was loaded, since its transforms draw; and now, since the model draws.
    So are those of the generators that the loader, its samplers and its dataset have as attributes.

    Attributes:
        epoch: The number of epochs that have ended.
        batches: The batches of this rank that the iterations of this epoch have used so far, the one that runs
            included.
        steps: The iterations of this epoch so far, on all ranks, the one that runs included.
        order: The sampler `Shuffled` as text, which is the same on all ranks; None for another one.
        last: In a resumed loop, the last batch of a rank that was out of input; else `END`.

    Args:
        loader: The loader.
        rank, ranks: This rank, and the number of ranks.
    """

    def __init__(self, loader: Iterable[B], rank: int, ranks: int) -> None:
        self.loader: Any = loader
        self._rank, self._ranks = rank, ranks
        sampler = loader if isinstance(loader, Shuffled) else getattr(loader, "batch_sampler", None)
        self._shuffled = sampler if isinstance(sampler, Shuffled) else None
        self.order = None if self._shuffled is None else repr(self._shuffled)
        # Whether the loader saves and loads its own position, as torchdata's StatefulDataLoader does.
        both = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
        self._saves = both and self._shuffled is None
        self._generators = generators_of(loader)
        self._streams = partial(Streams.now, self._generators)
        self.epoch = self.batches = self.steps = 0
        self.last: Any = END
        self._within = False  # whether a loop has begun this epoch
        self._next = 0  # the number of the batch of this rank that is loaded next
        self._end: int | None = None  # the number at which the input ended, if it has
        self._start: Streams | None = None
        self._marks: dict[int, BeforeBatch] = {}  # by number, of the batch that was used last and of those loaded ahead
        self._ahead: dict[int, Any] = {}  # by number, the batches that are loaded and not used yet
        # Checksums of batches: of an epoch's last one, before the body has it; of the first ones of the first and the
        # latest epoch.
        self._last: int | None = None
        self._firsts: list[int | None] = [None, None]
        self._keeps_workers = isinstance(loader, DataLoader) and loader.persistent_workers and not self._saves
        self._had_workers = False  # whether workers of an earlier epoch lived when this one began
        self.resume: Mapping[str, Any] | None = None

    def begin(self) -> Any:
        """The first batch of a loop; `END` where there is none."""
        checks.iterable("loader", self.loader)
        resume, self.resume = self.resume, None
        own = resume if resume and (resume["rank"], resume["ranks"]) == (self._rank, self._ranks) else {}
        if resume is None:
            self.epoch += self._within  # the loop before was left within its epoch
            self.batches = self.steps = 0
        elif not own:
            self.batches = self.steps
        streams = {name: Streams.of(state) for name, state in own.get("streams", {}).items()}
        ended = bool(own.get("ended")) if self._shuffled is None else not self._shuffled.part(self.batches)
        again = ended and self.batches > 0  # the last batch is loaded once more
        used = self.batches - again
        self._within, self._next, self._end, self._marks, self.last = True, used, None, {}, END
        self._generators |= generators_of(self.loader)
        self._ahead, self._last = {}, None
        if self._shuffled is not None:
            self._shuffled.set_epoch(self.epoch, used)
        elif resume is not None and self._saves:
            self.loader.load_state_dict(copy.deepcopy(resume["loader"]))
        state = self._state_of_loader()
        if streams:
            self._restore_workers(own.get("workers", self._workers_live()))
            streams.get("start", streams["now"]).restore(self._generators)
        self._start, self._had_workers = self._streams(), self._workers_live()
        self._iterator: Iterator[B] = iter(self.loader)
        if resume is not None and self._shuffled is None and not self._saves:
            self._skip(used)
        if "ahead" in streams:
            streams["ahead"].restore(self._generators)
        first = self._load(BeforeBatch(self._streams(), state))
        self._compare(own)
        if again:
            self.last = first
            first = self.load()
        if first is END and self.epoch and isinstance(self.loader, Iterator):
            text = f"the loader is an iterator, of type {type(self.loader).__name__}, that an epoch before this one has used up"
            remedy = "pass something that iter() starts anew, such as a DataLoader or a list"
            warnings.warn(f"{text}; {remedy}", stacklevel=2)
        if "ahead" in streams:
            streams["now"].restore(self._generators)
        return first

    def _workers_live(self) -> bool:
        return self._keeps_workers and self.loader._iterator is not None

    def _restore_workers(self, live: bool) -> None:
        """Start the workers that outlive an epoch, or stop them: a DataLoader draws a number when they start."""
        if self._keeps_workers and live != self._workers_live():
            self.loader._iterator = None
            if live:
                DataLoader.__iter__(self.loader)  # not that of a subclass, which may be a generator

    def _checksum(self, number: int, devices: bool = False) -> int | None:
        """That of a batch that is loaded and not used yet."""
        return fingerprint(self._ahead[number], devices) if number in self._ahead else None

    def _compare(self, saved: Mapping[str, Any]) -> None:
        """Warn where the first batch of a resumed loop is not the one that the run that was saved had loaded ahead.

        Between epochs it had none; then the loop may not begin with the first batch of all, where the latest epoch did
        not.
        """
        number, ahead = self._next - 1, saved.get("ahead")
        own, (first, latest) = self._checksum(number), saved.get("firsts", self._firsts)
        if saved and ahead is None and number == 0 and own == first != latest:
            text = "the resumed epoch begins with the first batch of the first epoch, and the epoch before it did not"
            warnings.warn(f"{text}, which may be chance. {_CAUSES}", stacklevel=3)
        elif ahead is not None and ahead != self._checksum(number, not saved["ended"]):
            text = "the resumed loop begins with another batch than the run that was saved would have"
            warnings.warn(f"{text}. {_CAUSES}", stacklevel=3)
        self._firsts = [first, latest] if number else [own if first is None else first, own]

    def _skip(self, count: int) -> None:
        if count:
            text = f"to resume, the loop loads {count} batches on rank {self._rank} only to skip them"
            remedy = "a loader with state_dict and load_state_dict, or a sampler fjoin.Shuffled, starts where it was"
            warnings.warn(f"{text}; {remedy}", stacklevel=2)
        for i in range(count):
            if next(self._iterator, END) is END:
                text = f"the loader of rank {self._rank} ended after {i} batches, but load_state_dict got a position after {count}"
                raise ValueError(f"{text}; pass a loader of the same data and batch size as the one that was saved")

    def load(self) -> Any:
        """The next batch; `END` where there is none, and after that."""
        return END if self._end is not None else self._load(BeforeBatch(self._streams(), self._state_of_loader()))

    def _load(self, mark: BeforeBatch) -> Any:
        number, self._next = self._next, self._next + 1
        self._marks[number] = mark
        batch = next(self._iterator, END)
        if batch is not END:
            self._ahead[number] = batch
        else:
            self._end = number
            # Those of `Shuffled` are known by their numbers. Others are loaded again, for the body of a rank without
            # input.
            self._last = None if self._shuffled is not None else self._checksum(number - 1)
        return batch

    def _state_of_loader(self) -> Any:
        return copy.deepcopy(self.loader.state_dict()) if self._saves else None

    def use(self, live: bool) -> None:
        """An iteration begins, in which this rank has a batch or not."""
        self._ahead.pop(self.batches, None)
        self.batches += live
        self.steps += 1
        self._marks = {number: mark for number, mark in self._marks.items() if number >= self.batches - 1}

    def finish(self) -> None:
        """All ranks are out of input: the epoch has ended."""
        self.epoch += 1
        self.batches = self.steps = 0
        self._within, self._marks, self._ahead, self.last = False, {}, {}, END

    # -- as data ----------------------------------------------------------------------------------

    @property
    def streams(self) -> dict[str, Streams]:
        """Those of three moments: "start", of the epoch; "ahead", before the next batch was loaded; "now"."""
        streams = {"now": self._streams()}
        if (mark := self._mark()) and self._start is not None:
            streams |= {"start": self._start, "ahead": mark.streams}
        return streams

    def _mark(self) -> BeforeBatch | None:
        """What loads the next batch again; for a rank that is out of input its last one, for the body."""
        ended = self._within and self._end == self.batches
        return self._marks.get(self.batches - (ended and self.batches > 0))

    def begin_at(self, steps: int, accumulate: int, streams: Mapping[str, Streams] | None) -> None:
        """See `JoinedLoop.begin_at`."""
        if self._shuffled is None:
            text = f"begin_at needs a loader with a batch sampler fjoin.Shuffled, got a {type(self.loader).__name__}"
            raise ValueError(f"{text}; the batches of other loaders do not follow from the number of steps")
        self.epoch, at = divmod(steps, max(1, -(-self._shuffled.steps // accumulate)))
        self.steps = self.batches = at * accumulate
        shown = {name: one.state_dict() for name, one in (streams or {"now": self._streams()}).items()}
        self.resume = {"epoch": self.epoch, "steps": self.steps, "batches": self.batches, "ended": False}
        self.resume |= {"rank": self._rank, "ranks": self._ranks, "order": self.order, "streams": shown}

    def state_dict(self) -> dict[str, Any]:
        """See `JoinedLoop.state_dict`."""
        if self.resume is not None:
            return dict(self.resume)
        if isinstance(self.loader, Iterator) and not self._saves:
            text = f"state_dict(): the loader is an iterator, of type {type(self.loader).__name__}, which cannot start again"
            raise TypeError(f"{text}; pass a DataLoader, a list, or an object with state_dict and load_state_dict")
        self._generators |= generators_of(self.loader)  # also those made since the loop began
        ended, mark = self._within and self._end == self.batches, self._mark()
        streams = {name: one.state_dict() for name, one in self.streams.items()}
        found: dict[str, Any] = {"epoch": self.epoch, "batches": self.batches, "steps": self.steps, "ended": ended}
        found |= {"rank": self._rank, "ranks": self._ranks, "streams": streams}
        found |= {"order": self.order, "workers": self._had_workers if mark else self._workers_live()}
        # As the loader gave it, before the body has it.
        found |= {"ahead": self._last if ended else self._checksum(self.batches, devices=True), "firsts": self._firsts}
        if self._saves:
            found["loader"] = mark.loader if mark else self._state_of_loader()
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `JoinedLoop.load_state_dict`."""
        check_position(state)
        if self._shuffled is None and (state["rank"], state["ranks"]) != (self._rank, self._ranks):
            text = f"load_state_dict: the position is of rank {state['rank']} of {state['ranks']}, but this is rank"
            remedy = "load each rank's own; on another number of ranks use fjoin.Shuffled, or restore(data=False) and begin the epoch anew"
            raise ValueError(f"{text} {self._rank} of {self._ranks}; {remedy}")
        if self._shuffled is None and ("loader" in state) != self._saves:
            one, other = ("has", "has none") if "loader" in state else ("has no", "has one")
            text = f"load_state_dict: the position {one} state of the loader's own, but this loader, of type"
            raise ValueError(f"{text} {type(self.loader).__name__}, {other}; pass a loader of the kind that was saved")
        if state.get("order", self.order) != self.order:
            text = f"load_state_dict: the position is of a loader with {state['order']}, and this one has {self.order}"
            if state["batches"]:
                raise ValueError(f"{text}; pass the same, or begin the epoch anew, without the position")
            warnings.warn(f"{text}; the order of its epochs is another", stacklevel=3)
        own = state["streams"]["now"].get("own", self._generators)
        if own.keys() != self._generators.keys() and (state["rank"], state["ranks"]) == (self._rank, self._ranks):
            text = f"the position has the generators {sorted(own)}, and this loader has {sorted(self._generators)}"
            warnings.warn(f"load_state_dict: {text}; the others begin where they are", stacklevel=3)
        self.resume = dict(state)
        self.epoch, self.batches, self.steps = state["epoch"], state["batches"], state["steps"]


class Terminated(SystemExit):
    """A signal has ended the run; all ranks raise it at the same place."""


class JoinedLoop(Generic[B]):
    """A loop that ends on all ranks together. Each `for` loop over it is an epoch.

    It is not an iterator itself: a `for` loop drops its iterator when it ends, so that the other ranks learn of a
    `break` at once, even where this object is kept in a variable.

    Attributes:
        stopped: Whether the last loop ended because some rank had called `stop`; the same on all ranks.
    """

    stopped: bool = False

    def __init__(self, loader: Iterable[B], name: str, rank: int, ranks: int, throw: bool, requests: Requests) -> None:
        self._position, self._asks = Position(loader, rank, ranks), requests
        self._name, self._rank, self._ranks, self._throw = name, rank, ranks, throw
        self._running = False

    def __iter__(self) -> Iterator[B]:
        """An epoch.

        An exception of the loader or a message passes through here, and is reported to the other ranks. Whatever else
        leaves the loop early closes or drops this generator between two iterations, be it `break`, another iterable
        that ends before, or an exception in the body. That is an end if all ranks do so in the same iteration.
        """
        self._begin()
        self._running, self.stopped = True, False
        try:
            yield from self._epoch()
        except GeneratorExit:
            self._leave(
                f"rank {self._rank} left the loop over {self._name} in iteration {self._position.steps - 1}, and others have not. Where "
                f"an exception or an interrupt ended it, see that rank's own error. To end it on all ranks at once, call stop() on the "
                f"loop: batches = {self._name}(loader), and batches.stop() in its body; or leave it on all ranks after the same step"
            )
            raise
        except (EarlyTermination, NonFinite, Terminated):  # all ranks raise these at the same place
            raise
        except BaseException as error:
            self._fail(error)
        finally:
            self._running = False
            self._end()

    def _begin(self) -> None:
        """Raise where no loop may begin."""

    def _epoch(self) -> Iterator[B]:
        """The batches for the body."""
        raise NotImplementedError

    def _leave(self, text: str) -> None:
        """The loop was left between two iterations; `text` is the error of ranks that go on. It does not raise."""

    def _fail(self, error: BaseException) -> NoReturn:
        """Report an error to the other ranks, and raise its root cause."""
        raise NotImplementedError

    def _end(self) -> None:
        """The loop has ended, in whatever way."""

    def _throw_if_uneven(self, have: float) -> None:
        """Raise, where the user wants that, if only some ranks have a batch for the next iteration."""
        if self._throw and 0 < have < self._ranks:
            raise EarlyTermination(
                f"{self._ranks - int(have)} of {self._ranks} ranks are out of input in iteration {self._position.steps} while the "
                f"others have more, and throw_on_early_termination is set",
                step=self._position.steps,
            )

    def __len__(self) -> int:
        """The number of this rank's own batches in an epoch, for progress bars. The loop runs as long as any rank has
        one.

        Raises:
            TypeError: the loader has no length.
        """
        return len(self._position.loader)

    def __bool__(self) -> bool:
        return True  # whatever the length

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self._position.loader).__name__}, epoch={self.epoch})"

    @property
    def epoch(self) -> int:
        """The number of epochs that have ended: loops that went on until all ranks were out of input, or were left."""
        return self._position.epoch

    @property
    def resumed(self) -> tuple[int, int] | None:
        """The (epoch, batches) that `load_state_dict` has given, until the loop begins; otherwise None."""
        given = self._position.resume
        return None if given is None else (given["epoch"], given["batches"])

    def stop(self) -> None:
        """End the loop on all ranks together, after at most one more iteration; any rank may call it in the body.

        Nothing is sent for it: the request travels with the next message of the loop. With accumulate=k the loop ends
        with the window after the present one at the latest. It ends one step or window later on a GPU, and one in local
        SGD, where no rank waits for the message of the last step. Where all ranks run out of input before, the loop
        ends as it would have, and `stopped` is False if the request has not travelled.

        Raises:
            JoinError: no loop runs.
        """
        if not self._running:
            raise JoinError("stop() was called while no loop runs; call it inside the body of `for batch in batches`")
        self._asks.ask_end_of_loop()

    def state_dict(self) -> dict[str, Any]:
        """The position of this rank: in the body after this iteration, between loops at the start of the next epoch.

        The batch that the loop has loaded ahead counts as not used. The streams of random numbers of torch, Python and
        numpy are part of the position, so that a resumed run has the same order, augmentation and dropout; likewise
        generators that are attributes of the loader, its samplers and its dataset. Call it in the body after the step.

        Returns:
            A dict of numbers, strings, lists, dicts and tensors (uint8), and the loader's own state where it has one.

        Raises:
            TypeError: the loader is an iterator, which cannot start again.
        """
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next loop at a position that `state_dict` of the same rank returned.

        The streams of random numbers are set when the loop begins. A loader that has `state_dict` and `load_state_dict`
        continues from its own state, taken before the loop loaded ahead. Another loader starts the epoch again, and
        the loop skips the batches that were used; a warning says how many. Workers that outlive an epoch
        (persistent_workers=True) are started or stopped as they were; the streams in them are not restored.

        With a batch sampler `Shuffled` nothing is skipped, and the number of ranks may differ: then any rank's
        position will do, and the streams of random numbers stay as they are.

        Args:
            state: The position. Its tensors are not kept.

        Warns:
            UserWarning: the loader has other generators, or between epochs another `Shuffled`. When the loop begins:
                its first batch is not the one that the loop that was saved had loaded ahead.

        Raises:
            JoinError: a loop runs.
            ValueError: the position is no such dict, that of another rank, or does not fit the loader; within an epoch
                it is of another `Shuffled`.
        """
        self._check_outside("load_state_dict")
        self._position.load_state_dict(state)

    @property
    def streams(self) -> dict[str, Streams]:
        """The random streams in `state_dict`, for `begin_at` in this process."""
        return self._position.streams

    def begin_at(self, steps: int, accumulate: int = 1, streams: Mapping[str, Streams] | None = None) -> None:
        """Begin the next loop after a number of steps, on any number of ranks, over a loader with `Shuffled`.

        Args:
            steps: The number of steps of all epochs before, as in `state.step`.
            accumulate: The number of batches in a step; an epoch ends with a step.
            streams: Of this process, where it has been there before; by default they stay as they are.

        Raises:
            JoinError: a loop runs.
            ValueError: the loader has another sampler, so that its batches do not follow from a number of steps.
        """
        self._check_outside("begin_at")
        checks.whole_number("steps", steps, 0)
        self._position.begin_at(steps, accumulate, streams)

    def _check_outside(self, name: str) -> None:
        if self._running:
            raise JoinError(f"{name} was called inside the loop; call it before `for batch in batches`")
