"""The loss after equal steps, against the bytes that a rank sends: the demo's transformer on simulated ranks.

OMP_NUM_THREADS=1 python benchmarks/quality.py --ranks 8 16 --seeds 3 --steps 200

Each rank trains on files of its own, in batches weighted by their tokens. Finished runs are kept in --runs and not
repeated; the table is written to --out, and the picture to the same folder.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.optimizers import Schedule

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
from _text_model import Batch, Decoder, batches_of, cross_entropy, source_files
from papers import dgc, ef21, one_bit_adam

CONTEXT, SEQUENCES, HELD_OUT = 64, 2, 40_000
MODEL = {"width": 64, "heads": 4, "layers": 2, "context": CONTEXT}


class Method(NamedTuple):
    hook: Callable[[int], tx.Transform]  # steps -> hook
    optimizer: str = "adamw"


def _coded(codec: tx.Codec) -> tx.Transform:
    return tx.compress(codec, tx.mean("data"))


def _fed(codec: tx.Codec) -> tx.Transform:
    return tx.error_feedback(_coded(codec))


def _matrices(of_matrices: tx.Transform) -> tx.Transform:
    """PowerSGD for matrices, int8 for embeddings, floats for the rest."""
    small = ("*bias", "*norm*")
    return tx.partition({small: tx.mean("data"), ("embed*", "position*"): _fed(tx.int8()), "*": of_matrices})


METHODS: dict[str, Method] = {
    "float32": Method(lambda n: tx.mean("data")),
    "bfloat16": Method(lambda n: _coded(tx.bfloat16())),
    "fp8": Method(lambda n: _coded(tx.fp8())),
    "int8": Method(lambda n: _coded(tx.int8())),
    "int8 by chance": Method(lambda n: _coded(tx.int8(stochastic=True))),
    "uint8": Method(lambda n: _coded(tx.uint8())),
    "int4": Method(lambda n: _coded(tx.int4())),
    "int4 fed back": Method(lambda n: _fed(tx.int4())),
    "qsgd 7": Method(lambda n: _coded(tx.qsgd(7))),
    "sign fed back": Method(lambda n: _fed(tx.sign())),
    "top_k 1 % fed back": Method(lambda n: _fed(tx.top_k(0.01))),
    "top_k 10 %, no feedback": Method(lambda n: _coded(tx.top_k(0.1))),
    "top_k 1 % ef21": Method(lambda n: ef21("data", tx.top_k(0.01))),
    "power_sgd 2 fed back": Method(lambda n: tx.error_feedback(tx.power_sgd("data", 2))),
    "power_sgd 4 fed back": Method(lambda n: tx.error_feedback(tx.power_sgd("data", 4))),
    "power_sgd 4, int8, float32 by path": Method(lambda n: _matrices(tx.error_feedback(tx.power_sgd("data", 4)))),
    "float32, momentum": Method(lambda n: tx.mean("data"), "momentum"),
    "dgc 1 %": Method(lambda n: dgc("data", 0.01), "sgd"),
    "one_bit_adam": Method(lambda n: one_bit_adam("data", n // 5), "direction"),
}


def make_optimizer(name: str, steps: int) -> tx.Optimizer:
    def falling(peak: float) -> Schedule:
        return tx.warmup_cosine(peak, warmup_steps=steps // 10, total_steps=steps)

    return {
        "adamw": lambda: tx.adamw(falling(3e-3), betas=(0.9, 0.99)),
        "momentum": lambda: tx.sgd(falling(0.05), momentum=0.9),
        "sgd": lambda: tx.sgd(falling(0.05)),
        "signs": lambda: tx.sgd(falling(1e-3)),
        "direction": lambda: tx.sgd(falling(3e-3)),
        "ratios": lambda: tx.sgd(falling(5e-2)),
    }[name]()


def train(method: str, ranks: int, seed: int, steps: int) -> dict[str, Any]:
    """The loss on text that no rank has trained on, after `steps` steps."""
    torch.manual_seed(seed)
    apply, params, _ = fjoin.functional(Decoder(**MODEL))
    hook, optimizer = METHODS[method].hook(steps), make_optimizer(METHODS[method].optimizer, steps)
    files = source_files(40_000 * ranks + HELD_OUT)
    held_out = batches_of(files[-4:], CONTEXT, 64)
    loaders = [batches_of(files[rank:-4:ranks], CONTEXT, SEQUENCES) for rank in range(ranks)]
    order = torch.Generator().manual_seed(seed)
    states, optimizer_state = [hook.init(params) for _ in range(ranks)], optimizer.init(params)
    for _ in range(steps):
        grads, weights = [], []
        for loader in loaders:
            batch = loader[int(torch.randint(len(loader), (), generator=order))]
            grads.append(_gradient(apply, params, batch))
            weights.append(float(batch.tokens))

        def one_rank(g: Any, state: Any, weight: float) -> Any:
            return hook.update(g, state, params, weight=weight)  # noqa: B023

        outs = tx.simulate(one_rank, {"data": ranks}, grads, states, weights)
        states = [state for _, state in outs]
        params, optimizer_state = optimizer.step(params, outs[0][0], optimizer_state)
    with torch.no_grad():
        losses = [(cross_entropy(apply(params, {}, b.inputs), b).item(), b.tokens) for b in held_out]
    sent = tx.explain(hook, params, {"data": ranks}, bucket_bytes=10**9, at_step=steps).sent_bytes
    return {"loss": sum(x * n for x, n in losses) / sum(n for _, n in losses), "sent": sent}


def _gradient(apply: Any, params: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    leaves = {path: p.detach().requires_grad_() for path, p in params.items()}
    loss = cross_entropy(apply(leaves, {}, batch.inputs), batch)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="+", default=[*METHODS], metavar="METHOD")
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("build/quality.json"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/RESULTS_QUALITY.md"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.runs.parent.mkdir(parents=True, exist_ok=True)
    runs = json.loads(args.runs.read_text()) if args.runs.exists() else {}
    for ranks in args.ranks:
        for seed in range(args.seeds):
            for method in args.only:
                key = f"{method}|{ranks}|{seed}|{args.steps}"
                if key not in runs:
                    start = time.perf_counter()
                    runs[key] = train(method, ranks, seed, args.steps)
                    args.runs.write_text(json.dumps(runs, indent=1))
                    print(f"{key}: {runs[key]['loss']:.4f}, {time.perf_counter() - start:.1f} s", flush=True)
    write(runs, args)


def write(runs: dict[str, Any], args: argparse.Namespace) -> None:
    size = sum(p.numel() for p in Decoder(**MODEL).parameters())
    lines = [
        "# Quality against bytes",
        "",
        f"`python benchmarks/quality.py --ranks {' '.join(map(str, args.ranks))} --seeds {args.seeds} --steps {args.steps}`, "
        f"torch {torch.__version__}, fjoin {importlib.metadata.version('fjoin')}.",
        "",
        f"The demo's transformer with {size:,} parameters, on simulated ranks, {SEQUENCES} sequences of {CONTEXT} bytes each,",
        f"weighted by tokens; the loss, in nats per byte, on text that no rank has seen, after {args.steps} steps: the mean of",
        f"{args.seeds} seeds and their spread. All methods of one optimizer have its rate; none was tuned for a method. Bytes: what",
        "a rank sends in a step by a ring, as `explain` says and `tests/reducer/test_wire.py` counts, in one bucket; of methods with a",
        "warm-up, after it.",
        "",
        "Feedback makes up for dropped elements (top_k, signs), not for stochastic rounding of large variance: the error of a code",
        "must be smaller than its input. That of qsgd of few levels is not, and grows. It is",
        "right on average, and used alone.",
        "",
        "ef21, dgc and one_bit_adam are those of `examples/papers.py`, in which a rank sends its code to all others: their bytes grow",
        "with the ranks.",
        "",
        "![loss against bytes](quality.png)",
    ]
    points: dict[int, list[tuple[str, float, float, float]]] = {}
    for ranks in args.ranks:
        lines += [
            "",
            f"## {ranks} ranks",
            "",
            "| method | optimizer | bytes per parameter | loss | spread |",
            "|---|---|---|---|---|",
        ]
        for method in METHODS:
            some = [run for seed in range(args.seeds) if (run := runs.get(f"{method}|{ranks}|{seed}|{args.steps}"))]
            if len(some) < args.seeds:
                continue
            losses = [run["loss"] for run in some]
            mean, spread, sent = statistics.mean(losses), max(losses) - min(losses), some[0]["sent"] / size
            points.setdefault(ranks, []).append((method, sent, mean, spread))
            lines.append(f"| {method} | {METHODS[method].optimizer} | {sent:.3f} | {mean:.3f} | {spread:.3f} |")
    args.out.write_text("\n".join(lines) + "\n")
    picture(points, args.out.parent / "quality.png")


def picture(points: dict[int, list[tuple[str, float, float, float]]], file: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(points), figsize=(9 * len(points), 7), layout="constrained", squeeze=False)
    for axes, (ranks, some) in zip(panels[0], points.items(), strict=True):
        best = min(mean for _, _, mean, _ in some)
        above = [f"{method} {mean:.2f}" for method, _, mean, _ in some if mean > 1.4 * best]
        shown = sorted((p for p in some if p[2] <= 1.4 * best), key=lambda p: p[1])
        for i, (method, sent, mean, spread) in enumerate(shown):
            axes.errorbar(sent, mean, spread / 2, fmt="o", markersize=4, linewidth=1)
            # Put neighbours' names at different heights.
            axes.annotate(
                method, (sent, mean), textcoords="offset points", xytext=(5, (4, -10, 16, -22)[i % 4]), fontsize=7
            )
        title = f"{ranks} ranks" + (f"; above: {', '.join(above)}" if above else "")
        axes.set(xscale="log", xlabel="bytes sent per parameter and step", ylabel="loss, nats per byte", title=title)
        axes.set_xlim(right=axes.get_xlim()[1] * 2)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
