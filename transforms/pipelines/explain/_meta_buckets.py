"""Buckets on the meta device: their values, and the message of a module's bucket in pieces."""

from __future__ import annotations

import torch
from torch import Tensor

from ...axes._ragged import all_to_all_single
from ...layout._buckets import Bucket
from ...layout._pieces import Pieces
from ...program._program import Place
from ...tree._tree import Tree


def in_bucket(
    k: int, bucket: Bucket, values: Tree, pieces: Pieces | None, place: Place, flat: bool
) -> tuple[Pieces | None, dict[str, Tensor]]:
    """The pieces of the bucket of number k, and its values: one flat tensor, or leaves.

    A module's buckets are not those from which pieces are cut, so one bucket may hold parts of several.
    """
    leaves = {path: values[path] for path in bucket.paths}
    if pieces is not None and place == "module":
        return pieces.among(bucket.paths), leaves
    if not flat:
        return pieces and pieces.only(k), leaves
    return pieces and pieces.flat(k, ""), {"": torch.zeros(bucket.numel, dtype=bucket.dtype)}


def send_slices(pieces: Pieces, bucket: Bucket) -> None:
    """The message of a module's bucket: all slices of other ranks at once."""
    sizes = [sum(stop - start for start, stop in of.values()) for of in pieces.slices_of_all]
    give, take = [0, *sizes[1:]], [0, *(sizes[0] for _ in sizes[1:])]
    flat = torch.zeros(sum(give), dtype=bucket.dtype)
    all_to_all_single(flat, pieces.axis, input_split_sizes=give, output_split_sizes=take)
