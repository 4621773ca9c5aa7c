"""The state of a hook: as a step stores it, and in the form of the pure hook."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..transforms.base import trees
from ..transforms.layout import Bucket, Pieces, views

# The path of a flat bucket in a tree of one tensor; no parameter has this path.
FLAT = "(flat)"


def whole_of(states: tuple[Any, ...]) -> Any:
    """The state of a hook, from those of its stages."""
    return states if len(states) > 1 else states[0] if states else ()


def stages_of(whole: Any, count: int) -> tuple[Any, ...]:
    """The states of a hook's stages, of which there are so many; the inverse of `whole_of`."""
    return whole if count > 1 else (whole,) if count else ()


@dataclass(frozen=True)
class Form:
    """How the parts of a hook's state make up the whole."""

    layout: tuple[Bucket, ...]
    shapes: Mapping[str, torch.Size]
    flat: bool  # whether buckets are flat tensors
    n_early: int  # the number of stages that run bucket by bucket
    stages: int  # the number of all stages
    pieces: Pieces | None = None  # of a hook that shards


class HookState(NamedTuple):
    buckets: tuple[Any, ...]  # each bucket's state of the stages that run bucket by bucket
    rest: tuple[Any, ...]  # the states of the stages that run on the whole tree
    form: Form

    def of_bucket(self, index: int, bucket: Bucket) -> Any:
        """The state of the stages on a bucket, which may be another one than the state has at this place."""
        form = self.form
        if form.flat or (index < len(form.layout) and form.layout[index] is bucket):
            return self.buckets[index]
        early = self._early()
        return trees.restrict(early if form.n_early > 1 else early[0], form.shapes, bucket.paths)

    def after(self, buckets: tuple[Any, ...], rest: tuple[Any, ...], layout: list[Bucket]) -> HookState:
        """The state after a step, in the form of this one, from those of the buckets of the step."""
        form = self.form
        if form.flat or (len(layout) == len(form.layout) and all(map(operator.is_, layout, form.layout))):
            return HookState(buckets, rest, form)
        return self.split(HookState(buckets, rest, replace(form, layout=tuple(layout))).whole())

    def relaid(self, layout: tuple[Bucket, ...]) -> HookState:
        """The same state by other buckets."""
        return self._replace(form=replace(self.form, layout=layout)).split(self.whole())

    def whole(self) -> Any:
        """The state in the form of the pure hook: keyed by path."""
        return whole_of((*self._early(), *self.rest))

    def _early(self) -> Any:
        """The states of the stages that run bucket by bucket, keyed by path."""
        form = self.form
        if not form.n_early:
            return ()
        parts = [_by_path(p, form, k) if form.flat else p for k, p in enumerate(self.buckets)]
        merged = trees.merge(parts, form.shapes)
        return merged if form.n_early > 1 else (merged,)

    def split(self, whole: Any) -> HookState:
        """The stored form of another state, given in the form of the pure hook; the inverse of `whole`."""
        form = self.form
        parts = stages_of(whole, form.stages)
        early, rest = parts[: form.n_early], tuple(parts[form.n_early :])
        if not form.n_early:
            return HookState((), rest, form)
        early = early if form.n_early > 1 else early[0]
        if form.flat:
            buckets = tuple(_in_flat(early, own, form, k) for k, own in enumerate(self.buckets))
        else:
            buckets = tuple(trees.restrict(early, form.shapes, bucket.paths) for bucket in form.layout)
        return HookState(buckets, rest, form)


def _is_flat(node: Any) -> bool:
    return isinstance(node, dict) and node.keys() == {FLAT}


def _places(form: Form, k: int, flat: Any) -> dict[str, Tensor] | None:
    """Path -> the view of a leaf, or of this rank's slice of it, in a flat tensor of a bucket; None of another value."""
    bucket, pieces = form.layout[k], form.pieces
    if isinstance(flat, Tensor) and flat.shape == (bucket.numel,):
        return dict(zip(bucket.paths, views(bucket, flat, form.shapes), strict=True))
    if isinstance(flat, Tensor) and pieces and flat.shape == (pieces.sizes(k)[pieces.rank],):
        return pieces.leaves_own(k, flat)
    return None


def _by_path(state: Any, form: Form, k: int) -> Any:
    """A state on a flat bucket, with its flat tensors replaced by views of the leaves, or of this rank's slices."""

    def leaves_of(node: Any) -> Any:
        if not _is_flat(node):
            return node
        places = _places(form, k, node[FLAT])
        return dict.fromkeys(form.layout[k].paths, node[FLAT]) if places is None else places

    return optree.tree_map(leaves_of, state, is_leaf=_is_flat)


def _in_flat(state: Any, like: Any, form: Form, k: int) -> Any:
    """The inverse of `_by_path`; `like` is a state on the flat bucket."""

    def flat_of(node: Any, by_path: Any) -> Any:
        if not _is_flat(node):
            return by_path
        flat = torch.zeros_like(node[FLAT]) if isinstance(node[FLAT], Tensor) else None
        places = _places(form, k, flat)
        if places is None:
            return {FLAT: by_path[form.layout[k].paths[0]]}
        for path, place in places.items():
            place.copy_(by_path[path])
        return {FLAT: flat}

    return optree.tree_map(flat_of, like, state, is_leaf=_is_flat)
