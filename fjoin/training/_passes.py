"""The forward and backward passes of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .._errors import JoinError
from .._functional import refuse_module_params
from ..buckets import GradHooks, Storage
from ..groups import Communicator
from ..step import StateData
from ..transforms.axes import Axis, BoundCall, bind_axes
from ..transforms.base import trees
from ._loss import Loss, LossParts


@dataclass
class Iteration:
    """One iteration of the loop, as its steps see it."""

    number: int
    has_batch: bool
    has_next: bool  # whether it has another batch after this one
    replays: bool = False  # whether ranks without weight still run `loss_fn`
    called: set[object] = field(default_factory=set)  # the steps that the body has called
    others: Callable[[], float] | None = None  # the number of ranks that have another batch, once a window has ended


class ShadowedAxis(Axis):
    """An axis over which collectives are refused, since ranks that are out of input would not take part in them.

    Args:
        axis: The axis that runs the collectives elsewhere.
        name: Its name.
        along: The axes along which ranks may be out of input.
    """

    def __init__(self, axis: Any, name: str, along: Collection[str]) -> None:
        self._axis, self.name, self._along = axis, name, along
        self.size = axis.size

    def index(self) -> Tensor:
        return self._axis.index()

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        if self.name in self._along:
            self._refuse(op)
        return self._axis.run(op, x, arg)

    def joint(self, axes: tuple[str, ...]) -> Axis | None:
        mixed = next((name for name in axes if name in self._along), None)
        if mixed is not None:
            return ShadowedAxis(self._axis, mixed, self._along)
        return self._axis.joint(axes)

    def check_rows(self, width: int, give: tuple[int, ...], take: tuple[int, ...]) -> None:
        if self.name in self._along:
            self._refuse("all_to_all_single")
        self._axis.check_rows(width, give, take)

    def _refuse(self, op: str) -> NoReturn:
        raise JoinError(
            f"loss_fn calls {op} over {self.name!r}, in which ranks that are out of input would not take part: they do not call "
            f"loss_fn; pass step.join(loader, when_exhausted='replay'), with which they do"
        )


class GradOutput(NamedTuple):
    """What a backward pass starts from, so that the gradients carry this rank's factor and the scale of the loss."""

    seed: Any = 1.0  # the gradient of the loss: a number, or a 0-d tensor like the loss
    late_factor: Tensor | None = None  # multiply the gradients by it before they are sent; 0-d float64
    rounding: float = 1.0  # seed / weight: not 1 only if a 16-bit loss rounds the weight

    def backward(self, loss: Tensor) -> None:
        seed = self.seed
        if isinstance(seed, float):
            seed = None if seed == 1.0 else torch.full_like(loss, seed)
        loss.backward(seed)


def grad_output_of(loss: Tensor | None, seed: float, scale: Tensor | None, adds: bool, is_weighted: bool) -> GradOutput:
    """What backward starts from: the seed, times the scale of the loss if there is one.

    A 16-bit loss would round the seed, so the gradients are multiplied later. In a window they cannot be, and the
    rounded weight counts.

    Args:
        loss: The loss. None if this rank has no batch.
        seed: See `Scaling.seed`.
        scale: The scale of the loss, 0-d float32, or None.
        adds: Whether gradients of several micro-batches are added before they are sent, so that each must already
            carry its seed.
        is_weighted: Whether backward must start from the seed, since a collective in the loss mixes the ranks' losses.

    Raises:
        ValueError: the seed does not fit into the loss's dtype.
    """
    wide = None if scale is None else scale.double()
    late_factor = None if wide is None else 1 / wide
    if loss is None:
        return GradOutput(0.0, late_factor if adds else None)
    rounding = 1.0
    if loss.dtype.itemsize < 4 and seed not in (0.0, 1.0) and not is_weighted:
        if adds:
            exact = seed * (1.0 if wide is None else wide.item())
            rounding = float(torch.tensor(exact, dtype=loss.dtype)) / exact
            seed *= rounding
        else:
            late_factor = torch.tensor(seed, dtype=torch.float64) * (1.0 if late_factor is None else late_factor)
            seed = 1.0
    if wide is not None:  # where the scaled loss overflows the gradients do too, and the step is left out
        scaled = (wide * seed).to(loss.device, loss.dtype)
        return GradOutput(scaled, late_factor, rounding if math.isfinite(rounding) else 1.0)
    if not (rounding and math.isfinite(seed)):
        raise ValueError(
            f"the weight of this batch is too {'large' if rounding else 'small'} for a loss of {loss.dtype}; return the loss as float32, "
            f"or use other weights (only their ratios matter)"
        )
    return GradOutput(seed, late_factor, rounding)


