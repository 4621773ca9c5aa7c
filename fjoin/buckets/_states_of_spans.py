"""The optimizer's states of single parameters, as views of the flat state of a span, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..transforms.layout._buckets import Bucket, Span
from ..transforms.layout._pieces import Pieces
from ..transforms.step_param._lists import Ages
from ..transforms.step_param._optimizer import Optimizer
from ..transforms.tree._tree import fields, with_fields


def states_of_span(
    part: Optimizer, state: Any, counts: Any, places: Mapping[str, tuple[int, torch.Size]]
) -> dict[str, Any]:
    """Path -> the parameter's part of a span's state, as views.

    Args:
        counts: The state whose common fields count the steps.
        places: Path -> where the parameter begins in the span, and its shape.
    """
    split = list(zip(fields(state), fields(counts), part.common, strict=True))
    found = {}
    for path, (at, shape) in places.items():
        # Where the optimizer needs whole leaves, a span has one parameter, and its state may have shapes of its own.
        own = [
            common
            if c
            else f
            if f is None or not part.elementwise
            else f.reshape(-1)[at : at + shape.numel()].view(shape)
            for f, common, c in split
        ]
        found[path] = with_fields(state, own)
    return found


def load_span(
    part: Optimizer, state: Any, states: Mapping[str, Any], places: Mapping[str, tuple[int, torch.Size]]
) -> None:
    """Copy parameters' states into the state of a span; the inverse of `states_of_span`.

    Args:
        states: Path -> the parameter's state.
    """
    views = states_of_span(part, state, state, places)
    for path, own in views.items():
        for place, value in zip(fields(own), fields(states[path]), strict=True):
            if place is not None:
                place.copy_(value)


def without_empty(ranges: list[list[Any]]) -> list[list[Any]]:
    """The ranges without the empty ones; of each optimizer one range stays, which counts the steps."""
    full = {id(part) for bucket in ranges for part, param, _, _ in bucket if param.numel()}
    kept = []
    for bucket in ranges:
        kept.append([one for one in bucket if one[1].numel() or id(one[0]) not in full])
        full |= {id(part) for part, _, _, _ in bucket}
    return kept


def of_one_age(layout: tuple[Bucket, ...], optimizer: Optimizer, slots: list[list[Any]]) -> list[list[Any]]:
    """The states of each optimizer with one count of steps, so that one kernel can step them all."""
    shared, found = Ages(), list[list[Any]]()
    for bucket, states in zip(layout, slots, strict=True):
        parts = [(optimizer.at(span.paths[0]), state) for span, state in zip(bucket.spans, states, strict=True)]
        like = torch.empty(0, dtype=bucket.dtype, device=bucket.device)
        found.append([state if part.step_params_ is None else shared(part, like, state) for part, state in parts])
    return found


def places_of(
    span: Span, bucket: Bucket, shapes: Mapping[str, torch.Size], pieces: Pieces | None, k: int
) -> dict[str, tuple[int, torch.Size]]:
    """Path -> where a parameter, or this rank's slice of it, begins in the slots of a span, and its shape.

    Args:
        k: The number of the bucket.
    """
    offset = dict(zip(bucket.paths, bucket.offsets, strict=True))
    if pieces is None:
        return {path: (offset[path] - span.start, shapes[path]) for path in span.paths}
    begin, places = max(span.start, pieces.bounds[k][pieces.rank]), {}
    for path in span.paths:
        start, stop = pieces.slices[path]
        places[path] = offset[path] + start - begin if stop else 0, torch.Size((stop - start,))
    return places
