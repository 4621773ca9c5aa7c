"""The rows of the table here, on 8 simulated ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import optax
import optax.contrib
import optree
import optree.integrations.torch
import torch

import fjoin.jax
from fjoin import transforms as tx
from tests.from_jax import data
from tests.transforms.remat.exact import exact_host


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
            "x": x, "c": 1.0 + tx.axis_index(tuple(axes)), "w": torch.tensor(data.W), "p": {"w": torch.tensor(data.W)},
        }  # fmt: skip
        if "loss" in text or "step" in text:
            pipeline = tx.fuse(tx.mean("data"), tx.adam(0.1))
            own |= {"loss": loss, "pipeline": pipeline, "step": fjoin.train_step(loss, pipeline)}
        return optree.tree_map(lambda v: torch.as_tensor(v)[None], eval(text, NAMES | own))

    parts = torch.tensor(data.X).chunk(math.prod(axes.values()))
    return optree.tree_map(lambda *of_ranks: torch.cat(of_ranks), *tx.simulate(one, axes, parts))


def grid(text: str) -> Any:
    return ranks(text, {"node": 2, "local": 4})


def values(text: str) -> Any:
    def loss(w: Any, x: Any) -> Any:
        out = torch.tanh(x @ w["a"] + w["b"])
        return (out**2).mean(), {"most": out.max()}

    own = {"loss": loss, "f": lambda w, x: loss(w, x)[0], "tree": data.TREE, "w": tensors(data.SMALL)}
    return eval(text, NAMES | own | {"x": torch.tensor(data.X[:8]), "k": tx.random.key(7)})


def policy(text: str) -> Any:
    def block(w: Any, x: Any) -> Any:
        h = tx.checkpoint_name(torch.tanh(x @ w["a"]), "h")
        s = tx.checkpoint_name(torch.tanh(h @ h.transpose(1, 2)), "s")
        return (torch.sin(s @ h @ w["b"]) ** 2).sum()

    w, x = tensors(data.BLOCK), torch.tensor(data.BLOCK_X)
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
    params = tensors(data.PARAMS)
    state = pipeline.init(params)
    for i, grads in enumerate(data.gradients(nan)):
        if i == 3 and slower:
            state = state._replace(optimizer=tx.with_hyperparameters(state.optimizer, lr=1e-3))
        params, state = pipeline.step(params, tensors(grads), state)
    return tx.ema_params(params, state) if "ema(" in repr(pipeline) else params


def stage(text: str) -> Any:
    transform, params, found = eval(text, NAMES), tensors(data.PARAMS), []
    state = transform.init(params)
    for grads in data.gradients():
        out, state = transform.update(tensors(grads), state, params)
        found.append(out)
    return found


def schedule(text: str) -> Any:
    made = eval(text, NAMES)
    return [made(torch.tensor(step)) for step in range(26)]


def leaves(kind: str, text: str) -> list[Any]:
    """What a row gives: numpy arrays and strings."""
    return [v if isinstance(v, str) else np.asarray(v) for v in optree.tree_leaves(globals()[kind](text))]
