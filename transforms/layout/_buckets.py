"""Buckets of parameters, and the position of each leaf in its bucket."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..axes import DIRECT_BYTES
from ..base import record_words

# Measured on gloo: larger messages are faster up to about 25 MB on loopback, but at 1 to 3 Gbit/s 5 MiB is best, since
# no computation overlaps with the last bucket's message. A tensor of 4 MB gets its own message, which needs no copy.
BUCKET_BYTES = 5 * 2**20
# The first of several buckets is smaller, so sending starts early and a slow link is busy from then on.
FIRST_BYTES = 2**20
# On an accelerator a message costs the host more time than a copy costs the device.
ACCELERATOR_BYTES = 25 * 2**20
# The alignment of leaves: matrix kernels are slower on tensors that do not begin at a cache line.
ALIGN_BYTES = 64
_HOST = torch.device("cpu")


class SlotRange(NamedTuple):
    """Adjacent leaves of a bucket that one kernel steps, padding included."""

    start: int
    stop: int
    paths: tuple[str, ...]


class Bucket(NamedTuple):
    """Leaves whose gradients are sent in one message."""

    paths: tuple[str, ...]  # in the order of storage
    offsets: tuple[int, ...]  # the start of each leaf, in elements
    numel: int  # padding included
    dtype: torch.dtype
    device: torch.device
    direct: bool  # one large tensor, sent from autograd's memory without a copy
    spans: tuple[SlotRange, ...]


def bucket_sizes(leaves: Iterable[Any], bucket_bytes: int | None = None) -> tuple[int, int]:
    """The size at which a bucket is sent, and that at which a tensor is a bucket of its own, in bytes.

    Args:
        leaves: The parameters.
        bucket_bytes: The first of them; None: as is best for the parameters' device.
    """
    if all(getattr(p, "device", _HOST).type == "cpu" for p in leaves):
        return bucket_bytes or BUCKET_BYTES, DIRECT_BYTES
    size = bucket_bytes or ACCELERATOR_BYTES
    return size, max(size, DIRECT_BYTES)


def make_layout(
    params: Mapping[str, Tensor],
    label: Callable[[str], Hashable],
    bucket_bytes: int | None = None,
    direct_bytes: int | None = None,
    owner: Mapping[str, int] | None = None,
) -> tuple[Bucket, ...]:
    """Groups parameters into buckets in reverse order, which is about the order of backward.

    Args:
        params: Path -> tensor, in the order in which the model registered them.
        label: A function path -> label. Leaves of one bucket with equal labels are adjacent, in one span.
        bucket_bytes: A bucket is closed once it has this size; the first of several buckets earlier. None: see
            `bucket_sizes`.
        direct_bytes: A tensor of this size is a bucket of its own. None: see there.
        owner: Path -> rank, for leaves that only this rank steps. They have buckets of their own, ordered by rank.
    """
    owner = owner or {}
    bucket_bytes, direct = bucket_sizes(params.values(), bucket_bytes)
    direct_bytes = direct_bytes or direct
    done: list[tuple[int, Bucket]] = []  # (when its last gradient is expected, bucket)
    filling: dict[tuple[torch.dtype, torch.device, bool], tuple[list[str], int]] = {}  # paths, bytes

    def size(path: str) -> int:
        return params[path].numel() * params[path].element_size()

    def close(when: int, paths: list[str], direct: bool = False) -> None:
        done.append((when, _bucket(params, sorted(paths, key=lambda path: owner.get(path, 0)), label, direct)))

    first_bytes = min(FIRST_BYTES, bucket_bytes) if sum(map(size, params)) > bucket_bytes else bucket_bytes
    for when, path in enumerate(reversed(list(params))):
        key = (params[path].dtype, params[path].device, path in owner)
        if size(path) >= direct_bytes and path not in owner:
            close(when, [path], direct=True)
            continue
        paths, filled = filling.get(key, ([], 0))
        paths.append(path)
        filling[key] = paths, filled + size(path)
        if filled + size(path) >= (bucket_bytes if done else first_bytes):
            close(when, filling.pop(key)[0])
    for paths, _ in filling.values():
        close(len(params), paths)
    return tuple(bucket for _, bucket in sorted(done, key=lambda pair: pair[0]))


def _bucket(params: Mapping[str, Tensor], paths: list[str], label: Callable[[str], Hashable], direct: bool) -> Bucket:
    by_label: dict[Hashable, list[str]] = {}
    for path in paths:
        by_label.setdefault(label(path), []).append(path)
    first = params[paths[0]]
    step = 1 if direct else ALIGN_BYTES // first.element_size()
    ordered, offsets, spans, at = [], [], [], 0
    for members in by_label.values():
        start = at
        for path in members:
            ordered.append(path)
            offsets.append(at)
            at += -(-params[path].numel() // step) * step
        spans.append(SlotRange(start, at, tuple(members)))
    return Bucket(tuple(ordered), tuple(offsets), at, first.dtype, first.device, direct, tuple(spans))


def views(bucket: Bucket, flat: Tensor, shapes: Mapping[str, torch.Size]) -> list[Tensor]:
    """The leaves of a bucket as views of a flat buffer."""
    starts = zip(bucket.paths, bucket.offsets, strict=True)
    return [flat[at : at + shapes[path].numel()].view(shapes[path]) for path, at in starts]


def record_bucket(layout: tuple[Bucket, ...]) -> int | None:
    """The bucket whose message carries the record of a step: the first flat one of the record's dtype, if there is any.

    Beside float16 none does: the ranks must know the sum of their weights before they send those gradients.
    """
    if any(bucket.dtype is torch.float16 for bucket in layout):
        return None
    dtype = record_words.words_dtype(bucket.dtype for bucket in layout)
    for i, bucket in enumerate(layout):
        if not bucket.direct and bucket.dtype is dtype:
            return i
    return None
