"""What the ported scripts share: how they start, and the comparison of a port with its reference."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# What a training gives back: "losses" and other numbers in lists, printed "lines", tensors by path.
Trained = dict[str, Any]


def start() -> tuple[int, int]:
    """Join the other ranks over gloo, on machines with GPUs too; returns (this rank, number of ranks)."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:  # started with plain python
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


class Together:
    """The batches of all ranks' loaders, step by step as one batch: what one process on all data sees."""

    def __init__(self, loaders: Iterable[Iterable[Sequence[Tensor]]]) -> None:
        self._loaders = list(loaders)

    def __iter__(self) -> Iterator[list[Tensor]]:
        for batches in itertools.zip_longest(*self._loaders):
            yield [torch.cat(parts) for parts in zip(*filter(None, batches), strict=True)]


def finish(port: Trained, reference: Callable[[], Trained], largest: float) -> None:
    """Train the reference, print how far the port is from it, and exit, with 1 if that is too far.

    Args:
        port: What the port has trained.
        reference: Trains the reference; it returns the same under the same names.
        largest: The largest difference: relative of numbers, absolute of tensors. Lines must be equal.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # the lines are the port's once more
        want = reference()
    far = {name: difference(port.get(name, ()), value) for name, value in want.items()}
    fits = port.keys() == want.keys() and all(one <= largest for one in far.values())
    shown = ", ".join(f"{name} {one:.1e}" for name, one in far.items())
    verdict = "as" if fits else "DIFFERS from"
    print(f"RESULT rank {dist.get_rank()}: {verdict} the reference: {shown}; at most {largest:g}", flush=True)
    dist.destroy_process_group()
    sys.exit(not fits)


def difference(port: Any, reference: Any) -> float:
    """0 of equal values, infinity of values that cannot be compared, NaN where a difference is NaN."""
    if len(port) != len(reference):
        return math.inf
    if isinstance(reference, dict):
        if port.keys() != reference.keys() or any(port[path].shape != x.shape for path, x in reference.items()):
            return math.inf
        far = [float((port[path] - value).detach().abs().max()) for path, value in reference.items()]
    elif all(isinstance(value, float) for value in (*port, *reference)):
        far = [abs(a - b) / abs(b) if a != b else 0.0 for a, b in zip(port, reference, strict=True)]
    else:
        far = [0.0 if list(port) == list(reference) else math.inf]
    return math.nan if any(map(math.isnan, far)) else max(far, default=0.0)  # max alone may pass over NaN
