"""A pipeline on the slices that fully_shard leaves each rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..groups import Communicator, bind
from ..records import compare, read_now
from ..step import error_of_step
from ..transforms.axes import bind_axes, bound_call
from ..transforms.base import Call, Totals, shares, trees
from ..transforms.layout import LocalPieces, local_pieces, owners
from ..transforms.optimizers import with_hyperparameters
from ..transforms.pipelines import Explanation, Pipeline, make_plan, of_slices
from ..transforms.reductions import gather
from ._messages import REMEDY, UnitGather, UnitMessages, UnitReduce
from ._owners import Owners
from ._units import paths_in, units_of

_COMPARED = 2  # steps in which ranks compare the order of units in any case


class Others(NamedTuple):
    """What a module holds besides the parameters that are trained.

    Attributes:
        rows: The slices of its other parameters.
        slices: Path -> this rank's slice of them, flat.
        buffers: Path -> what is not sharded: the buffers of its state dict, and parameters that fully_shard ignores.
        keys: Key of the state dict -> path of the value; a shared parameter has several keys.
    """

    rows: LocalPieces
    slices: dict[str, Tensor]
    buffers: dict[str, Tensor]
    keys: dict[str, str]


class ShardedRun:
    """Steps the slices of a module's parameters by a pipeline.

    Attributes:
        model: The module.
        leaves: Path -> parameter, of those that are trained.
        what: The pipeline as it was registered.
        units: Path -> module for which fully_shard was called.
        weight: The sum of this rank's weights since the last step.
        in_backward: Whether `backward` runs.
        spoilt: Whether the gradients are of a backward pass that was refused.
        rows: The slices that this rank has.
        pieces: What it steps: the slices, and whole leaves that it owns.
        state: The state of the pipeline.
        steps: The number of steps.
        last_total: The sum of what the ranks counted in the last step; it may wait for a device.
    """

    def __init__(
        self, model: Any, leaves: dict[str, Any], pipeline: Pipeline, mesh: Communicator, axis: str, check_order: bool
    ) -> None:
        self.mesh, self.what, self.leaves, self.model, self._checks = mesh, pipeline, leaves, model, check_order
        self.units: dict[str, Any] = units_of(model)
        self.weight: float
        self.in_backward = self.spoilt = False
        self._last: Any = math.nan  # the total of the last step, which may still be on a device
        self._within: bool  # whether the last backward pass was one within a window, whose gradients nobody has sent
        self._arrived: list[Any] | None  # the versions of gradients that the next step may use
        shapes = {path: torch.empty(p.shape, dtype=p.dtype, device="meta") for path, p in leaves.items()}
        pipeline.check(shapes)
        with bind_axes(mesh.axes):
            ranks, rank = mesh.axes[axis].size, int(mesh.axes[axis].index())
            owner = owners(shapes, pipeline.optimizer, ranks)
            self.rows, self.pieces = (local_pieces(shapes, axis, ranks, rank, whole) for whole in ({}, owner))
            self._owners = Owners(self.rows, self.pieces, owner)
            self.pipeline = of_slices(pipeline, axis, self.pieces)
            self.state: Any = self.pipeline.init(self.params())
        self._plan = make_plan(self.pipeline.hook, mesh.shape)
        self._drop()  # of before
        self.messages: list[UnitMessages] = []
        for path, unit in self.units.items():
            gather, reduce = UnitGather(self, path), UnitReduce(self, path)
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(reduce)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            self.messages += (gather, reduce)

    @property
    def steps(self) -> int:
        return int((self.state.inner if self.pipeline.skips else self.state).step)

    @property
    def compares(self) -> bool:
        """Whether ranks compare which units they send."""
        return self._checks or self.steps < _COMPARED

    def reshard(self) -> None:
        """Drop whole parameters, which a forward pass without a backward pass has left; they would outlive a change."""
        for unit in self.units.values():
            unit.reshard()

    def local(self) -> dict[str, Tensor]:
        """Path -> this rank's slice of the parameter, flat, in its memory."""
        with torch.no_grad():  # else each of them is an operation of autograd
            return {path: p.to_local().view(-1) for path, p in self.leaves.items()}

    def params(self) -> dict[str, Tensor]:
        """Path -> what this rank steps."""
        with bind(self.mesh):
            return self._owners.gather(self.local())[0]

    def others(self) -> Others:
        """What else the module holds.

        Raises:
            RuntimeError: within a window of several batches, whose gradients belong to no step.
        """
        self._check_open()
        if self._within:
            raise RuntimeError("the module is within a window of several batches; save and load after handle.step()")
        self.reshard()
        model, pieces, first = self.model, self.pieces, dict[int, str]()
        names = paths_in(model, [*(named := dict(model.named_parameters(remove_duplicate=False)))])
        keys = {names[name]: names[first.setdefault(id(p), name)] for name, p in named.items()}
        held = {keys[names[name]]: p.detach() for name, p in named.items() if keys[names[name]] not in self.leaves}
        frozen = {path: p for path, p in held.items() if hasattr(p, "to_local")}
        whole = {path: p for path, p in held.items() if path not in frozen}
        buffers, saved = dict(model.named_buffers()), model.state_dict().keys()
        whole |= {path: buffers[name] for name, path in paths_in(model, buffers).items() if path in saved}
        rows = local_pieces(frozen, pieces.axis, pieces.ranks, pieces.rank)
        slices = {path: p.to_local().view(-1) for path, p in frozen.items()}
        return Others(rows, slices, whole, keys | {path: path for path in whole})

    def take(self, pairs: Sequence[tuple[Tensor, Tensor]], state: Any) -> None:
        """Take values that have been loaded: (the tensor that holds one, its value), and the state of the pipeline."""
        self.state, self._last = state, math.nan
        self._drop()
        self.reshard()
        with torch.no_grad():
            for held, value in pairs:
                held.copy_(value.view(held.shape))

    def whole(self, tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Path -> the whole leaf, of what this rank steps of it."""
        if unknown := tree.keys() - self.leaves.keys():
            raise ValueError(f"{min(unknown)!r} is no parameter that is trained, such as {min(self.leaves)!r}")
        with bind(self.mesh), torch.no_grad():
            if self.pieces.ranks == 1:  # there is nothing to gather, and the next step would overwrite it
                tree = {path: x.clone() for path, x in tree.items()}
            return gather(self.pieces.among(tree.keys()), dict(tree), dict(tree))  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, weight: float, sync: bool) -> None:
        self._check_open()
        if self.spoilt:
            self._drop()
        weight = shares.host_weight("weight", weight)
        if self._arrived is not None:
            self._check_gradients()
        alone = sync and not self._within and self._arrived is None
        if not alone and self._plan.reduced(self.steps).counts == {"live"}:
            raise ValueError("a window needs over='weight': ranks that count 1 have no mean over several batches")
        counted = self._plan.counted(weight, self.steps)
        shares.check_exact(loss, counted)
        loss = loss * counted
        if self.pipeline.skips and self.pipeline.skips.scaled:
            loss = loss * self.state.scale.to(loss.device)
        self.weight, self.in_backward, self._within = self.weight + weight, True, not sync
        self.model.set_requires_gradient_sync(sync)
        try:
            with bind(self.mesh):
                loss.backward()
        except BaseException:
            self._drop()
            raise
        finally:
            self.in_backward = False
        self._arrived = self._versions() if sync else None

    @torch.no_grad()
    def step(self) -> None:
        self._check_open()
        if self._arrived is None:
            raise RuntimeError(
                "handle.step() needs the gradients of all ranks: call handle.backward(loss, weight) before each step; in the last batch "
                "of a window with sync=True"
            )
        self._check_gradients()
        if self.compares:
            parts = {"parameters without a gradient": [path for path, p in self.leaves.items() if p.grad is None]}
            compare(self.mesh, "handle.step", parts, REMEDY, axes=(self.pieces.axis,))
        self._read_last()
        held = self.local()
        grads = {path: _grad(p, held[path]) for path, p in self.leaves.items()}
        call, reduced = self._call(grads), self._plan.reduced(self.steps)
        try:
            with bind(self.mesh):
                bound_call().mixed.clear()  # the losses carry the weight
                own, sums = self._owners.gather(held, grads)
                new, self.state = self.pipeline.step(own, sums, self.state, weight=call, donate=True)
                self._put(held, new)
                totals = call.totals(reduced.axes)
        finally:
            self._drop()
        # Where a weight was NaN, the count is too.
        self._last = totals.live + 0.0 * totals.weight if reduced.counts == {"live"} else totals.weight
        if self.pipeline.skips is None and isinstance(self._last, float) and math.isnan(self._last):
            bad = (path for path, grad in grads.items() if not torch.isfinite(grad).all())
            raise error_of_step(self.steps - 1, {}, tuple(bad))

    def flush(self) -> None:
        self._check_open()
        self._read_last()
        remedy = "Call handle.flush after the same step on all ranks"
        compare(self.mesh, "handle.flush", {"step": self.steps}, remedy, step=self.steps)
        with bind(self.mesh), torch.no_grad():
            new, self.state = self.pipeline.flush(self.params(), self.state)
            self._put(self.local(), new)

    def change(self, values: Mapping[str, float]) -> None:
        """Take other hyperparameters."""
        self.state = with_hyperparameters(self.state, **values)

    def explain(self, at_step: int) -> Explanation:
        def step(state: Any) -> None:
            like = {path: torch.empty_like(x, device="meta") for path, x in self.local().items()}
            own, sums = self._owners.gather(like, like)
            self._owners.scatter(self.pipeline.step(own, sums, state)[0])

        return Explanation.of_step(self.pipeline, step, self.state, self.mesh.axes, at_step)

    def close(self) -> None:
        """Leave the module as fully_shard made it."""
        if self._within:
            raise RuntimeError("the module is within a window of several batches; close after handle.step()")
        self.model.set_requires_gradient_sync(True)
        for message in self.messages:
            message.run = None
        for unit in self.units.values():
            unit.set_gradient_divide_factor(float(self.pieces.ranks))
            unit.set_force_sum_reduction_for_comms(False)
        self.messages = []
        self._drop()

    @property
    def last_total(self) -> float:
        return float(read_now(self.mesh, torch.as_tensor(self._last)))

    def _read_last(self) -> None:
        """Raise where the step before was not finite, which a device has not told then."""
        if isinstance(self._last, Tensor):
            self._last = self.last_total
            if math.isnan(self._last):
                self._drop()
                raise error_of_step(self.steps - 1, {}, ())

    def _call(self, grads: Mapping[str, Tensor]) -> Call:
        """The call of a step. Where gradients are not finite this rank's weight is NaN, and so is the sum on all ranks,
        which then take no step; so the verdict needs no message of its own.
        """
        call = Call(self.weight)
        if self.pipeline.skips is None:
            finite, (weight, live, some) = trees.all_finite(grads), call.totals()
            if not trees.readable_without_sync(finite):
                call.know((), Totals(torch.where(finite, weight, math.nan).double(), live, some))
            elif not finite:
                call.know((), Totals(math.nan, live, some))
        return call

    def _put(self, held: dict[str, Tensor], new: dict[str, Tensor]) -> None:
        """Give parameters the new values of what this rank steps."""
        self.reshard()
        new = self._owners.scatter(new)
        if moved := [path for path in held if new[path] is not held[path]]:
            torch._foreach_copy_([held[path] for path in moved], [new[path] for path in moved])

    def _drop(self) -> None:
        """Drop the gradients, which belong to a step that is over."""
        self.weight, self._arrived, self._within, self.spoilt = 0.0, None, False, False
        for p in self.leaves.values():
            p.grad = None

    def _check_open(self) -> None:
        if not self.messages:
            raise RuntimeError("this handle was closed; register the module again")

    def _check_gradients(self) -> None:
        """Raise unless the gradients are those that the last backward pass has left, of parameters that are trained."""
        if frozen := [path for path, p in self.leaves.items() if not p.requires_grad]:
            raise RuntimeError(f"{frozen[0]!r} was frozen after fjoin.fsdp.register; freeze before, or by tx.frozen()")
        if all(p.grad is None for p in self.leaves.values()):
            raise RuntimeError(
                "no parameter has a gradient: the loss depends on none of them, zero_grad() was called, or others were put into the "
                "module after fjoin.fsdp.register"
            )
        if self._arrived != self._versions():
            raise RuntimeError(
                "gradients have been changed between handle.backward and handle.step, where they are sums of weight * gradient; put "
                "clip_by_global_norm and the like into the pipeline, behind the mean"
            )

    @torch.no_grad()
    def _versions(self) -> list[Any]:
        """Of each gradient a number that writes change; None where there is none."""
        return [None if p.grad is None else p.grad.to_local()._version for p in self.leaves.values()]


def _grad(p: Any, like: Tensor) -> Tensor:
    """This rank's slice of a gradient, flat; zeros where no rank has used the parameter."""
    return torch.zeros_like(like) if p.grad is None else p.grad.to_local().reshape(-1).to(like.dtype)
