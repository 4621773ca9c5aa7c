"""A custom loop over uneven inputs: the loop of one rank, or one that several steps share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, overload

from ..groups._make_mesh import world_mesh
from ..groups._mesh import Mesh, check_mesh
from ..training._join_steps import NO_BATCH, JoinedLoader
from ..training._step import TrainStep
from ..transforms._check import whole_number
from ._loop import Loop

B = TypeVar("B")


@overload
def join(
    loader: Iterable[B],
    *,
    mesh: Mesh | None = None,
    weight: Callable[[B], float] | None = None,
    accumulate: int = 1,
    empty: Any = NO_BATCH,
    throw_on_early_termination: bool = False,
) -> Loop[B]: ...
@overload
def join(
    loader: Iterable[B],
    *,
    steps: Sequence[TrainStep],
    empty: Any = NO_BATCH,
    throw_on_early_termination: bool = False,
    when_exhausted: Literal["shadow", "replay"] = "shadow",
) -> JoinedLoader[B]: ...
def join(
    loader: Iterable[B],
    *,
    steps: Sequence[TrainStep] | None = None,
    mesh: Mesh | None = None,
    weight: Callable[[B], float] | None = None,
    accumulate: int = 1,
    empty: Any = NO_BATCH,
    throw_on_early_termination: bool = False,
    when_exhausted: Literal["shadow", "replay"] = "shadow",
) -> Any:
    """Iterate over this rank's loader until all ranks are out of input, in a custom loop.

    Every rank runs the body equally often, so all communication in it finds its peers: collectives of a custom loop,
    DistributedDataParallel, fully_shard and tensor-parallel models.

    - A rank that is out of input gets its last batch again, with weight 0.
    - To count every sample once, multiply the loss, the mean over the local batch, by `loop.scale`. The loss must be
      finite even where the scale is 0.
    - Iterations in which no rank has weight are left out.
    - Other changes by the body, such as to a module's buffers, happen on all ranks.
    - Each iteration, with accumulate=k each window, has one small message between the ranks, under way while the body runs.

    With `steps`, several `train_step`s share the loader, as a generator's and a discriminator's do, and no
    message is added. The body must call each of them exactly once in each iteration, in the same order on all ranks.

    Args:
        loader: Any iterable of batches, of any length on each rank, 0 included. The loop takes the next batch before
            the body has run on the current one, so the loader must not write it into the memory of the current one: a
            loader that reuses its buffer must yield copies. Writes by tensor operations are detected at once, writes by
            numpy one batch later.
        steps: Steps made by `train_step`, over the same axes and with the same `accumulate`.
        mesh: The ranks, without `steps`; by default all ranks.
        weight: `batch -> float`, without `steps`: the batch's weight, its samples or its tokens; by default 1.
        accumulate: Without `steps`: the iterations, k on all ranks, whose gradients the body sums before it steps, where
            `loop.sync_gradients`. `loop.scale` is exact over the window's samples. Up to 2 k batches are held at a time.
        empty: The batch for a rank that never has one; every use of the default raises `NoBatch`.
        throw_on_early_termination: Raise on all ranks where the first is out of input.
        when_exhausted: With `steps`, as in `TrainStep.join`.

    Returns:
        A `Loop`; with `steps` a `JoinedLoader`.

    Raises:
        EarlyTermination: on all ranks, see above.
        DesyncError: ranks have different values of `accumulate`.
        JoinError: the loop is still running; the loader has written into the previous batch; with `steps`, the body did
            not call each exactly once.
        PeerLost: another rank left the loop, by break, return or an exception, and this one did not within 30 s:
            the mesh is taken down, by default the default process group. Ranks that wait in a module's own messages end
            with the backend's error: over groups of its own, such as those of `fully_shard`, at their time-out.
        TypeError, ValueError: an argument that cannot be used.

    >>> loop = fjoin.join([torch.ones(3), torch.ones(1)], weight=len)
    >>> [(batch.sum().item(), loop.live, loop.weight, loop.total, loop.scale) for batch in loop]
    [(3.0, True, 3.0, 3.0, 1.0), (1.0, True, 1.0, 1.0, 1.0)]
    """
    if steps is None:
        if when_exhausted != "shadow":
            raise TypeError(
                "when_exhausted is for join(loader, steps=...); without steps every rank runs the body itself"
            )
        if mesh is not None:
            check_mesh("join", mesh)
        whole_number("accumulate", accumulate, 1)
        return Loop(loader, mesh or world_mesh(), weight, empty, throw_on_early_termination, accumulate)
    if mesh is not None or weight is not None or accumulate != 1:
        raise TypeError("join(loader, steps=...) takes no mesh, no weight and no accumulate; the steps have their own")
    steps = list(steps)
    if not steps or not all(isinstance(step, TrainStep) for step in steps):
        raise TypeError(f"steps must be steps made by train_step, at least one, got {steps!r}")
    if len(set(map(id, steps))) < len(steps):
        raise ValueError("steps must be different ones; the body calls each once in each iteration")
    in_loop = [step._in_loop for step in steps]
    alike = [step.form for step in in_loop]
    if any(one != alike[0] for one in alike):
        raise ValueError(f"steps must have the same mesh, axes and accumulate, so that they end together; got {alike}")
    return JoinedLoader(
        in_loop,
        loader,
        empty=empty,
        throw_on_early_termination=throw_on_early_termination,
        when_exhausted=when_exhausted,
    )
