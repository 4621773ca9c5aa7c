"""A loop over uneven inputs as an object: its position, and its end before that of the input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from .._errors import JoinError
from ..agreement._requests import Requests
from ._position import Position

B = TypeVar("B")


class JoinedLoop(Generic[B]):
    """A loop that ends on all ranks together. Each `for` loop over it is an epoch.

    Attributes:
        stopped: Whether the last loop ended because some rank had called `stop`; the same on all ranks.
    """

    def __init__(self, loader: Iterable[B], rank: int, ranks: int) -> None:
        self._position = Position(loader, rank, ranks)
        self._running = self.stopped = False

    def __iter__(self) -> Iterator[B]:
        raise NotImplementedError

    def __len__(self) -> int:
        """The number of this rank's own batches in an epoch, for progress bars. The loop runs as long as any rank has one.

        Raises:
            TypeError: the loader has no length.
        """
        loader: Any = self._position.loader
        return len(loader)

    def __bool__(self) -> bool:
        return True  # whatever the length

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self._position.loader).__name__}, epoch={self.epoch})"

    @property
    def _requests(self) -> Requests:
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The number of epochs that have ended: loops that went on until all ranks were out of input, or were left."""
        return self._position.epoch

    def stop(self) -> None:
        """End the loop on all ranks together, after at most one more iteration; any rank may call it in the body.

        Nothing is sent for it: the request travels with the next message of the loop. With accumulate=k the loop ends with
        the window after the present one at the latest. It ends one step or window later on a GPU, and one in local SGD, where no
        rank waits for the message of the last step. Where all ranks run out of input before, the loop ends as it would have,
        and `stopped` is False if the request has not travelled.

        Raises:
            JoinError: no loop runs.
        """
        if not self._running:
            raise JoinError(
                "stop() was called while no loop runs; call it inside the body of `for batch in batches`, with batches = "
                "step.join(loader) or fjoin.join(loader)"
            )
        self._requests.ask_end_of_loop()

    def state_dict(self) -> dict[str, Any]:
        """The position of this rank: in the body that after this iteration, between loops that of the next epoch.

        The batch that the loop has loaded ahead counts as not used. The streams of random numbers of torch, Python and
        numpy are part of the position, so that a resumed run has the same order, augmentation and dropout. Call it in
        the body after the step.

        Returns:
            A dict of numbers, strings, lists and tensors (uint8), and the loader's own state where it has one.

        Raises:
            TypeError: the loader is an iterator, which cannot start again.
        """
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next loop at a position that `state_dict` of the same rank returned.

        The streams of random numbers are set when the loop begins. A loader that has `state_dict` and `load_state_dict`
        continues from its own state, taken before the loop loaded ahead. Another loader starts the epoch again, and
        the loop skips the batches that were used; a warning says how many. Workers that outlive an epoch
        (persistent_workers=True) keep streams of their own, which are not restored.

        With a batch sampler `Shuffled` nothing is skipped, and the number of ranks may differ: then any rank's
        position will do, and the streams of random numbers stay as they are.

        Args:
            state: The position. Its tensors are not kept.

        Raises:
            JoinError: a loop runs.
            ValueError: the position is no such dict, that of another rank, or does not fit the loader.
        """
        if self._running:
            raise JoinError("load_state_dict was called inside the loop; call it before `for batch in batches`")
        self._position.load_state_dict(state)


def left_alone(rank: int, name: str, number: int) -> str:
    """The text for a rank that has left a loop while others have not."""
    return (
        f"rank {rank} left the loop over {name} in iteration {number}, and others have not. Where an exception or an interrupt ended it, "
        f"see that rank's own error. To end it on all ranks at once, call stop() on the loop: batches = {name}(loader), and "
        f"batches.stop() in its body; or leave it by break or return on all ranks after the same step"
    )
