"""The forward and the backward pass of a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._taken import warn_of_module_params
from ...buckets._aliases import copy_if_aliased
from ...buckets._flat_params import Storage
from ...buckets._grad_hooks import GradHooks
from ...groups._mesh import Mesh
from ...transforms._axis_env import Axis, BoundCall, bind_axes, bind_in_backward
from ...transforms._call_env import bind_call
from ..state._state_data import StateData
from ._iteration import Iteration
from ._loss import Loss
from ._loss_weight import GradOutput
from ._shadowed import shadowed

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

    def __init__(self, loss: Loss, mesh: Mesh, axes: tuple[str, ...], ranks: int) -> None:
        self._loss, self._mesh, self._ranks = loss, mesh, ranks
        self._shadowed = shadowed(mesh.axes, axes)
        self._reached = False  # whether a backward pass has reached a parameter
        self.hooks: GradHooks = GradHooks()

    def check(self, buffers: bool) -> None:
        """Raise where `loss_fn` cannot be called with (or without) buffers; see `Loss.check`."""
        self._loss.check(buffers)

    def weigh(self, batch: Any, iteration: Iteration | None) -> float:
        """The weight of this rank's batch; 0 where it is out of input."""
        return self._loss.weigh(batch) if iteration is None or iteration.live else 0.0

    def forward(self, body: StateData, batch: Any, weight: float, number: int, iteration: Iteration | None) -> Forward:
        """Run the forward pass. A rank without weight runs it only for a model with collectives of its own."""
        replays = iteration is not None and iteration.replays
        if weight:
            alone = iteration is None or replays or self._ranks == 1
            axes = self._mesh.axes if alone else self._shadowed
            call = BoundCall(weight, number)
            return Forward(weight, *self._run(body, batch, call, axes), axes=axes, call=call)
        if not replays:
            return Forward(0.0, buffers=body.buffers)
        call = BoundCall(0.0, number)
        replayed, _, buffers = self._run(body, batch, call, self._mesh.axes)
        return Forward(0.0, buffers=buffers, replayed=replayed, axes=self._mesh.axes, call=call)

    def _run(
        self, body: StateData, batch: Any, call: BoundCall, axes: dict[str, Any]
    ) -> tuple[Tensor, Any, dict[str, Tensor] | None]:
        storage = body.storage
        params = body.rebuild(dict(storage.leaves))
        with torch.enable_grad(), bind_axes(axes), bind_call(call):
            loss, aux, buffers = self._loss(params, body.buffers, batch)
        torch.clear_autocast_cache()  # an autocast around the loop would keep casts of these parameters for the next step
        if aux is not None or buffers is not None:
            aux, buffers = copy_if_aliased((aux, buffers), storage.written(bool(body.window)))
        return loss, aux, buffers

    def backward_within(self, forward: Forward, grad_output: GradOutput, storage: Storage) -> None:
        """Run the backward pass of a call within a window: gradients are added, and nothing is sent."""
        with bind_in_backward(forward.axes, forward.call):
            if forward.loss is not None:
                with self.hooks.keeping():
                    self._backward(forward.loss, grad_output, storage, 0)
            elif forward.replayed is not None:
                with storage.grads_aside(), self.hooks.keeping():
                    NOTHING.backward(forward.replayed)

    def backward(self, forward: Forward, grad_output: GradOutput, storage: Storage) -> None:
        """Run the backward pass of a step, whose gradients the queue sends."""
        with bind_in_backward(forward.axes, forward.call):
            if forward.loss is not None:
                self._backward(forward.loss, grad_output, storage, 2)
            elif forward.replayed is not None and self.hooks.queue is not None:
                with self.hooks.queue.muted(storage):
                    NOTHING.backward(forward.replayed)

    def _backward(self, loss: Tensor, grad_output: GradOutput, storage: Storage, inside: int) -> None:
        """Run the backward pass, and check that it reaches a parameter, until one pass has.

        Args:
            inside: The number of calls between a step's and this one, beyond those within a window, for the place of a
                warning.

        Raises:
            ValueError: it reaches no parameter.
        """
        grad_output.backward(loss)
        if self._reached:
            return
        queue = self.hooks.queue
        taken = queue is not None and any(any(out.taken) for out in queue.outgoing)
        kept = bool(storage.window) or any(leaf.grad is not None for leaf in storage.leaves.values())
        if storage.leaves and not taken and not kept:
            raise ValueError(
                "the loss depends on none of params: no parameter has got a gradient. Does loss_fn call the module itself? Then write "
                "apply, params, buffers = fjoin.functional(module) and call apply(params, buffers, ...) in loss_fn; to leave a "
                "batch out, give it weight 0"
            )
        self._reached = True
        warn_of_module_params(loss, stacklevel=8 + inside)
