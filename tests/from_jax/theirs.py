"""The rows of the table in jax, on 8 devices: `python -m tests.from_jax.theirs FILE 1` writes what each gives."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import re
import sys
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax import lax, random
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr

from tests.from_jax import rows

DEVICES = np.array(jax.devices())
NAMES: dict[str, Any] = {
    "jax": jax, "jnp": jnp, "lax": lax, "optax": optax, "random": random, "P": P, "keystr": keystr,
    "ravel_pytree": ravel_pytree, "grad": jax.grad, "p": jax.checkpoint_policies, "mesh": jax.sharding.Mesh(DEVICES, ("data",)),
}  # fmt: skip


def arrays(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)


def ranks(text: str, axes: dict[str, int] | None = None) -> Any:
    axes = axes or {"data": 8}
    mesh = jax.sharding.Mesh(DEVICES.reshape(*axes.values()), tuple(axes))

    def one(x: Any) -> Any:
        own = {
            "x": x, "c": 1.0 + lax.axis_index(tuple(axes)), "w": jnp.asarray(rows.W), "p": {"w": jnp.asarray(rows.W)},
        }  # fmt: skip
        own |= {"opt": optax.adam(0.1), "loss": lambda p, x: jnp.mean((jnp.tanh(x @ p["w"]) - 1.0) ** 2)}
        return jax.tree.map(lambda v: jnp.asarray(v)[None], eval(text, NAMES | own))

    every = P(tuple(axes))
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=every, out_specs=every))(jnp.asarray(rows.X))


def grid(text: str) -> Any:
    return ranks(text, {"node": 2, "local": 4})


def values(text: str) -> Any:
    def loss(w: Any, x: Any) -> Any:
        out = jnp.tanh(x @ w["a"] + w["b"])
        return (out**2).mean(), {"most": out.max()}

    own = {"loss": loss, "f": lambda w, x: loss(w, x)[0], "tree": rows.TREE, "w": arrays(rows.SMALL)}
    return eval(text, NAMES | own | {"x": jnp.asarray(rows.X[:8]), "k": random.key(7)})


def policy(text: str) -> Any:
    def block(w: Any, x: Any) -> Any:
        h = checkpoint_name(jnp.tanh(x @ w["a"]), "h")
        s = checkpoint_name(jnp.tanh(h @ h.transpose(0, 2, 1)), "s")
        return (jnp.sin(s @ h @ w["b"]) ** 2).sum()

    again = jax.checkpoint(block, policy=eval(text, NAMES))
    w, x = arrays(rows.BLOCK), jnp.asarray(rows.BLOCK_X)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_saved_residuals(again, w, x)
    found = re.findall(r"^f32(?:<host>)?\[([\d,]+)\] (?!from the argument)", printed.getvalue(), re.MULTILINE)
    return jax.grad(again)(w, x), sorted(math.prod(map(int, shape.split(","))) for shape in found)


def optimizer(text: str, nan: bool = False) -> Any:
    def averaged(inner: Any, decay: float) -> Any:
        return inner

    opt = eval(text, NAMES | {"averaged": averaged, "slower": lambda opt: opt})
    params = arrays(rows.PARAMS)
    state, average, update = opt.init(params), None, jax.jit(opt.update)
    for i, grads in enumerate(rows.gradients(nan)):
        if i == 3 and text.startswith("slower"):
            state.hyperparams["learning_rate"] = jnp.asarray(1e-3)
        updates, state = update(arrays(grads), state, params)
        params = optax.apply_updates(params, updates)
        average = params if average is None else optax.incremental_update(params, average, 0.1)
    return average if text.startswith("averaged") else params


def steps(text: str) -> Any:
    return optimizer(text, "finite" in text)


def stage(text: str) -> Any:
    transform, params, found = eval(text, NAMES), arrays(rows.PARAMS), []
    state, update = transform.init(params), jax.jit(transform.update)
    for grads in rows.gradients():
        out, state = update(arrays(grads), state, params)
        found.append(out)
    return found


def schedule(text: str) -> Any:
    run = eval(text, NAMES)
    return [run(step) for step in range(26)]


def main(file: str, every: int) -> None:
    found = {}
    for name, (kind, row) in [*rows.CASES.items()][::every]:
        try:
            found[name] = [
                v if isinstance(v, str) else np.asarray(v) for v in jax.tree.leaves(globals()[kind](row.jax))
            ]
        except Exception as error:  # shown by the test of the row
            found[name] = repr(error)
    with open(file, "wb") as out:
        pickle.dump(found, out)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
