"""`register` and `ShardedHandle`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from .._functional import unwrapped
from ..groups import Communicator, Mesh, check_mesh, linked_mesh
from ..records import compare, described_tensors
from ..step import ModuleHandle, free_steps, guard_steps
from ..transforms.pipelines import Pipeline, axes_of
from ._run import ShardedRun
from ._units import paths_in, units_of

_REGISTERED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class ShardedHandle(ModuleHandle):
    """A pipeline in a module under fully_shard; made by `fjoin.fsdp.register`.

    Attributes:
        steps: The number of steps so far.
    """

    run: ShardedRun

    @property
    def steps(self) -> int:
        return self.run.steps

    def backward(self, loss: Tensor, weight: float = 1.0, sync: bool = True) -> None:
        """Run the backward pass of a loss, with this rank's weight in the mean.

        fully_shard sums the gradients of all ranks during it. A rank of weight 0 brings zeros, whatever its gradients.

        Args:
            loss: The mean over the local batch, 0-d.
            weight: 0 for a rank without input, else 1, its samples, or its tokens; it may be known only behind the
                forward pass. A number of the host.
            sync: False in a window of several batches, but for its last one: gradients are kept, and nothing is sent.

        Raises:
            ValueError: a weight that is neither 0 nor from 1e-30 to 1e30, or that a 16-bit loss would round.
            TypeError: no number; gradients that are summed in float16.
            DesyncError: on all ranks: they run the units of fully_shard in other orders; looked at in the first two
                steps, and with `check_order` in each.
            PeerLost, CollectiveTimeout: a rank has failed, or does not come within the time-out of the group over which
                the module is sharded.
            RuntimeError: the handle was closed.
        """
        self.run.backward(loss, weight, sync)

    def step(self) -> None:
        """Step the parameters with the gradients since the last step, and drop these; on all ranks.

        A parameter without a gradient counts as one whose gradient is 0.

        Raises:
            RuntimeError: no backward pass with sync=True since the last step.
            NonFinite: on all ranks that reduce together: a gradient is not finite, and the pipeline does not leave such
                steps out. Nothing is stepped. On a device it is raised by the next step.
            DesyncError: on all ranks: they have other pipelines or hyperparameters.
            PeerLost, CollectiveTimeout: as for `backward`.
        """
        self.run.step()

    def params(self) -> dict[str, Tensor]:
        """Path -> what this rank steps of the parameter: its slice, flat; of a parameter whose optimizer needs it whole
        the whole on one rank, and nothing on the others.

        It has the form of the pipeline's state, as `tx.ema_params(handle.params(), handle.pipeline)` needs it. On all
        ranks.
        """
        return self.run.params()

    def whole(self, tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Path -> whole leaf, on all ranks, of a tree like `params`: these, averages of them, or a part of either."""
        return self.run.whole(tree)

    def close(self) -> None:
        """Take the pipeline off the module, which is then as fully_shard made it."""
        if not self.run.messages:  # another handle may have the module now
            return
        self.run.close()
        free_steps(self.run.leaves.values())
        _REGISTERED.difference_update(self.run.units.values())


