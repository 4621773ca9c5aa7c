"""One call of each collective that can be quantized."""

from __future__ import annotations

from typing import Any

import torch

from fjoin import transforms as tx

# Each codec, and its largest error relative to the largest value encoded with it.
CODECS: dict[str, tuple[Any, float]] = {
    "float32": (tx.float32(), 1e-7), "bfloat16": (tx.bfloat16(), 2.0**-8), "float16": (tx.float16(), 2.0**-11),
    "fp8": (tx.fp8(block=8), 1 / 15), "fp8 e5m2": (tx.fp8(dtype=torch.float8_e5m2), 1 / 7),
    "int8": (tx.int8(), 1 / 253), "int4": (tx.int4(block=4), 1 / 13),
    "int8 by chance": (tx.int8(stochastic=True).keyed(1, 2), 1 / 126),
}  # fmt: skip
SERVED = ["psum", "pmean", "all_gather", "all_to_all", "all_to_all_single"]
CALLS: dict[str, Any] = {
    "psum": lambda f, x, n: f(x, "data"),
    "pmean": lambda f, x, n: f({k: v for k, v in x.items() if k != "torch.bool"}, "data"),
    "all_gather": lambda f, x, n: f(x, "data", dim=1), "all_to_all": lambda f, x, n: f(x, "data", tiled=True),
    "all_to_all_single": lambda f, x, n: f(x, "data"),
}  # fmt: skip


def on_ranks(name: str, f: Any, xs: list[Any]) -> list[Any]:
    return tx.simulate(lambda x: CALLS[name](f, x, len(xs)), {"data": len(xs)}, xs)


AXES = {"node": 2, "local": 3}
BOTH = ("node", "local")
