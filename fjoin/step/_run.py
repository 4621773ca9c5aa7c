"""The optimizer's kernels on buckets, and the spans of a step in a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..buckets import GradBuffer, Storage
from ..groups import Traffic, is_watched
from ..transforms.axes import Work
from ..transforms.base import fields
from ..transforms.optimizers import age_of, step_in_place, stepped_together, unchecked
from ..transforms.pipelines import Agree, Ends


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


STEP = "step"  # around the others
_NAMES = {
    "stages": "backward and launches",
    "observe": "wait for gradients",
    "judge": "judge",
    "step": "optimizer",
    "gather": "gather of parameters",
    "keep": "states",
}


def named(
    launch: Callable[[int, GradBuffer], Work | None], traffic: Traffic
) -> Callable[[int, GradBuffer], Work | None]:
    """A function that launches buckets, whose messages have the numbers of these in traces."""

    def run(index: int, out: GradBuffer) -> Work | None:
        with traffic.span(f"bucket {index}"):
            return launch(index, out)

    return run


def spanned(memory: Any, traffic: Traffic) -> Any:
    """The memory, whose operations are spans where somebody watches."""
    return Spanned(memory, traffic) if is_watched() else memory


class Spanned:
    """A memory whose operations are spans."""

    def __init__(self, memory: Any, traffic: Traffic) -> None:
        self._memory, self._traffic = memory, traffic

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._memory, name)

        def run(*args: Any) -> Any:
            op = args[0] if args else None
            title = _NAMES.get(name, name)
            if isinstance(op, Agree):
                title = f"agree: {op.moment}"
            elif isinstance(op, Ends):
                title = f"{op.part.spec.name or 'after'} of {op.on}"
            with self._traffic.span(title):
                return method(*args)

        return run
