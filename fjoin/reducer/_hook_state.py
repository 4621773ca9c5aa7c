"""The state of a hook: as a step stores it, and in the form of the pure hook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..transforms._bucketwise import merge
from ..transforms.layout._buckets import Bucket
from ._flat_params import views

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
                parts = [_by_path(p, bucket, form.shapes) for p, bucket in zip(parts, form.layout, strict=True)]
            merged = merge(parts, form.shapes)
            early = merged if form.n_early > 1 else (merged,)
        whole = (*early, *self.rest)
        return whole if form.stages > 1 else whole[0] if whole else ()


def _by_path(state: Any, bucket: Bucket, shapes: Mapping[str, torch.Size]) -> Any:
    """A state on a flat bucket, with its flat tensors replaced by views of the leaves."""
    if isinstance(state, dict):
        if state.keys() == {FLAT}:
            value = state[FLAT]
            if isinstance(value, Tensor) and value.shape == (bucket.numel,):
                return dict(zip(bucket.paths, views(bucket, value, shapes), strict=True))
            return dict.fromkeys(bucket.paths, value)
        return {key: _by_path(part, bucket, shapes) for key, part in state.items()}
    if isinstance(state, (tuple, list)):
        children = [_by_path(part, bucket, shapes) for part in state]
        return type(state)(*children) if hasattr(state, "_fields") else type(state)(children)
    return state
