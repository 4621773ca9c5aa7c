"""torch's hooks that step a ZeroRedundancyOptimizer in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from ..groups import linked_mesh
from ..optim import WholeLeaves, WholeState, ZeroRedundancyOptimizer, slice_state
from ..records import compare
from ..transforms.base import Spec, Transform, state_dicts
from ..transforms.optimizers import Optimizer
from ..transforms.pipelines import zero as sharded
from . import _comm_hooks
from ._ddp_run import DDPRun
from ._register import keep_stepped

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


def hook_with_zero_step(
    hook: Any, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """A communication hook that sends each rank its pieces of the gradients, steps them, and gathers the parameters.

    It steps from the first backward pass on, and `zero.step()` does nothing. The hyperparameters in `zero.param_groups`
    are those of the next pass. After a pass every `p.grad` is None, since no rank has a whole gradient. So nothing can
    change gradients after it, and a GradScaler cannot be used; clip by the hook, as
    `chain(mean("data", over="world"), clip_by_global_norm(1.0))`.

    Args:
        hook: One of torch's hooks, or of those in `fjoin.ddp`, or a `Transform` with a mean over "data".
        ddp: The module.
        zero: Its optimizer, made with `overlap_with_ddp=True`.
        shard_buckets: Without effect: each bucket is always shared out among all ranks.

    Returns:
        The hook, for `ddp.register_comm_hook(None, hook)`.

    Raises:
        TypeError: an argument of the wrong kind; an optimizer of which only torch's class is known.
        ValueError: `zero` was made without `overlap_with_ddp=True`, or has other parameters than the module.

    Same as: torch's hook_with_zero_step, whose first passes step nothing, whose steps ignore `param_groups`, and which
        needs NCCL.
    """
    if not isinstance(ddp, DistributedDataParallel) or not isinstance(zero, ZeroRedundancyOptimizer):
        raise TypeError(
            f"hook_with_zero_step takes a DistributedDataParallel and its fjoin.ZeroRedundancyOptimizer, got {type(ddp).__name__} and "
            f"{type(zero).__module__}.{type(zero).__name__}"
        )
    if not zero.overlap_with_ddp:
        raise ValueError(
            "hook_with_zero_step needs ZeroRedundancyOptimizer(..., overlap_with_ddp=True); without it call zero.step() after "
            "backward, and register no hook of this kind"
        )
    if isinstance(zero.part, WholeLeaves):
        raise TypeError("hook_with_zero_step steps optimizers of torch.optim or fjoin.transforms; this is neither")
    paths = {p: path for path, p in ddp.module.named_parameters() if p.requires_grad}
    mine = {p for group in zero.param_groups for p in group["params"] if p.requires_grad}
    if mine != paths.keys():
        missing = sorted(path for p, path in paths.items() if p not in mine)
        raise ValueError(
            f"hook_with_zero_step: the optimizer must have exactly the module's trainable parameters; it lacks {missing} and has "
            f"{len(mine - paths.keys())} others"
        )
    pipeline = sharded(_transform(hook), _by_group(zero, paths), "data")
    mesh = linked_mesh(ddp.process_group, "data", "fjoin.ddp.hook_with_zero_step")
    own, remedy = pipeline.hook, "Register the same on all ranks"
    compare(mesh, "fjoin.ddp.register", {"hook": own.spec.canonical()}, remedy, shown={"hook": repr(own)})
    run = DDPRun(ddp, pipeline.hook, pipeline, mesh)
    keep_stepped(ddp, run.leaves)
    zero.run = _States(run, paths)

    def zero_step(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return run(bucket)

    zero_step.__annotations__ = {}  # torch compares annotations with classes, but here they are strings
    return zero_step


hook_with_zero_step_interleaved = hook_with_zero_step  # torch's two differ in when the buckets are stepped


def _transform(hook: Any) -> Transform:
    if isinstance(hook, Transform):
        return hook
    known = ("torch.distributed.algorithms.ddp_comm_hooks.", _comm_hooks.__name__)  # not a user's own of the same name
    is_known = str(getattr(hook, "__module__", "")).startswith(known)
    make: Callable[[], Transform] | None = getattr(_comm_hooks, getattr(hook, "__name__", ""), None)
    if not is_known or make is None:
        raise TypeError(f"hook_with_zero_step: hook must be a communication hook, or a Transform, got {hook!r}")
    return make()


def _by_group(zero: ZeroRedundancyOptimizer, paths: dict[Tensor, str]) -> Optimizer:
    """The optimizer of each parameter, with the present hyperparameters of its group."""
    group_of = {paths[p]: group for group in zero.param_groups for p in group["params"] if p in paths}
    part: Optimizer = zero.part
    # Without the part's spec, which has other hyperparameters.
    return replace(part, select=lambda path: zero.hyper.at(group_of[path])(path), spec=Spec(""))


class _States:
    """The optimizer's states in a module's hook, by parameter."""

    def __init__(self, run: DDPRun, paths: dict[Tensor, str]) -> None:
        assert run.pieces is not None
        self._paths, self._pieces, self._stepper = paths, run.pieces, run.params.stepper

    def state_of(self, param: Tensor) -> tuple[dict[str, Any], tuple[int, int]]:
        """This rank's state of a parameter by name, and the slice that it is of."""
        path = self._paths.get(param)
        if path is None or path not in self._stepper.states:
            return {}, (0, 0)
        return state_dicts.to_state_dict(self._stepper.states[path]), self._pieces.slices[path]

    def load_states(self, states: Iterable[WholeState]) -> None:
        """Take this rank's slices of these whole states."""
        own, items = self._pieces.own({path: p.detach() for p, path in self._paths.items()}), []
        for p, part, state in states:
            if state and (path := self._paths.get(p)) is not None:
                items.append(
                    (path, part, own[path], slice_state(part, state, p, own[path], *self._pieces.slices[path]))
                )
        self._stepper.adopt(self._stepper.prepared(items))
