"""The optimizer's kernels on buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..buckets import GradBuffer, Launch, Storage
from ..groups import Traffic
from ..transforms.axes import Work
from ..transforms.base import fields
from ..transforms.optimizers import age_of, step_in_place, stepped_together, unchecked


def step_buckets(
    storage: Storage, outgoing: Iterable[tuple[int, GradBuffer]], grad_scale: Tensor | None, found_inf: Tensor | None
) -> Iterator[int]:
    """Step buckets, and yield the number of each once it has been stepped.

    On the CPU a bucket is stepped at a time, whose gradients may be in the cache. On an accelerator one kernel steps all parameters of
    one optimizer: there a step of many buckets is bound by the host, which launches kernels.

    Args:
        outgoing: (number of the bucket, its gradients).
        grad_scale, found_inf: See `Optimizer`.
    """
    if not storage.together:
        for index, out in outgoing:
            with torch.no_grad():
                for part, param, grad, slots in storage.ranges(index, out.grads):
                    unchecked(part.step_param_)(param, grad, slots, grad_scale=grad_scale, found_inf=found_inf)
            yield index
        return
    found = [(index, storage.ranges(index, out.grads)) for index, out in outgoing]
    items = [(slots, part, param, grad) for _, some in found for part, param, grad, slots in some]
    with torch.no_grad():
        for group in stepped_together(items, [age_of(part, fields(slots)) for slots, part, _, _ in items]):
            states, parts, params, grads = map(list, zip(*group, strict=True))
            step_in_place(parts[0], params, grads, states, grad_scale=grad_scale, found_inf=found_inf)
    yield from (index for index, _ in found)


STEP = "step"  # the span around the others


def named(launch: Launch, traffic: Traffic) -> Launch:
    """A function that launches buckets, whose messages have the numbers of these in traces."""

    def run(index: int, out: GradBuffer) -> Work | None:
        with traffic.span(f"bucket {index}"):
            return launch(index, out)

    return run
