"""What remat saves, and what it costs: bytes kept, peak memory and time of a 12-layer transformer.

    python benchmarks/remat.py

Times are interleaved in one process; the peak memory is that of a process that runs one variant alone.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies

LAYERS, WIDTH, HEADS, ROWS, LENGTH, ROUNDS = 12, 256, 8, 8, 256, 11
HERE = Path(__file__).parent


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).view(ROWS, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.second(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def loss(self, x: Tensor, wrap: Callable[[Any], Any]) -> Tensor:
        for block in self.blocks:
            x = wrap(block)(x)
        return x.square().mean()


Wrap = Callable[[Any], Any]
WRAPS: dict[str, Wrap] = {
    "plain": lambda f: f,
    "plain, again": lambda f: f,
    "torch.utils.checkpoint": lambda f: lambda x: checkpoint(f, x, use_reentrant=False),
    "remat": tx.remat,
    "dots_saveable": lambda f: tx.remat(f, policies.dots_saveable),
}


def loss_of(model: Model, name: str) -> Callable[[Tensor], Tensor]:
    return lambda x: model.loss(x, WRAPS[name])


def counted(loss: Callable[[Tensor], Tensor], x: Tensor, model: Model) -> int:
    """The bytes that the graph keeps, without those of the parameters and the input."""
    found = {}

    def pack(y: Tensor) -> Tensor:
        found[y.untyped_storage()._cdata] = y.untyped_storage().nbytes()
        return y

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        out = loss(x)
    for own in (x, *model.parameters()):
        found.pop(own.untyped_storage()._cdata, None)
    assert out.requires_grad
    return sum(found.values())


def alone(name: str) -> None:
    """Three steps of one variant; prints the bytes of memory that the last two take at most, above those before them."""
    model, x = Model(), torch.randn(ROWS, LENGTH, WIDTH)
    loss = loss_of(model, name)
    loss(x).backward()  # with the gradients
    gc.collect()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    for _ in range(2):
        loss(x).backward()
    print(json.dumps(_memory("VmHWM") - before))


def _memory(field: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=HERE / "RESULTS_REMAT.md")
    parser.add_argument("--alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.alone:
        alone(args.alone)
        return
    model, x = Model(), torch.randn(ROWS, LENGTH, WIDTH)
    losses = {name: loss_of(model, name) for name in WRAPS}
    times: dict[str, list[float]] = {name: [] for name in WRAPS}
    for n in range(ROUNDS + 1):
        row = {}
        for name in random.sample(list(WRAPS), len(WRAPS)):
            start = time.perf_counter()
            losses[name](x).backward()
            row[name] = time.perf_counter() - start
        if n:
            for name in WRAPS:
                times[name].append(row[name] / row["plain"])
    rows, points = [], {}
    for name, loss in losses.items():
        predicted, kept = tx.saved_residuals(loss, x), counted(loss, x, model)
        command = [sys.executable, __file__, "--alone", name]
        # Tensors in pages of their own, given back when they are freed: otherwise the peak depends on the allocator.
        own_pages = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=own_pages)
        peak = json.loads(run.stdout)
        first, middle, third = statistics.quantiles(times[name], n=4)
        rows.append(
            f"| {name} | {predicted.activation_bytes / 2**20:.1f} | {kept / 2**20:.1f} | {peak / 2**20:.0f} | "
            f"{middle:.3f} [{first:.3f}, {third:.3f}] |"
        )
        points[name] = predicted.activation_bytes / 2**20, middle
        print(rows[-1], flush=True)
    args.out.write_text(
        "\n".join(
            [
                "# remat: memory and time",
                "",
                f"{datetime.date.today()}, torch {torch.__version__}, one thread. A transformer of {LAYERS} layers of width {WIDTH}, "
                f"{ROWS} rows of {LENGTH} tokens, float32: a forward and a backward pass.",
                "Each block is wrapped. MiB kept are those of activations between the passes, predicted by `saved_residuals` "
                "and counted by saved-tensor hooks (which do not see codes).",
                "RSS is the peak in a step above that before it, in a process that runs one variant alone.",
                "The time is a ratio to `plain` in the same round: the median [quartiles] of "
                f"{ROUNDS} rounds of variants in shuffled order.",
                "",
                "`python benchmarks/remat.py`",
                "",
                "| | MiB kept, predicted | MiB kept, counted | MiB of RSS in a step | time |",
                "|---|---|---|---|---|",
                *rows,
                "",
                "![memory against time](remat.png)",
                "",
            ]
        )
    )
    picture(points, args.out.parent / "remat.png")


def picture(points: dict[str, tuple[float, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, (kept, ratio) in points.items():
        axes.plot(ratio, kept, "o")
        axes.annotate(name, (ratio, kept), textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.set_xlabel("time of a step / plain")
    axes.set_ylabel("activations kept, MiB")
    axes.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
