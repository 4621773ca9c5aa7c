"""Errors of the shell. Each names the rank and the step, where these are known."""

from __future__ import annotations

from .transforms.base import DesyncError as DesyncError, DonatedState as DonatedState, FjoinError as FjoinError


def described(error: BaseException) -> str:
    """An error in words, with its type: an interrupt has no text of its own."""
    return ": ".join(part for part in (type(error).__name__, str(error)) if part)


def closed(failure: str = "") -> JoinError:
    """The error of a mesh that is used after its end.

    Args:
        failure: The failure after which it was taken down, in words; "" where it was closed.
    """
    ended = f"taken down after a failure: {failure}" if failure else "closed"
    return JoinError(f"this mesh was {ended}; make another one with fjoin.mesh(...)")


class PeerLost(FjoinError):
    """Another rank failed or its connection broke."""


class CollectiveTimeout(FjoinError):
    """Another rank did not arrive in time."""


class TransportError(FjoinError):
    """The system refuses shared memory, a message between the ranks of a host, or a port: a limit, a sandbox, another
    program.
    """


class EarlyTermination(FjoinError):
    """A rank ran out of input while others had more, under throw_on_early_termination."""


class JoinError(FjoinError):
    """A loop or a Join was used in a way that would leave other ranks waiting forever."""


class NoBatch(FjoinError):
    """A rank that never had a batch used the placeholder `NO_BATCH`."""


class NonFinite(FjoinError):
    """The loss, the weight or a gradient is NaN or infinite; on these ranks nothing has changed.

    Attributes:
        ranks: The ranks whose loss or gradients are not finite.
        paths: The parameters whose summed gradient is not finite, where they were determined.
    """

    ranks: tuple[int, ...]
    paths: tuple[str, ...]

    def __init__(
        self, message: str, *, step: int | None = None, ranks: tuple[int, ...] = (), paths: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, rank=ranks[0] if ranks else None, step=step)
        self.ranks, self.paths = ranks, paths


class CheckpointError(FjoinError):
    """A checkpoint cannot be written or read: a fault of the file system, damaged files, or a folder that another run
    uses.
    """


class TornState(FjoinError):
    """A state cannot be stepped: a step failed after it had changed some of the parameters, or within an accumulation
    window.

    In the second case the state can still be read and cloned; it is the state of the last completed step.
    """
