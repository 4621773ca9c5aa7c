"""The buckets of a DistributedDataParallel."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES, GradBucket, _compute_bucket_assignment_by_size
from torch.nn.parallel import DistributedDataParallel

from ..buckets import GradBuffer, gradients
from ..step import StepCheck
from ..transforms.axes import Work
from ..transforms.base import devices, shares
from ..transforms.layout import Bucket, Pieces


class DDPBucket(GradBuffer):
    """One of the module's buckets in one backward pass.

    Args:
        of: The bucket, as in the passes before.
        pieces: Its pieces, where it is sharded.
        bucket: torch's, with the gradients.
    """

    def __init__(self, of: Bucket, pieces: Pieces | None, bucket: GradBucket) -> None:
        self.buffer = self.grads = bucket.buffer()
        self.layout, self.pieces, self.scattered, self.direct = of, pieces, False, False
        self.on_device = not devices.is_host(self.grads.device)
        self.work: Work | None = None
        self.message_sum: float | None = None
        self.seen: Tensor = torch.zeros((), device=self.grads.device)
        self._by_path = dict(zip(of.paths, gradients(bucket), strict=True))

    def in_pieces(self) -> tuple[Tensor, Sequence[int]]:
        """As of a `GradBuffer`, packed: the slices of each rank are in the order of the module's bucket."""
        assert self.pieces is not None
        grads = {path: grad.reshape(-1) for path, grad in self._by_path.items()}
        parts, sizes = [self.grads[:0]], []
        for slices in self.pieces.slices_of_all:
            own = [grads[path][start:stop] for path in self.layout.paths for start, stop in (slices[path],) if stop]
            parts += own
            sizes.append(sum(map(len, own)))
        return torch.cat(parts), list(itertools.accumulate(sizes, initial=0))

    def pack_own(self, slices: Mapping[str, Tensor]) -> Tensor:
        """This rank's slices, one after the other."""
        return torch.cat([slices[path].reshape(-1) for path in self.layout.paths])

    def by_path(self) -> dict[str, Tensor]:
        if self.scattered:
            assert self.pieces is not None
            shapes = {path: self.pieces.shape(path) for path in self.layout.paths}
            parts = self.grads.split([shape.numel() for shape in shapes.values()])
            return {path: part.view(shape) for (path, shape), part in zip(shapes.items(), parts, strict=True)}
        return self._by_path


class TotalWeight:
    """The sum of the ranks' factors in the last pass of a module.

    Args:
        check: Reads from devices.
        waits: Whether the host waits for it at the end of each pass, as with a pipeline, on whose step it decides. A
            hook alone waits on a device for that of the pass before, so that the host does not run ahead for ever, and
            hears of failed ranks.
    """

    def __init__(self, check: StepCheck, waits: bool) -> None:
        self._check, self._waits = check, waits
        self._total = torch.tensor(math.nan)

    def take(self, total: Tensor) -> None:
        reads = self._check.reads
        if self._waits or not (self._check.grads.on_device or devices.is_accelerator(total.device)):
            total = torch.tensor(reads.now(total), dtype=total.dtype)
        else:
            reads.add((), total.view(1))
            for _ in reads.read(newest=False):
                pass
        self._total = total

    def read(self) -> float:
        """The sum as a number; it may wait for a device."""
        return float(self._check.reads.now(self._total))


def first_buckets(ddp: DistributedDataParallel, params: Mapping[str, Tensor]) -> tuple[Bucket, ...]:
    """The buckets of a module's first pass, in the order of the pass."""
    paths, first = list(params), [_DEFAULT_FIRST_BUCKET_BYTES] if ddp.bucket_bytes_cap_default else []
    limits = getattr(ddp, "bucket_bytes_cap_list", None)
    if not limits and (ddp.static_graph or not ddp.find_unused_parameters):
        limits = [sys.maxsize]  # one bucket, until the module knows the order in which gradients arrive
    limits = limits or [*first, ddp.bucket_bytes_cap]
    groups, _ = _compute_bucket_assignment_by_size(list(params.values()), limits)
    return tuple(
        bucket_of(tuple(paths[i] for i in group), sum(params[paths[i]].numel() for i in group), params[paths[group[0]]])
        for group in reversed(groups)
    )


def bucket_of(paths: tuple[str, ...], numel: int, like: Tensor) -> Bucket:
    """One of the module's buckets, in which a tensor like this one has so many elements."""
    return Bucket(paths, (), numel, like.dtype, like.device, True, ())


def divide(buckets: Iterable[GradBuffer], total: float | Tensor) -> None:
    """Divide summed gradients in place; by nothing where the total is 0."""
    total = shares.nonzero_or_one(total)
    for bucket in buckets:
        if isinstance(total, Tensor) or total != 1.0:
            bucket.grads.div_(total)
