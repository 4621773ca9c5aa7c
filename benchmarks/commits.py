"""Times steps of two checkouts of fjoin in one interleaved run.

    git worktree add ../before COMMIT
    python benchmarks/commits.py ../before                 every row: ratios of this checkout's times to that one's
    python benchmarks/commits.py ../before --rows "tiny*"  some rows
    python benchmarks/commits.py . --rows tiny             a control: a checkout against itself

Each checkout has its own two ranks, which all live at the same time. Blocks of steps run in turn, in an order drawn for each
pair, while the ranks of the other checkout wait for input. In half of the rounds the ranks of the other checkout are started
first: those that are started last were found to be up to 3 % faster. A row passes if the median ratio of the pairs is at most 1.01, or
the upper bound of its 95 % interval (bootstrap) is below 1.02.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANKS = 2
SIZES = {"tiny": ([32, 64, 64, 10], 20), "1M": ([256, 512, 1024, 256], 4)}  # widths of layers, steps of a block


# -- one rank -----------------------------------------------------------------------------------------


def worker(row: str) -> None:
    """Run a block of steps for each line of input, and print its seconds."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = make(*row.split(", "))
    run()  # buffers are made
    print("ready", flush=True)
    for _ in sys.stdin:
        dist.barrier()
        start = time.perf_counter()
        run()
        print(time.perf_counter() - start, flush=True)
    os._exit(0)


def make(size: str, kind: str, transport: str) -> Callable[[], None]:
    """A function that runs one block of steps."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel

    import fjoin
    from fjoin import transforms as tx

    os.environ["FJOIN_TRANSPORT"] = transport
    widths, steps = SIZES[size]
    dist.init_process_group("gloo")
    layers: list[Any] = []
    for a, b in zip(widths, widths[1:], strict=False):
        layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1])
    batch = torch.randn(8, widths[0]), torch.randn(8, widths[-1])
    pipelines = {
        "train_step": tx.fuse(tx.mean("data"), tx.adamw(1e-3)),
        "clip": tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), tx.adamw(1e-3)),
        "int8": tx.fuse(tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), tx.adamw(1e-3)),
        "zero": tx.zero(tx.mean("data"), tx.adamw(1e-3), "data"),
        "local": tx.local_sgd(tx.adamw(1e-3), tx.mean("data"), 4),
    }
    pipeline = pipelines.get(kind, pipelines["train_step"])
    if kind == "registered":
        ddp = DistributedDataParallel(model)
        fjoin.ddp.register(ddp, pipeline)

        def registered() -> None:
            for _ in range(steps):
                ddp.zero_grad()
                mse_loss(ddp(batch[0]), batch[1]).backward()

        return registered
    mesh = fjoin.mesh({"data": -1}, transport=transport)
    apply, params, _ = fjoin.functional(model)

    def loss_fn(params: Any, batch: Any) -> Any:
        return mse_loss(apply(params, {}, batch[0]), batch[1])

    held: list[Any] = [params]
    if kind in ("loop", "donate"):
        held.append(pipeline.init(params))
        donate = kind == "donate"

        def with_value(params: Any, batch: Any) -> Any:
            return fjoin.value_and_grad(loss_fn)(params, batch)[1]

        grad = with_value if donate else torch.func.grad(loss_fn)

        def loop() -> None:
            with fjoin.bind(mesh):
                for _ in range(steps):
                    grads = grad(held[0], batch)
                    held[0], held[1] = pipeline.step(held[0], grads, held[1], weight=8.0, donate=donate)

        return loop
    step = fjoin.train_step(loss_fn, pipeline, mesh=mesh, weight=lambda batch: 8.0)
    state = [step.init(params)]

    def trained() -> None:
        for each in step.join([batch] * steps) if kind == "join" else [batch] * steps:
            state[0], _ = step(state[0], each)

    return trained


# -- all ranks ----------------------------------------------------------------------------------------


class Side:
    """The ranks of one checkout, for one row."""

    def __init__(self, tree: Path, row: str, port: int) -> None:
        self.ranks = []
        for rank in range(RANKS):
            env = os.environ | {
                "PYTHONPATH": str(tree.resolve()), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            command = [sys.executable, __file__, "--worker", row]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
            self.ranks.append(subprocess.Popen(command, env=env, cwd=tree, **pipes))
        for process in self.ranks:
            while (line := process.stdout.readline().strip()) != "ready":  # type: ignore[union-attr]
                if not line and process.poll() is not None:
                    raise RuntimeError(f"a rank of {tree} ended in {row}")

    def block(self) -> float:
        """The seconds of one block on the slowest rank."""
        for process in self.ranks:
            process.stdin.write("\n")  # type: ignore[union-attr]
        return max(float(process.stdout.readline()) for process in self.ranks)  # type: ignore[union-attr]

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by bootstrap."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return medians[25], medians[975]


def compare(row: str, before: Path, rounds: int, port: int) -> str:
    """A line for a row: milliseconds of a step before and now, the ratio and its interval, and whether it passes."""
    draw, ratios, steps = random.Random(row), list[float](), SIZES[row.split(", ")[0]][1]
    times: tuple[list[float], list[float]] = ([], [])
    trees = Path(__file__).parents[1], before
    for started in ((0, 1), (1, 0)):
        sides = {which: Side(trees[which], row, port + which) for which in started}
        try:
            for _ in range(rounds // 2):
                for which in draw.sample((0, 1), 2):
                    times[which].append(sides[which].block() * 1e3 / steps)
                ratios.append(times[0][-1] / times[1][-1])
        finally:
            for side in sides.values():
                side.close()
    middle, (low, high) = statistics.median(ratios), interval(ratios)
    fine = "ok" if middle <= 1.01 or high < 1.02 else "slower"
    was, now = statistics.median(times[1]), statistics.median(times[0])
    return f"| {row} | {was:.3f} | {now:.3f} | {middle:.3f} | {low:.3f} to {high:.3f} | {fine} |"


KINDS = ("train_step", "clip", "int8", "zero", "local", "join", "registered", "loop", "donate")
ROWS = [f"{size}, {kind}, {transport}" for size in SIZES for kind in KINDS for transport in ("gloo", "shared")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("--rows", nargs="+", default=["*"])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--worker")
    given = parser.parse_args()
    if given.worker:
        worker(given.worker)
    if given.before is None:
        parser.error("name the other checkout")
    print("| row | before, ms a step | now | ratio | 95 % | |\n|---|---|---|---|---|---|", flush=True)
    chosen = [row for row in ROWS if any(fnmatch.fnmatch(row, f"{pattern}*") for pattern in given.rows)]
    for i, row in enumerate(chosen):
        print(compare(row, given.before, given.rounds, 29600 + 2 * i), flush=True)


if __name__ == "__main__":
    main()
