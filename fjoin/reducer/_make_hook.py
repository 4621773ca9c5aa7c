"""The hook of a step, by the plan of its pipeline."""

from __future__ import annotations

from ..agreement._grad_check import GradCheck
from ..agreement._step_record import StepRecord
from ..groups._mesh import Mesh
from ..transforms.plan._plan import Plan
from ._all_reduce import AllReduceHook
from ._bucket_hooks import BucketHook
from ._reduce_scatter import ReduceScatterHook
from ._step_hook import StepHook


def make_hook(plan: Plan, mesh: Mesh, record: StepRecord, grads: GradCheck, accumulates: bool) -> StepHook:
    """The hook that runs a plan.

    Args:
        accumulates: Whether a step has several calls.
    """
    if plan.reduce is None:
        return BucketHook(plan, mesh, record, grads, accumulates)
    kind = ReduceScatterHook if plan.reduce.sharded_over else AllReduceHook
    return kind(plan, mesh, record, grads)
