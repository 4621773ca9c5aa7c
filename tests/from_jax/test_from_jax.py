"""Every row of the table in docs/from-jax.md gives the same in jax, on 8 devices, and here, on 8 simulated ranks."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optax
import optax.contrib
import optree
import optree.integrations.torch
import pytest
import torch

import fjoin.jax
from fjoin import transforms as tx
from tests.from_jax import rows
from tests.from_jax.rows import CASES, Row, table
from tests.transforms.remat.transformer import exact_host


def with_optax(transformation: Any) -> tx.Pipeline:
    """As on the page."""
    return tx.fuse(fjoin.jax.from_optax(transformation), tx.sgd(1.0, maximize=True))


NAMES: dict[str, Any] = {
    "torch": torch, "fjoin": fjoin, "tx": tx, "optree": optree, "optax": optax, "random": tx.random, "grad": torch.func.grad,
    "none": tx.identity(), "slower": lambda pipeline: pipeline, "with_optax": with_optax,
}  # fmt: skip


def tensors(tree: Any) -> Any:
    return optree.tree_map(torch.tensor, tree)


def loss(p: Any, x: Any) -> Any:
    return torch.mean((torch.tanh(x @ p["w"]) - 1.0) ** 2)


def ranks(text: str, axes: dict[str, int] | None = None) -> Any:
    axes = axes or {"data": 8}

    def one(x: Any) -> Any:
        own = {
            "x": x, "c": 1.0 + tx.axis_index(tuple(axes)), "w": torch.tensor(rows.W), "p": {"w": torch.tensor(rows.W)},
        }  # fmt: skip
        if "loss" in text or "step" in text:
            pipeline = tx.fuse(tx.mean("data"), tx.adam(0.1))
            own |= {"loss": loss, "pipeline": pipeline, "step": fjoin.train_step(loss, pipeline)}
        return optree.tree_map(lambda v: torch.as_tensor(v)[None], eval(text, NAMES | own))

    parts = torch.tensor(rows.X).chunk(math.prod(axes.values()))
    return optree.tree_map(lambda *of_ranks: torch.cat(of_ranks), *tx.simulate(one, axes, parts))


def grid(text: str) -> Any:
    return ranks(text, {"node": 2, "local": 4})


def values(text: str) -> Any:
    def loss(w: Any, x: Any) -> Any:
        out = torch.tanh(x @ w["a"] + w["b"])
        return (out**2).mean(), {"most": out.max()}

    own = {"loss": loss, "f": lambda w, x: loss(w, x)[0], "tree": rows.TREE, "w": tensors(rows.SMALL)}
    return eval(text, NAMES | own | {"x": torch.tensor(rows.X[:8]), "k": tx.random.key(7)})


def policy(text: str) -> Any:
    def block(w: Any, x: Any) -> Any:
        h = tx.checkpoint_name(torch.tanh(x @ w["a"]), "h")
        s = tx.checkpoint_name(torch.tanh(h @ h.transpose(1, 2)), "s")
        return (torch.sin(s @ h @ w["b"]) ** 2).sum()

    w, x = tensors(rows.BLOCK), torch.tensor(rows.BLOCK_X)
    with exact_host():
        again = tx.remat(block, policy=eval(text, NAMES))
        kept = [int(np.prod(one.shape)) for one in tx.saved_residuals(again, w, x) if not one.given]
        return fjoin.value_and_grad(again)(w, x)[1], sorted(kept)


def optimizer(text: str) -> Any:
    made = eval(text, NAMES)
    return run(made if isinstance(made, tx.Pipeline) else tx.fuse(tx.identity(), made))


def steps(text: str) -> Any:
    return run(eval(text, NAMES), "finite" in text, text.startswith("slower"))


def run(pipeline: tx.Pipeline, nan: bool = False, slower: bool = False) -> Any:
    params = tensors(rows.PARAMS)
    state = pipeline.init(params)
    for i, grads in enumerate(rows.gradients(nan)):
        if i == 3 and slower:
            state = state._replace(optimizer=tx.with_hyperparameters(state.optimizer, lr=1e-3))
        params, state = pipeline.step(params, tensors(grads), state)
    return tx.ema_params(params, state) if "ema(" in repr(pipeline) else params


def stage(text: str) -> Any:
    transform, params, found = eval(text, NAMES), tensors(rows.PARAMS), []
    state = transform.init(params)
    for grads in rows.gradients():
        out, state = transform.update(tensors(grads), state, params)
        found.append(out)
    return found


def schedule(text: str) -> Any:
    made = eval(text, NAMES)
    return [made(torch.tensor(step)) for step in range(26)]


def leaves(kind: str, text: str) -> list[Any]:
    """What a row gives: numpy arrays and strings."""
    return [v if isinstance(v, str) else np.asarray(v) for v in optree.tree_leaves(globals()[kind](text))]


def difference(kind: str, row: Row, want: list[Any], got: list[Any]) -> str:
    """Where what jax gives and what we give differ; empty: nowhere."""
    if kind == "policy" and not row.residuals:  # the gradients of two parameters, then the residuals
        want, got = want[:2], got[:2]
    if len(want) != len(got):
        return f"{len(want)} values and {len(got)}"
    for a, b in zip(want, got, strict=True):
        if isinstance(a, str):
            same = a == b
        elif a.shape != b.shape or not np.isfinite(a).all():
            return f"shapes {a.shape} and {b.shape}, or not finite"
        elif row.exact and a.dtype.kind == "u":
            same = a.tobytes() == b.tobytes()
        elif row.exact or a.dtype.kind != "f":
            same = bool((a == b).all())
        else:
            same = bool(np.abs(a - b).max() <= row.room * max(1.0, np.abs(a).max()))
        if not same:
            return f"{a} and {b}"
    return ""


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_both_sides_of_each_row_give_the_same(every: int, tmp_path: Path) -> None:
    """One process of jax for all rows, hence one test; of every fourth row in the short run."""
    env = os.environ | {"PYTHONPATH": str(rows.PAGE.parents[1])}
    command = [sys.executable, "-m", "tests.from_jax.theirs", tmp_path / "found", str(every)]
    out = subprocess.run(command, env=env, capture_output=True, text=True)
    assert not out.returncode, out.stderr
    theirs = pickle.loads((tmp_path / "found").read_bytes())
    cases = dict([*CASES.items()][::every])
    assert theirs.keys() == cases.keys()
    failed = {}
    for name, (kind, row) in cases.items():
        want = theirs[name]
        found = want if isinstance(want, str) else difference(kind, row, want, leaves(kind, row.ours))
        if found:
            failed[name] = found
    assert not failed


def test_differences_are_noticed() -> None:
    row, x = Row("", ""), np.ones(3, np.float32)
    assert not difference("values", row, [x], [x + np.float32(2e-7)])
    assert difference("values", row._replace(exact=True), [x], [x + np.float32(2e-7)])
    assert difference("values", row, [x], [x + np.float32(1e-5)]) and difference("values", row, [x], [x[:2]])
    assert difference("values", row, [x, x], [x]) and difference("values", row, ["a.0"], ["a.1"])
    assert difference("values", row, [np.arange(3)], [np.arange(3) + 1])


def test_the_page_has_the_rows() -> None:
    """`python -m tests.from_jax.rows` writes them."""
    assert len(CASES) == sum(len(section.rows) for section in rows.SECTIONS)
    assert rows.BEGIN + table(rows.SECTIONS) + rows.END in rows.PAGE.read_text()
