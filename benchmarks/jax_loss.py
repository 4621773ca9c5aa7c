"""The time of a step with a loss of jax, beside the same loss in torch and beside jax alone.

    python benchmarks/jax_loss.py [--quick] [--async]

One process, one thread for torch and for jax. The variants take turns in blocks of steps; a figure is the median over the blocks, a
ratio the median of the ratios within each block. "torch, again" is the control: what differs from 1 there is noise.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import fjoin
import fjoin.jax
from fjoin import transforms as tx

# Name -> sizes of the layers, rows of a batch, steps of a block.
MODELS = {"10.5M": ((1024, 2048, 2048, 2048), 64, 2), "352": ((8, 32, 3), 16, 100)}
QUICK = {"33K": ((32, 256, 96), 8, 2), "352": ((8, 32, 3), 16, 10)}
LR = 1e-3
Params = dict[str, Any]


def in_torch(params: Params, batch: Any) -> Any:
    x, y = batch
    *hidden, last = params.values()
    for w in hidden:
        x = torch.tanh(x @ w)
    return ((x @ last - y) ** 2).mean()


def in_jax(params: Params, batch: Any) -> Any:
    x, y = batch
    *hidden, last = params.values()
    for w in hidden:
        x = jnp.tanh(x @ w)
    return ((x @ last - y) ** 2).mean()


def stepped(loss_fn: Callable[..., Any], params: Params, batch: Any) -> Callable[[], Params]:
    """A function that takes a step of ours and returns the parameters."""
    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(LR)))
    state = step.init({path: torch.from_numpy(p.copy()) for path, p in params.items()})
    given = tuple(torch.from_numpy(x) for x in batch)

    def run() -> Params:
        nonlocal state
        state, _ = step(state, given)
        return state.params

    return run


def alone(params: Params, batch: Any) -> Callable[[], Params]:
    """A function that takes a step of jax and optax, compiled as one."""
    optimizer, given = optax.sgd(LR), tuple(map(jnp.asarray, batch))

    @jax.jit
    def step(params: Params, state: Any) -> Any:
        loss, grads = jax.value_and_grad(in_jax)(params, given)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    held: Any = {path: jnp.asarray(p) for path, p in params.items()}
    state = optimizer.init(held)

    def run() -> Params:
        nonlocal held, state
        held, state, _ = jax.block_until_ready(step(held, state))
        return held

    return run


def variants(sizes: tuple[int, ...], rows: int) -> dict[str, Callable[[], Params]]:
    of = np.random.default_rng(0)
    pairs = list(zip(sizes, sizes[1:], strict=False))
    params = {f"w{i}": (of.normal(size=(n, m)) / n**0.5).astype(np.float32) for i, (n, m) in enumerate(pairs)}
    batch = tuple(of.normal(size=(rows, n)).astype(np.float32) for n in (sizes[0], sizes[-1]))
    return {
        "torch": stepped(in_torch, params, batch),
        "torch, again": stepped(in_torch, params, batch),
        "loss of jax": stepped(fjoin.jax.loss(in_jax), params, batch),
        "jax alone": alone(params, batch),
    }


def measure(runs: dict[str, Callable[[], Params]], blocks: int, calls: int) -> dict[str, list[float]]:
    """The seconds of a step in each block."""
    for _ in range(3):
        found = {name: run() for name, run in runs.items()}
    for name, params in found.items():  # all have taken as many steps
        for path, p in params.items():
            assert np.abs(np.asarray(p) - np.asarray(found["torch"][path])).max() < 1e-5, (name, path)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for block in range(blocks):
        names = list(runs)[block % len(runs) :] + list(runs)[: block % len(runs)]  # each comes first in turn
        for name in names:
            start = time.perf_counter()
            for _ in range(calls):
                runs[name]()
            times[name].append((time.perf_counter() - start) / calls)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models and few blocks")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--async", action="store_true", dest="dispatch", help="leave jax_cpu_enable_async_dispatch on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    jax.config.update("jax_cpu_enable_async_dispatch", args.dispatch)
    before = os.getloadavg()[0]
    print("| parameters | variant | ms per step | of torch's | overhead, ms |\n| ---: | --- | ---: | ---: | ---: |")
    for model, (sizes, rows, calls) in (QUICK if args.quick else MODELS).items():
        times = measure(variants(sizes, rows), 4 if args.quick else args.blocks, calls)
        for name, own in times.items():
            ratio = statistics.median(a / b for a, b in zip(own, times["torch"], strict=True))
            over = statistics.median(a - b for a, b in zip(own, times["torch"], strict=True))
            print(
                f"| {model} | {name} | {statistics.median(own) * 1e3:.3f} | {ratio:.2f} | {over * 1e3:+.3f} |",
                flush=True,
            )
    day = datetime.datetime.now(datetime.UTC).date()
    print(f"\n{day}, torch {torch.__version__}, jax {jax.__version__}, load {before:.1f} to {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
