"""Making the training step of a rank from the user's arguments, which are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..groups._make_mesh import mesh as make_mesh
from ..groups._mesh import Mesh, check_mesh
from ..transforms._check import flag, whole_number
from ..transforms.pipelines._pipeline import Pipeline
from ..transforms.transform._transform import Transform, check_transform
from ._run import Run
from ._step import TrainStep
from .passes._loss import Loss


def train_step(
    loss_fn: Callable[..., Any],
    pipeline: Pipeline,
    *,
    mesh: Mesh | None = None,
    donate: bool = True,
    weight: Callable[[Any], float] | None = None,
    bucket_bytes: int | None = None,
    accumulate: int = 1,
    on_buffers: Transform | None = None,
) -> TrainStep:
    """Make the training step of this rank from a loss and a pipeline.

    Gradients travel in buckets during the backward pass, weighted so that the result equals that of one
    process on all ranks' batches together; every rank then takes the same optimizer step.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`: the mean over the local batch, 0-d. With
            buffers: `(params, buffers, batch) -> (loss, aux, buffers)`. Numbers under aux["sum"] are
            summed over the ranks in the same messages, and returned in `metrics.sums`.
        pipeline: A `Pipeline`, made by `fuse`.
        mesh: The ranks; by default all ranks, as the axis "data".
        donate: Whether a step takes the memory of the state it is given. False keeps the old state usable,
            at the cost of a copy in each step.
        weight: `batch -> float`, this batch's weight in the mean: its samples, its tokens; 0, or from 1e-30 to 1e30. By default
            each rank that has a batch counts 1. It is a number of the host: for a tensor on a device the host waits in
            each step. A 16-bit loss rounds it to its own precision. The weighted gradients of float16 parameters are
            scaled by a power of two in messages, so that weights of thousands do not overflow in a `mean`.
        bucket_bytes: The size in bytes at which a bucket of gradients is sent; by default 5 MiB on the CPU and 25 MiB on
            accelerators. More, such as 20 * 2**20, can be faster where a hook sends little of each bucket in several messages, as
            `power_sgd` does.
        accumulate: The number of micro-batches in a step: the step is called once for each, and sends and steps in
            the last call of each window. In a loop of `join` a window at the end may be shorter, also where a rank ends in the
            middle of one; its weights count as they are.
        on_buffers: The transform of the buffers at the end of a step: `average_buffers(axis)`,
            `broadcast_buffers(axis)`, different ones for different buffers with `partition`, or only in some steps with
            `every`. By default each rank keeps its own buffers.

    Returns:
        A `TrainStep`.

    Raises:
        TypeError, ValueError: an argument that cannot be used.

    Same as: torch's DistributedDataParallel, Join and optimizer in one.

    >>> from fjoin import transforms as tx
    >>> def loss_fn(params, batch):
    ...     return ((params["w"] * batch - 1) ** 2).mean()
    >>> step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)), weight=len)
    >>> state = step.init({"w": torch.tensor(0.0)})
    >>> for batch in step.join([torch.ones(2), torch.ones(1)]):
    ...     state, metrics = step(state, batch)
    >>> state.params["w"], metrics.weight
    (tensor(0.3600), 1.0)
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, got {loss_fn!r}")
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"pipeline must be a Pipeline, got {pipeline!r}; write fuse(hook, optimizer)")
    if mesh is not None:
        check_mesh("train_step", mesh)
    if weight is not None and not callable(weight):
        raise TypeError(f"weight must be a function of the batch, or None, got {weight!r}")
    flag("donate", donate)
    whole_number("accumulate", accumulate, 1)
    if bucket_bytes is not None:
        whole_number("bucket_bytes", bucket_bytes, 1)
    mesh = mesh or make_mesh({"data": -1})
    if any(part.pauses for part in pipeline.ends):
        raise ValueError(
            "after=... or on_state=... holds accumulate(...), but parameters cannot be accumulated; use every(steps, ...)"
        )
    if pipeline.hook.pauses:
        raise ValueError(
            "the hook holds accumulate(...), which a train_step does itself: pass train_step(..., accumulate=k)"
        )
    if on_buffers is not None:
        check_transform(on_buffers, "train_step: on_buffers")
        if on_buffers.pauses:
            raise ValueError(
                "on_buffers=... holds accumulate(...), but buffers cannot be accumulated; use every(steps, ...)"
            )
    run = Run(Loss(loss_fn, weight), pipeline, mesh, accumulate, on_buffers)
    return TrainStep(run, donate, bucket_bytes)
