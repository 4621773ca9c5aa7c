"""Trees for checking laws, and their comparison."""

from __future__ import annotations

import math
from typing import Any

import optree
import torch
from torch import Tensor


def params_like(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A small tree with a matrix, a vector, a scalar and an empty leaf."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"layer.weight": (3, 4), "layer.bias": (3,), "scale": (), "none": (0, 2)}
    return {path: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for path, shape in shapes.items()}


def leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree)


def max_diff(a: Any, b: Any) -> float:
    """The largest difference between two trees of the same structure; host values must be equal.

    The difference is infinite between NaN and a value that is not NaN, and between an infinity and another value.
    """
    assert optree.tree_structure(a) == optree.tree_structure(b)
    worst = 0.0
    for x, y in zip(leaves(a), leaves(b), strict=True):
        if isinstance(x, Tensor):
            assert x.shape == y.shape and x.dtype == y.dtype, (x.shape, y.shape, x.dtype, y.dtype)
            if x.numel():
                same = (x == y) | (x.isnan() & y.isnan())
                gap = (x.double() - y.double()).abs().nan_to_num(nan=math.inf)
                worst = max(worst, torch.where(same, torch.zeros_like(gap), gap).max().item())
        else:
            assert x == y
    return worst


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees are equal to the bit, dtypes included; NaN counts as equal to itself, and 0 as different from -0."""
    if optree.tree_structure(a) != optree.tree_structure(b):
        return False
    return all(
        _same_tensor(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else type(x) is type(y) and x == y
        for x, y in zip(leaves(a), leaves(b), strict=True)
    )


def _same_tensor(x: Tensor, y: Tensor) -> bool:
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    if not x.is_floating_point():
        return torch.equal(x, y)
    nan = x.isnan()
    return torch.equal(nan, y.isnan()) and torch.equal(x[~nan].view(torch.uint8), y[~nan].view(torch.uint8))


def snapshot(tree: Any) -> Any:
    """A deep copy with the version counters, to detect later changes."""
    copy = optree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, tree)
    versions = [v._version for v in leaves(tree) if isinstance(v, Tensor)]
    return copy, versions


def assert_untouched(tree: Any, before: Any) -> None:
    copy, versions = before
    assert versions == [v._version for v in leaves(tree) if isinstance(v, Tensor)], "an argument was written into"
    assert same_bits(tree, copy), "an argument was changed"