def register(
    model: nn.Module, pipeline: Pipeline, *, mesh: Mesh | None = None, check_order: bool = False
) -> ShardedHandle:
    """Step a module that torch's fully_shard has sharded with a pipeline.

    fully_shard gathers parameters and sums gradients, with its own policies. Behind the mean over the ranks that share
    the parameters all stages work on this rank's slices: norms are those of all slices, and each rank has the state of
    its slices alone.

        for batch in (loop := fjoin.join(loader, weight=tokens)):
            handle.backward(loss_fn(model, batch), loop.weight)
            handle.step()

    Gradients are sums of weight * gradient, divided late by the sum of the weights. A rank that is out of input runs the
    model, and brings zeros. A step sends 16 bytes besides fully_shard's own messages, and 16 for each further mean.

    Args:
        model: The module, after fully_shard(model) and, before that, of its parts.
        pipeline: Made by `fuse`, `local_sgd`, `diloco`. Its hook begins with the mean over the ranks that share the
            parameters. It may go on with means between replicas, encoded ones too.
        mesh: The ranks, where the pipeline has several axes, such as fjoin.mesh(device_mesh) of replicas and shards; by
            default those over which the module is sharded, as the pipeline's one axis.
        check_order: Compare before each message which unit ranks send. It is done in the first two steps in any case.
            Units of one size that ranks run in other orders would use each other's parameters without an error.

    Returns:
        A `ShardedHandle`.

    Raises:
        TypeError: `model` is not under fully_shard; a trained parameter is not sharded along dim 0 over one mesh of one
            dim; no pipeline.
        ValueError: it is registered already; no axis of `mesh` has the ranks over which it is sharded; a pipeline whose
            hook does not begin with the mean over them, or that has several axes without `mesh`.
        DesyncError: on all ranks: they register different pipelines or parameters.

    Same as: fully_shard with torch.optim and clip_grad_norm_, for inputs of equal size.
    """
    model = unwrapped(model) if isinstance(model, nn.Module) else model
    if not isinstance(model, nn.Module) or "" not in (units := units_of(model)):
        raise TypeError(f"register takes a module after fully_shard(model), got a {type(model).__name__}")
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"register takes a pipeline, got {pipeline!r}; for example fuse(mean('data'), adamw(1e-3))")
    if not _REGISTERED.isdisjoint(units.values()):
        raise ValueError("this module, or a part of it, is registered already; call close() of its handle first")
    for unit in units.values():
        unit.reshard()  # as in `ShardedRun.reshard`
    named = {path: p for path, p in model.named_parameters() if p.requires_grad}
    ranks, axis = _axis_of(_group_of(named), pipeline, mesh)
    leaves = {path: named[name] for name, path in paths_in(model, named).items()}
    parts = {"pipeline": pipeline.spec.canonical(), "parameters": described_tensors(leaves), "units": list(units)}
    compare(ranks, "fjoin.fsdp.register", parts, "Register the same on all ranks", shown={"pipeline": repr(pipeline)})
    run = ShardedRun(model, leaves, pipeline, ranks, axis, check_order)
    by = "a pipeline registered by fjoin.fsdp.register steps already; remove optimizer.step(), or call handle.close() first"
    guard_steps(leaves, by, refuses=True)
    _REGISTERED.update(units.values())
    return ShardedHandle(run)


def _group_of(params: Mapping[str, Any]) -> Any:
    """The process group over which parameters are sharded.

    Raises:
        TypeError: one of them is not sharded along dim 0, or over another mesh than the first one.
    """
    from torch.distributed.tensor import DTensor, Shard

    first: Any = None
    for path, p in params.items():
        if not isinstance(p, DTensor):
            raise TypeError(
                f"{path!r} is trained, but not sharded: call fully_shard(model) for the whole module, without ignored_params"
            )
        if p.device_mesh.ndim > 1:
            raise TypeError(
                f"{path!r} is on a mesh of {p.device_mesh.ndim} dims, {p.placements}; shard over one dim, fully_shard(part, "
                f"mesh=grid['data']), and let the pipeline average between replicas: mean(('replicate', 'data')) with "
                f"register(..., mesh=fjoin.mesh(grid))"
            )
        if p.placements != (Shard(0),):
            raise TypeError(
                f"{path!r} has the placement {p.placements}, expected (Shard(dim=0),); leave shard_placement_fn out"
            )
        first = p if first is None else first
        if p.device_mesh != first.device_mesh:
            raise TypeError(
                f"{path!r} is on {p.device_mesh}, but other parameters on {first.device_mesh}; shard over one mesh"
            )
    if first is None:
        raise TypeError("the module has no parameters to train")
    return first.device_mesh.get_group()


def _axis_of(group: Any, pipeline: Pipeline, mesh: Mesh | None) -> tuple[Communicator, str]:
    """The ranks, and the axis that is the group over which the module is sharded."""
    if mesh is None:
        axes = set[str]().union(*(axes_of(part, ()) for part in (pipeline.hook, *pipeline.ends)))
        if len(axes) > 1:
            raise ValueError(f"{pipeline!r} has the axes {sorted(axes)}; pass mesh=fjoin.mesh(...) that has them")
        axis = next(iter(axes), "data")
        return linked_mesh(group, axis, "fjoin.fsdp.register"), axis
    ranks, own = check_mesh("register", mesh), dist.get_process_group_ranks(group)
    for axis, one in ranks.axes.items():
        if dist.get_process_group_ranks(one.group) == own:
            return ranks, axis
    raise ValueError(
        f"no axis of {mesh!r} has the ranks {own}, over which the module is sharded; pass fjoin.mesh(device_mesh)"
    )
