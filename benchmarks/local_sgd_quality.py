"""The loss after equal tokens, of the mean at every step and of local SGD, against the bytes that a rank sends.

OMP_NUM_THREADS=1 python benchmarks/local_sgd_quality.py

The demo's transformer, on simulated ranks with files of their own. Each run is one `tx.simulate` over
two axes: cases (seeds and outer learning rates) and ranks. Finished runs are kept in --runs and not repeated; the page and
the picture are written to the folder of --out.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import itertools
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

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
from _text_model import Batch, Decoder, batches_of, cross_entropy, source_files

CONTEXT, SEQUENCES, HELD_OUT = 32, 2, 40_000
MODEL = {"width": 32, "heads": 4, "layers": 2, "context": CONTEXT}
INNER, WARMUP = 1e-2, 10  # the peak of the inner learning rate; its warm-up is 1/10 of the steps
OUTER = (0.1, 0.2, 0.4, 0.7, 1.0)  # the outer learning rates that are tried, in float32, for one seed
FRAGMENTS, DELAY, MIX = 4, 5, 0.5
REFERENCE = "mean of gradients"


class Method(NamedTuple):
    make: Callable[[tx.Optimizer, int, Any, tx.Codec | None], tx.Pipeline]  # inner, steps, outer rate, wire
    period: int = 1
    fragments: int = 1
    rate_of: str = ""  # the method for which its outer learning rate was chosen; empty: it has none


def _reduction(wire: tx.Codec | None) -> tx.Transform:
    return tx.mean("data") if wire is None else tx.error_feedback(tx.compress(wire, tx.mean("data")))


def _post_local(period: int) -> Method:
    """With a wire, that of the gradients in the warm-up too."""

    def make(inner: tx.Optimizer, steps: int, rate: Any, wire: tx.Codec | None) -> tx.Pipeline:
        warmup = steps // WARMUP
        local = tx.post_local_sgd(
            inner,
            tx.error_feedback(tx.compress(wire, tx.mean("data"))),
            every=period,
            warmup_steps=warmup,
            hook=tx.mean("data"),
        )
        return tx.fuse(tx.switch_after(warmup, _reduction(wire), tx.identity()), inner, local.after)

    return Method(make, period)


def _diloco(period: int, **streaming: Any) -> Method:
    def make(inner: tx.Optimizer, steps: int, rate: Any, wire: tx.Codec | None) -> tx.Pipeline:
        outer = tx.sgd(rate, momentum=0.9, nesterov=True)
        return tx.diloco(inner, _reduction(wire), every=period, outer=outer, **streaming)

    return Method(make, period, streaming.get("fragments", 1), f"DiLoCo, H = {period}")


METHODS: dict[str, Method] = {
    REFERENCE: Method(lambda inner, n, rate, wire: tx.fuse(_reduction(wire), inner)),
    "post-local SGD, H = 10": _post_local(10),
    "post-local SGD, H = 50": _post_local(50),
    "DiLoCo, H = 10": _diloco(10),
    "DiLoCo, H = 50": _diloco(50),
    "streaming, H = 50": _diloco(50, fragments=FRAGMENTS, delay=DELAY, mix=MIX),
}
WIRES: dict[str, tx.Codec | None] = {"float32": None, "int4": tx.int4()}


@functools.cache
def _batches(ranks: int) -> tuple[list[list[Batch]], list[Batch], list[Batch]]:
    """Those of each rank; text to choose rates by; text to report."""
    files = source_files(40_000 * ranks + 2 * HELD_OUT)
    loaders = [batches_of(files[rank:-8:ranks], CONTEXT, SEQUENCES) for rank in range(ranks)]
    whole = [[b for b in loader if len(b.inputs) == SEQUENCES] for loader in loaders]
    return whole, batches_of(files[-8:-4], CONTEXT, 64), batches_of(files[-4:], CONTEXT, 64)


def train(
    method: str, wire: str, args: argparse.Namespace, seeds: int, rates: tuple[float, ...], peak: float = INNER
) -> dict[str, Any]:
    """Outer rate -> the losses of all seeds, on text to choose the rate by and on text to report."""
    chosen, ranks, steps = METHODS[method], args.ranks, args.steps
    loaders, tuning, test = _batches(ranks)
    starts, inputs, targets, tokens, outer = [], [], [], [], []
    for rate, seed in itertools.product(rates, range(seeds)):
        torch.manual_seed(seed)
        apply, start, _ = fjoin.functional(Decoder(**MODEL))
        order = torch.Generator().manual_seed(seed)
        for batches in loaders:
            some = [batches[int(i)] for i in torch.randint(len(batches), (steps,), generator=order)]
            starts.append({path: p.detach() for path, p in start.items()})
            inputs.append(torch.stack([b.inputs for b in some]))
            targets.append(torch.stack([b.targets for b in some]))
            tokens.append(torch.tensor([float(b.tokens) for b in some]))
            outer.append(torch.tensor(rate))
    falling = tx.warmup_cosine(peak, warmup_steps=steps // 10, total_steps=steps)
    inner = tx.adamw(falling, betas=(0.9, 0.99))

    def loss_fn(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(apply(params, {}, x), Batch(x, y))

    def one_rank(params: Any, xs: Tensor, ys: Tensor, weights: Tensor, rate: Tensor) -> Any:
        pipeline = chosen.make(inner, steps, rate, WIRES[wire])
        state = pipeline.init(params)
        for step in range(steps):
            grads = torch.func.grad(loss_fn)(params, xs[step], ys[step])
            params, state = pipeline.step(params, grads, state, weight=weights[step])
        params, state = pipeline.flush(params, state)
        return tx.pmean(params, "data")

    axes = {"case": len(rates) * seeds, "data": ranks}
    ends = tx.simulate(one_rank, axes, starts, inputs, targets, tokens, outer)[::ranks]

    most = 2 if args.quick else None

    def loss(params: Any, held_out: list[Batch]) -> float:
        with torch.no_grad():
            losses = [(cross_entropy(apply(params, {}, b.inputs), b).item(), b.tokens) for b in held_out[:most]]
        return sum(x * n for x, n in losses) / sum(n for _, n in losses)

    of_rate = {str(rate): ends[i * seeds : (i + 1) * seeds] for i, rate in enumerate(rates)}
    return {
        rate: {"tuning": [loss(p, tuning) for p in some], "test": [loss(p, test) for p in some]}
        for rate, some in of_rate.items()
    }


def sent_bytes(method: str, wire: str, args: argparse.Namespace) -> tuple[float, float, int]:
    """The bytes that a rank sends per step, as the mean over a late period and over the run, and at most in a step."""
    torch.manual_seed(0)
    _, start, _ = fjoin.functional(Decoder(**MODEL))
    chosen = METHODS[method]
    pipeline = chosen.make(tx.adamw(1e-3), args.steps, 0.7, WIRES[wire])
    warmup = args.steps // WARMUP if method.startswith("post") else 0

    def sent(step: int) -> int:
        return tx.explain(pipeline, start, {"data": args.ranks}, bucket_bytes=10**9, at_step=step).sent_bytes

    # Messages begin at the ends of the fragments' periods, counted from the end of the warm-up, or at its first step.
    due = [(i + 1) * chosen.period // chosen.fragments - 1 for i in range(chosen.fragments)] if not warmup else [warmup]
    at = [sent(step) for step in due]
    others = sent(due[0] + 1) * (chosen.period - len(at)) if len(at) < chosen.period else 0
    late = (sum(at) + others) / chosen.period
    return late, (sent(0) * warmup + late * (args.steps - warmup)) / args.steps, max(at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--only", nargs="+", default=[*METHODS], metavar="METHOD")
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("build/local_sgd_quality.json"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/RESULTS_LOCAL_SGD.md"))
    parser.add_argument("--quick", action="store_true", help="2 ranks, 1 seed, few steps: a test of the script")
    parser.add_argument("--inner", type=float, nargs="+", help=f"try these rates with the {REFERENCE}, and end")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.seeds, args.steps, args.only = 2, 1, 6, [REFERENCE, *args.only[-1:]]
    torch.set_num_threads(1)
    for peak in args.inner or ():
        print(peak, train(REFERENCE, "float32", args, 1, (1.0,), peak)["1.0"]["tuning"], flush=True)
    if args.inner:
        return
    args.runs.parent.mkdir(parents=True, exist_ok=True)
    runs = json.loads(args.runs.read_text()) if args.runs.exists() else {}

    def run(key: str, method: str, wire: str, seeds: int, rates: tuple[float, ...]) -> Any:
        if key not in runs:
            start = time.perf_counter()
            runs[key] = {"losses": train(method, wire, args, seeds, rates)}
            if not key.startswith("tuning"):
                runs[key]["sent"] = sent_bytes(method, wire, args)
            runs[key]["seconds"] = time.perf_counter() - start
            args.runs.write_text(json.dumps(runs, indent=1))
            print(f"{key}: {runs[key]['losses']}, {runs[key]['seconds']:.1f} s", flush=True)
        return runs[key]

    for wire, method in itertools.product(WIRES, args.only):
        rate = 1.0
        if of := METHODS[method].rate_of:
            found = run(_key("tuning", of, args), of, "float32", 1, OUTER)["losses"]
            rate = min(OUTER, key=lambda one: found[str(one)]["tuning"][0])
        run(_key(method, wire, args), method, wire, args.seeds, (rate,))
    write(runs, args)


def _key(method: str, wire: str, args: argparse.Namespace) -> str:
    return f"{method}|{wire}|{args.ranks}|{args.seeds}|{args.steps}{'|quick' * args.quick}"


def _result(run: dict[str, Any]) -> tuple[str, list[float]]:
    """The outer rate, and the losses of the seeds."""
    [(rate, losses)] = run["losses"].items()
    return rate, losses["test"]


def write(runs: dict[str, Any], args: argparse.Namespace) -> None:
    size = sum(p.numel() for p in Decoder(**MODEL).parameters())
    shown = [(m, w, run) for m in METHODS for w in WIRES if (run := runs.get(_key(m, w, args)))]
    minutes = sum(run["seconds"] for _, _, run in shown) / 60
    command = f"python benchmarks/local_sgd_quality.py --ranks {args.ranks} --seeds {args.seeds} --steps {args.steps}"
    lines = [
        "# Local SGD at equal tokens",
        "",
        f"`{command}`, torch {torch.__version__},",
        f"fjoin {importlib.metadata.version('fjoin')}; {minutes:.0f} minutes of one busy core.",
        "",
        f"The demo's transformer with {size:,} parameters, on {args.ranks} simulated ranks with files of their own, {SEQUENCES} "
        f"sequences of {CONTEXT} bytes",
        f"per rank and step, weighted by tokens, {args.steps} steps. Loss: nats per byte of the mean of the ranks' parameters, on "
        "text that no rank",
        f"has seen: the mean of {args.seeds} seeds and their spread. `above`: above the {REFERENCE} in float32.",
        "",
        *SETTING,
        "",
        *(() if args.quick else FINDINGS),
        "",
        "![loss against bytes](local_sgd.png)",
        "",
        "| method | wire | outer rate | bytes per step | fewer | most in a step | fewer in the run | loss | spread | above |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    base, floor = shown[0][2]["sent"][0], statistics.mean(_result(shown[0][2])[1])
    points = []
    for method, wire, run in shown:
        (rate, losses), (late, whole, most) = _result(run), run["sent"]
        mean, spread = statistics.mean(losses), max(losses) - min(losses)
        points.append((f"{method}, {wire}", late, mean, spread))
        lines.append(
            f"| {method} | {wire} | {rate if METHODS[method].rate_of else '-'} | {late:,.0f} | {base / late:.3g} x | {most:,} | "
            f"{base / whole:.3g} x | {mean:.3f} | {spread:.3f} | {100 * (mean / floor - 1):+.1f} % |"
        )
    lines += ["", "## Outer rates", "", "Loss of one seed on the text for choosing, in float32.", ""]
    lines += ["| method | " + " | ".join(map(str, OUTER)) + " |", "|---|" + "---|" * len(OUTER)]
    for method in sorted({METHODS[m].rate_of for m, _, _ in shown} - {""}):
        found = runs[_key("tuning", method, args)]["losses"]
        cells = [f"{found[str(rate)]['tuning'][0]:.3f}" for rate in OUTER]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    args.out.write_text("\n".join(lines) + "\n")
    picture(points, args.out.parent / "local_sgd.png")


SETTING = (
    f"Inner: AdamW, betas 0.9 and 0.99, peak rate {INNER:g}, warm-up and cosine. The rate was chosen for the {REFERENCE}",
    "(of 0.005, 0.01 and 0.02, one seed, 400 steps) and is the same for all. Outer: SGD with Nesterov momentum 0.9 (DiLoCo,",
    f"streaming); its rate was chosen for each H on other text. Streaming: {FRAGMENTS} fragments, delay {DELAY}, mix {MIX:g}.",
    "Post-local SGD has the mean of gradients for the first tenth of the steps. int4: with error feedback.",
    "",
    "Bytes: those that a rank sends by a ring, as `tx.explain` says, in one bucket, with the step's own counts: the mean over one",
    "period, after a warm-up. `most in a step`: the largest step of the period. `fewer in the run`: with the warm-up.",
)
FINDINGS = (
    "Result, against the goal of 1.5 % above the mean of gradients at 1/300 of the bytes:",
    "",
    "- H = 50 with int4 sends 1/308 to 1/314 of the bytes (post-local SGD: 1/59 with its warm-up). The loss is 8.7 % above with",
    "  post-local SGD, 9.4 % with streaming, 15.5 % with DiLoCo. The goal for the loss is missed by all, with H = 10 too. A run has",
    "  10 outer steps at H = 50. Runs of 2,000 steps (`--steps 2000`) are no nearer: post-local SGD with H = 50 is 10.3 % above, in",
    "  float32 and in int4; with one seed, inner rates of 0.005 and 0.0025 are worse than 0.01.",
    "- int4 with error feedback costs nothing that these seeds can show: each method is within 1 % of its own float32 run.",
    "- At H = 50 streaming has a smaller loss than DiLoCo, 7 % in float32, and its largest message is 1/3.6 of the largest.",
    "- Post-local SGD has a smaller loss than DiLoCo for both H. It differs in two things, the warm-up and the plain average; which",
    "  of them matters was not tried. The outer rates were chosen with one seed, whose loss at H = 50 is the best of the three. An",
    "  inner rate for each method, other outer momenta, and DiLoCo after the same warm-up were not tried either.",
)


def picture(points: list[tuple[str, float, float, float]], file: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 6), layout="constrained")
    for name, sent, mean, spread in points:
        axes.errorbar(sent, mean, spread / 2, fmt="s" if "int4" in name else "o", markersize=4, linewidth=1)
        axes.annotate(
            name, (sent, mean), textcoords="offset points", xytext=(5, 4 if "streaming" in name else -8), fontsize=7
        )
    axes.set(xscale="log", xlabel="bytes sent per step", ylabel="loss, nats per byte")
    axes.set_xlim(right=axes.get_xlim()[1] * 3)
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    main()
