"""torch's communication hooks on a bucket outside of a module. No fjoin here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor


class Bucket:
    """The part of a bucket that hooks use; Python cannot construct a bucket."""

    def __init__(self, params: Sequence[Tensor], flat: Tensor, index: int = 0, last: bool = True) -> None:
        self._params, self._flat, self._index, self._last = list(params), flat, index, last

    def buffer(self) -> Tensor:
        return self._flat

    def set_buffer(self, flat: Tensor) -> None:
        self._flat = flat

    def gradients(self) -> list[Tensor]:
        parts = self._flat.split([p.numel() for p in self._params])
        return [part.view(p.shape) for part, p in zip(parts, self._params, strict=True)]

    def parameters(self) -> list[Tensor]:
        return self._params

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


def flats(rank: int, sizes: Sequence[int], kind: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A rank's gradients. Of "whole" numbers, multiples of 6, no sum or mean on 2 or 3 ranks is rounded, in float16 neither."""
    g = torch.Generator().manual_seed(17 + rank)
    if kind == "whole":
        return [6.0 * torch.randint(-20, 21, (n,), generator=g).to(dtype) for n in sizes]
    return [torch.randn(n, generator=g, dtype=torch.float64).to(dtype) for n in sizes]


def run(
    hook: Callable[[Any, Any], Any], state: Any, params: Sequence[Sequence[Tensor]], grads: Sequence[Tensor]
) -> list[Tensor]:
    """The results of a hook for the gradients of one pass, bucket by bucket."""
    last, futures = len(grads) - 1, []
    for i, (p, flat) in enumerate(zip(params, grads, strict=True)):
        futures.append(hook(state, Bucket(p, flat.clone(), i, i == last)))
    return [future.wait().clone() for future in futures]


@contextlib.contextmanager
def gathers_as_nccl() -> Iterator[None]:
    """dist.all_gather with the future that NCCL has, of one tensor with a row from each rank."""
    plain = dist.all_gather

    class Done:
        def __init__(self, out: list[Tensor]) -> None:
            self._out = out

        def get_future(self) -> Any:
            future: Any = torch.futures.Future()
            future.set_result([torch.stack(self._out)])
            return future

    def gather(out: list[Tensor], x: Tensor, group: Any = None, async_op: bool = False) -> Any:
        plain(out, x.contiguous(), group=group)
        return Done(out)

    with mock.patch.object(dist, "all_gather", gather):
        yield


def step(flat: Tensor) -> float:
    """The distance of neighbouring codes, with one scale for all."""
    return (max(float(flat.max()), 0.0) - min(float(flat.min()), 0.0)) / 255
