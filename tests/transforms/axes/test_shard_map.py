"""shard_map on simulated ranks, beside that of jax on 8 devices."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx

AXES = {"x": 4, "y": 2}
SHAPES = ((8, 8), (16, 16), (8, 24))
# (in_specs, out_specs, the function of each rank) of three matrices.
CASES = {
    "rows": ("P('x')", "P('x')", "lambda a, b, c: (2 * a, b + 1, c)"),
    "rows and columns": ("P('x', 'y')", "P('x', 'y')", "lambda a, b, c: (a, b, c)"),
    "two axes in a dimension": ("P(('x', 'y'))", "P(('x', 'y'))", "lambda a, b, c: (a, b, c * 2)"),
    "two axes, the other way round": ("P(('x', 'y'))", "P(('y', 'x'))", "lambda a, b, c: (a, b, c)"),
    "a second dimension": ("P(None, 'y')", "P(None, 'y')", "lambda a, b, c: (a, b, c)"),
    "transposed": ("P('x', 'y')", "P('y', 'x')", "lambda a, b, c: (a.T, b.T, c.T)"),
    "psum": ("P('x', 'y')", "P('x')", "lambda a, b, c: psum((a, b, c), 'y')"),
    "psum over both": ("P('x', 'y')", "P()", "lambda a, b, c: psum((a, b, c), ('x', 'y'))"),
    "a spec for each": ("(P('x'), P(None, 'y'), P())", "(P('x'), P(None, 'y'), P())", "lambda a, b, c: (a, b, c)"),
    "stacked": ("P()", "P('x', 'y')", "lambda a, b, c: (a, b, c)"),
    "indices": ("P()", "P(('x', 'y'))", "lambda a, b, c: 3 * [a[:1] + axis_index('x') + 10.0 * axis_index('y')]"),
}

THEIRS = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax import shard_map
from jax.lax import axis_index, psum
from jax.sharding import PartitionSpec as P
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
shapes, cases = json.load(sys.stdin)
args = [jnp.arange(float(n * m)).reshape(n, m) for n, m in shapes]
found = {}
for name, (inside, out, f) in cases.items():
    run = shard_map(eval(f), mesh=mesh, in_specs=eval(inside), out_specs=eval(out), check_vma=False)
    found[name] = [x.tolist() for x in run(*args)]
print(json.dumps(found))
"""


def arguments() -> list[Tensor]:
    return [torch.arange(float(n * m)).reshape(n, m) for n, m in SHAPES]


def test_as_in_jax() -> None:
    """One process of jax for all cases, hence one test."""
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    given = json.dumps([[list(x.shape) for x in arguments()], CASES])
    out = subprocess.run([sys.executable, "-c", THEIRS], input=given, capture_output=True, text=True, env=env)
    assert not out.returncode, out.stderr
    theirs = json.loads(out.stdout)
    for name, texts in CASES.items():
        in_specs, out_specs, f = (
            eval(text, {"P": tx.P, "psum": tx.psum, "axis_index": tx.axis_index}) for text in texts
        )
        for engine in ("lockstep", "vmap"):
            found = tx.shard_map(f, AXES, in_specs, out_specs)(*arguments())
            assert [x.tolist() for x in found] == theirs[name], (name, engine)


def test_trees_of_specs_are_prefixes_and_numbers_are_tensors() -> None:
    def f(batch: Any, scale: Tensor) -> Any:
        assert batch["x"].shape == (2, 3) and batch["more"][0].shape == (8,) and scale.dtype == torch.float32
        return {"sum": tx.psum(batch["x"].sum() * scale, "data"), "parts": [batch["x"], (batch["x"] * 0,)]}

    batch = {"x": torch.ones(8, 3), "more": [torch.ones(8), torch.ones(1)]}
    specs = ({"x": tx.P("data"), "more": tx.P()}, tx.P())
    out = tx.shard_map(f, {"data": 4}, specs, {"sum": tx.P(), "parts": tx.P("data")})(batch, 2.0)
    assert out["sum"].item() == 48.0 and out["parts"][0].shape == out["parts"][1][0].shape == (8, 3)


def test_arguments_are_not_changed_and_gradients_are_taken_inside() -> None:
    def f(w: Tensor, x: Tensor) -> Tensor:
        w.add_(1.0)  # of this rank's own copy
        return tx.psum(torch.func.grad(lambda w: (w * x).sum())(w), "data")

    w, x = torch.zeros(3), torch.arange(12.0).reshape(4, 3)
    found = tx.shard_map(f, {"data": 4}, (tx.P(), tx.P("data")), tx.P())(w, x)
    assert found.tolist() == x.sum(0).tolist() and w.tolist() == [0.0] * 3


