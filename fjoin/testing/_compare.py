"""Trees and runs of ranks that are compared."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from .. import transforms as tx
from ..transforms.base import specs
from ..transforms.pipelines import axes_of


def params_like(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A small tree with a matrix, a vector, a scalar and an empty leaf."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"layer.weight": (3, 4), "layer.bias": (3,), "scale": (), "none": (0, 2)}
    return {path: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for path, shape in shapes.items()}


def max_diff(a: Any, b: Any) -> float:
    """The largest difference between two trees of the same structure; host values must be equal.

    The difference is infinite between NaN and a value that is not NaN, and between an infinity and another value.
    """
    assert optree.tree_structure(a) == optree.tree_structure(b)
    worst = 0.0
    for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True):
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
    """Whether two trees are equal to the bit, dtypes included; NaN counts as equal to itself, and 0 as different from
    -0.
    """
    if optree.tree_structure(a) != optree.tree_structure(b):
        return False
    return all(
        _same_tensor(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else type(x) is type(y) and x == y
        for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
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
    versions = [v._version for v in optree.tree_leaves(tree) if isinstance(v, Tensor)]
    return copy, versions


def assert_untouched(tree: Any, before: Any) -> None:
    copy, versions = before
    now = [v._version for v in optree.tree_leaves(tree) if isinstance(v, Tensor)]
    assert versions == now, "an argument was written into"
    assert same_bits(tree, copy), "an argument was changed"


def repeated(function: Callable[..., Any], *given: Any) -> Any:
    """The result of a function that gives it twice, and leaves its arguments unchanged."""
    before = snapshot(given)
    first, second = function(*given), function(*given)
    assert_untouched(given, before)
    assert same_bits(first, second), "the second call gave another answer: there is hidden state"
    return first


def is_data(make: Callable[[], Any]) -> None:
    """repr, equality and fingerprint agree, and the spec has all that makes the object again."""
    part = make()
    assert part == make() and hash(part) == hash(make())
    assert specs.fingerprint(part) == specs.fingerprint(make())
    assert part.spec.name in repr(part)
    if part.spec.factory is not None:  # otherwise handwritten: identified by its functions
        assert specs.call_factory(part.spec.factory, part.spec.args) == part


def saved_and_loaded(state: Any, like: Any) -> Any:
    """The state after saving to a file and loading it, which unpickles only tensors and numbers."""
    file = io.BytesIO()
    torch.save(tx.to_state_dict(state), file)
    file.seek(0)
    return tx.from_state_dict(like, torch.load(file, weights_only=True))


def axes_for(make: Callable[[], tx.Transform], alone: bool = False) -> dict[str, int]:
    """Sizes of the axes that a transform names, or of "data": 3 for one axis, 2 each for two; 1 if `alone`."""
    found = sorted(axes_of(make(), ())) or ["data"]
    sizes = [1] if alone else [3] if len(found) == 1 else [2, 2]
    return {name: sizes[i] if i < len(sizes) else 1 for i, name in enumerate(found)}


def ranks_of(make: Callable[[], tx.Transform]) -> int:
    return math.prod(axes_for(make).values())


def grads_of(seed: int) -> dict[str, Tensor]:
    return params_like(100 + seed)


def on_ranks(make: Callable[[], tx.Transform], body: Callable[..., Any], alone: bool = False) -> list[Any]:
    """What `body(transform, params, rank)` returns on each simulated rank."""
    axes = axes_for(make, alone)
    return tx.simulate(lambda: body(make(), params_like(), int(tx.axis_index(tuple(axes)))), axes)