NOTHING = GradOutput(0.0)  # for a backward pass whose gradients are discarded


class Forward(NamedTuple):
    """What a forward pass has computed on this rank."""

    weight: float  # this rank's weight in the step: 0 without input
    loss: Tensor | None = None  # None without weight
    aux: Any = None
    buffers: dict[str, Tensor] | None = None
    replayed: Tensor | None = None  # the loss of a pass that was run for its collectives only
    # Bound in it, and in its backward pass, which may compute parts of it again.
    axes: dict[str, Axis] = {}
    call: BoundCall = BoundCall()


class Passes:
    """Runs `loss_fn` on this rank, and the backward pass of its result.

    Args:
        axes: The axes of the ranks that loop together.
        ranks: Their number.
    """

    def __init__(self, loss: Loss, mesh: Communicator, axes: tuple[str, ...], ranks: int) -> None:
        self._loss, self._mesh, self._ranks = loss, mesh, ranks
        self._shadowed: dict[str, Axis] = {name: ShadowedAxis(axis, name, axes) for name, axis in mesh.axes.items()}
        self._reached = False  # whether a backward pass has reached a parameter
        self.hooks: GradHooks = GradHooks()

    def forward(self, body: StateData, batch: Any, weight: float, number: int, iteration: Iteration | None) -> Forward:
        """Run the forward pass. A rank without weight runs it only for a model with collectives of its own."""
        replays = iteration is not None and iteration.replays
        if not weight and not replays:
            return Forward(0.0, buffers=body.buffers)
        alone = iteration is None or replays or self._ranks == 1
        axes, call = self._mesh.axes if alone else self._shadowed, BoundCall(weight, number)
        loss, aux, buffers = self._run(body, batch, call, axes)
        if not weight:
            return Forward(0.0, buffers=buffers, replayed=loss, axes=axes, call=call)
        return Forward(weight, loss, aux, buffers, axes=axes, call=call)

    def _run(self, body: StateData, batch: Any, call: BoundCall, axes: dict[str, Any]) -> LossParts:
        storage = body.storage
        params = body.rebuild(dict(storage.leaves))
        self.hooks.in_loss = True
        try:
            with torch.enable_grad(), bind_axes(axes, call):
                loss, aux, buffers = self._loss(params, body.buffers, batch)
        finally:
            self.hooks.in_loss = False
        torch.clear_autocast_cache()  # an autocast around the loop would keep casts of these parameters for the next step
        if aux is not None or buffers is not None:
            aux, buffers = trees.copy_if_aliased((aux, buffers), storage.written(bool(body.window)))
        return loss, aux, buffers

    def backward(self, forward: Forward, grad_output: GradOutput, storage: Storage, within: bool) -> None:
        """Run the backward pass of a call: the queue sends its gradients, or `within` a window they are added."""
        hooks, queue = self.hooks, self.hooks.queue
        with bind_axes(forward.axes, forward.call, in_backward=True), hooks.keeping() if within else nullcontext():
            if forward.loss is not None:
                self._backward(forward.loss, grad_output, storage)
            elif forward.replayed is not None:
                with storage.grads_aside() if within or queue is None else queue.muted(storage):
                    NOTHING.backward(forward.replayed)

    def _backward(self, loss: Tensor, grad_output: GradOutput, storage: Storage) -> None:
        """The backward pass; the first loss is checked.

        Raises:
            ValueError: it reaches no parameter, or one of a module that `functional` has taken.
        """
        if self._reached:
            return grad_output.backward(loss)
        refuse_module_params(loss)
        grad_output.backward(loss)
        queue = self.hooks.queue
        taken = queue is not None and any(any(bucket.taken) for bucket in queue.buckets)
        kept = bool(storage.window) or any(leaf.grad is not None for leaf in storage.leaves.values())
        if storage.leaves and not taken and not kept:
            raise ValueError(
                "the loss depends on none of params: no parameter has got a gradient. Does loss_fn call the module itself? Then write "
                "apply, params, buffers = fjoin.functional(module) and call apply(params, buffers, ...) in loss_fn; to leave a "
                "batch out, give it weight 0"
            )
        self._reached = True