def test_a_backward_pass_outside_raises_and_does_not_wait() -> None:
    w = torch.ones(4, requires_grad=True)
    total = tx.shard_map(lambda w: tx.psum(w.sum(), "data"), {"data": 2}, tx.P("data"), tx.P())(w)
    with pytest.raises(RuntimeError, match="differentiate inside it"):
        total.backward()
    whole = tx.shard_map(lambda w: w * 2, {"data": 2}, tx.P("data"), tx.P("data"))(w)  # no messages
    whole.sum().backward()
    assert w.grad is not None and w.grad.tolist() == [2.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_results_that_are_not_divided_must_have_the_same_bits(dtype: torch.dtype) -> None:
    def f(x: Tensor) -> Any:
        return {"same": x[0] * 0, "own": x[0]}

    x = torch.tensor([1, 1, 1, 0]).to(dtype)
    with pytest.raises(ValueError, match=r"'own' differs between ranks 0 and 6, .* P\(\) does not name \['x', 'y'\]"):
        tx.shard_map(f, AXES, tx.P("x"), tx.P())(x)
    with pytest.raises(ValueError, match=r"differs between ranks 1 and 7, .* does not name \['x'\]"):
        tx.shard_map(lambda x: x + 0 * tx.axis_index("y") * x, AXES, tx.P("x", "y"), tx.P(None, "y"))(
            torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]]).to(torch.int64)
        )


def test_any_two_nans_are_equal_and_zeros_of_other_signs_are_not() -> None:
    def bits(x: Tensor) -> Tensor:
        return tx.shard_map(lambda x: x[0].view(torch.float32), {"x": 2}, tx.P("x"), tx.P())(x)

    assert bits(torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32)).isnan()
    with pytest.raises(ValueError, match="differs between ranks 0 and 1"):
        bits(torch.tensor([0, -(2**31)], dtype=torch.int32))


def f(*xs: Any) -> Any:
    return xs[0]


X = torch.zeros(6, 4)
SLIPS: list[tuple[Any, type[Exception], str]] = [
    (lambda: tx.shard_map(3, AXES, tx.P(), tx.P()), TypeError, "takes a function, got 3"),
    (lambda: tx.shard_map(f, {}, tx.P(), tx.P()), ValueError, "axes is empty"),
    (lambda: tx.shard_map(f, {"x": 0}, tx.P(), tx.P()), ValueError, "at least 1, got 0"),
    (lambda: tx.shard_map(f, {"x": 2}, tx.P(), tx.P(), engine="jit"), ValueError, "must be 'lockstep' or 'vmap'"),
    (lambda: tx.shard_map(f, AXES, "x", tx.P()), TypeError, "in_specs holds tx.P(...) for each argument, result or leaf, got 'x'"),
    (lambda: tx.shard_map(f, AXES, tx.P(), ("x", None)), TypeError, "out_specs holds tx.P(...)"),
    (lambda: tx.shard_map(f, AXES, tx.P("z"), tx.P()), ValueError, "P('z') names 'z', which is no axis of {'x': 4, 'y': 2}"),
    (lambda: tx.P("x", "x"), ValueError, "names an axis twice"),
    (lambda: tx.P(3), TypeError, "an axis is named by a string"),
    (lambda: tx.shard_map(f, AXES, tx.P("x"), tx.P())(X), ValueError, "'0' has shape (6, 4); its dimension 0 must be a multiple of 4"),
    (lambda: tx.shard_map(f, AXES, tx.P(("x", "y")), tx.P())(X), ValueError, "a multiple of 8, the ranks of ('x', 'y')"),
    (lambda: tx.shard_map(f, AXES, tx.P(None, None, "x"), tx.P())(X), ValueError, "fewer dimensions than its spec P(None, None, 'x')"),
    (lambda: tx.shard_map(f, AXES, (tx.P(),), tx.P())(X, X), ValueError, "in_specs is no tree prefix of the arguments"),
    (lambda: tx.shard_map(f, AXES, tx.P(), (tx.P(),))(X), ValueError, "out_specs is no tree prefix of the results"),
    (lambda: tx.shard_map(f, AXES, tx.P(), tx.P("x"))(1.0), ValueError, "the result has shape (), fewer dimensions"),
    (lambda: tx.shard_map(f, AXES, tx.P(), tx.P())("abc"), TypeError, "is 'abc', a str; shard_map takes tensors and numbers"),
    (lambda: tx.shard_map(lambda x: X[: tx.axis_index("x")], AXES, tx.P(), tx.P("x"))(X), ValueError, "float32[1, 4] on rank 2"),
    (lambda: tx.shard_map(lambda x: [x] * (1 + tx.axis_index("x")), AXES, tx.P(), tx.P())(X), ValueError, "return different structures"),
]  # fmt: skip


@pytest.mark.parametrize("call, error, text", SLIPS, ids=[text[:40] for *_, text in SLIPS])
def test_errors(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        call()


def test_specs_are_values() -> None:
    assert tx.P(("x",), None) == tx.P("x", None) != tx.P("x") and hash(tx.P("x")) == hash(tx.P(("x",)))
    assert eval(repr(spec := tx.P("x", None, ("y", "z"))), {"P": tx.P}) == spec
    assert spec.axes == ("x", "y", "z") and math.prod(map(len, spec.parts)) == 0
