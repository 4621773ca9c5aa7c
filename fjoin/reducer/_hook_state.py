"""The state of a hook: as a step stores it, and in the form of the pure hook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..transforms.layout._buckets import Bucket, views
from ..transforms.layout._pieces import Pieces
from ..transforms.tree._bucketwise import merge

# The path of a flat bucket in a tree of one tensor; no parameter has this path.
FLAT = "(flat)"


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

    def whole(self) -> Any:
        """The state in the form of the pure hook: keyed by path."""
        form = self.form
        early: Any = ()
        if form.n_early:
            parts = list(self.buckets)
            if form.flat:
                parts = [_by_path(p, form, k) for k, p in enumerate(parts)]
            merged = merge(parts, form.shapes)
            early = merged if form.n_early > 1 else (merged,)
        whole = (*early, *self.rest)
        return whole if form.stages > 1 else whole[0] if whole else ()


def _by_path(state: Any, form: Form, k: int) -> Any:
    """A state on a flat bucket, with its flat tensors replaced by views of the leaves, or of this rank's slices."""
    if isinstance(state, dict):
        if state.keys() == {FLAT}:
            value, bucket, pieces = state[FLAT], form.layout[k], form.pieces
            if isinstance(value, Tensor) and value.shape == (bucket.numel,):
                return dict(zip(bucket.paths, views(bucket, value, form.shapes), strict=True))
            if isinstance(value, Tensor) and pieces and value.shape == (pieces.sizes(k)[pieces.rank],):
                return pieces.leaves_own(k, value)
            return dict.fromkeys(bucket.paths, value)
        return {key: _by_path(part, form, k) for key, part in state.items()}
    if isinstance(state, (tuple, list)):
        children = [_by_path(part, form, k) for part in state]
        return type(state)(*children) if hasattr(state, "_fields") else type(state)(children)
    return state
