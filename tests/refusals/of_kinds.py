"""What all names of a kind refuse: collectives, and hooks over axes."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch

from fjoin import transforms as tx

V, T = ValueError, TypeError
X = torch.ones(3)
TWICE: Any = ("data", "data")
# -- collectives, which a test also calls on real ranks
PERM = [(0, 1)]
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "psum": tx.psum, "pmean": tx.pmean, "pmax": tx.pmax, "pmin": tx.pmin, "all_gather": tx.all_gather,
    "psum_scatter": tx.psum_scatter, "all_to_all": tx.all_to_all, "pbroadcast": lambda x, axis: tx.pbroadcast(x, axis, 0),
    "ppermute": lambda x, axis: tx.ppermute(x, axis, PERM), "axis_size": lambda x, axis: tx.axis_size(axis),
    "axis_index": lambda x, axis: tx.axis_index(axis),
}  # fmt: skip
OVER = ((TWICE, V, "names an axis twice"), (3, T, "got 3"), (None, T, "got None"))
ONE_AXIS = ("all_to_all", "pbroadcast", "ppermute")
COLLECTIVES: dict[str, list[tuple[Any, ...]]] = collections.defaultdict(list)
for name, call in CALLS.items():
    if name not in ONE_AXIS:
        COLLECTIVES[name] += [
            (lambda c=call, axis=axis: c(torch.ones(4), axis), kind, text) for axis, kind, text in OVER
        ]
    if "axis" not in name and name not in ("pmean", "pmin"):
        COLLECTIVES[name] += [
            (lambda c=call, d=dtype: c({"a": torch.ones(2).to(d)}, "data"), T, "'a'", str(dtype))
            for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn)
        ]
COLLECTIVES["pmax"] += [(lambda: tx.pmax(X * 1j, "data"), T, "complex64", "order")]
COLLECTIVES["psum"] += [
    (lambda: tx.psum(X.to_sparse(), "data"), T, "sparse", "to_dense"), (lambda: tx.psum("x", "data"), T, "'x'", "tensors and numbers"),
]  # fmt: skip
COLLECTIVES["pbroadcast"] += [(lambda s=s: tx.pbroadcast(1.0, "data", s), V, "source", repr(s)) for s in (True, 1.0)]
COLLECTIVES["ppermute"] += [(lambda: tx.ppermute(1.0, "data", [1]), T, "perm", "pairs", "[1]")]  # type: ignore[list-item]


def over(name: str, make: Callable[[Any], Any]) -> list[tuple[Any, ...]]:
    """Axes that a hook refuses."""
    wrong = (
        (3, T, "got 3"), (None, T, "got None"), (["data"], T, "['data']"), (TWICE, V, "('data', 'data') names an axis twice"),
        ((), V, "at least one axis"),
    )  # fmt: skip
    return [(lambda axis=axis: make(axis), kind, text) for axis, kind, text in wrong]


HOOKS = {
    **{make.__name__: over(make.__name__, make) for make in (  # type: ignore[attr-defined]
        tx.mean, tx.sum_over, tx.average_buffers, tx.broadcast_buffers, tx.power_sgd, tx.batched_power_sgd, tx.broadcast_from_last)},
    "compress": over("compress", lambda axis: tx.compress(tx.int8(), tx.mean(axis))),
}  # fmt: skip
