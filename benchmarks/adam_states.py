"""What to do with Adam's states in local SGD: kept, averaged, averaged with own periods, or reset.

OMP_NUM_THREADS=1 python benchmarks/adam_states.py

Each run is one `tx.simulate` with engine="vmap" over two axes: cases (seeds, learning rates, equal and different data)
and ranks. Finished runs are kept in --runs and not repeated; the page and the picture are written to the folder of --out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fjoin import transforms as tx

KINDS = {"iid": 0.0, "non-iid": 1.0}  # the factor of the differences between the ranks
DATA = 1  # where the random numbers start, of the data and the noise


class Problem(NamedTuple):
    title: str
    steps: int  # a multiple of the periods
    periods: tuple[int, ...]
    rates: tuple[float, ...]
    start: tuple[float, ...]
    data: Callable[[int, Tensor], tuple[Tensor, Tensor]]  # (ranks, factors [cases]) -> two tensors [cases, ranks, size]
    grad: Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, the two) -> a noisy gradient of this rank
    loss: Callable[
        [Tensor, Tensor, Tensor], Tensor
    ]  # (x, the two) -> the exact mean loss over all ranks above its least


def _tilts(ranks: int, factors: Tensor) -> tuple[Tensor, Tensor]:
    """A linear term for each rank; their sum over the ranks is 0."""
    tilts = 1.5 * torch.randn(len(factors), ranks, 2)
    return factors[:, None, None] * (tilts - tilts.mean(1, keepdim=True)), torch.zeros(len(factors), ranks, 1)


def _rosenbrock_grad(x: Tensor, tilt: Tensor, _: Tensor) -> Tensor:
    a, b = x
    exact = torch.stack([-2 * (1 - a) - 400 * a * (b - a * a), 200 * (b - a * a)])
    return exact + tilt + 1.5 * torch.randn(2)


def _rosenbrock(x: Tensor, *_: Tensor) -> Tensor:
    a, b = x
    return (1 - a) ** 2 + 100 * (b - a * a) ** 2


def _regressions(ranks: int, factors: Tensor) -> tuple[Tensor, Tensor]:
    """The variances of each rank's features, and its coefficients."""
    size, factor = len(SQUARES.start), factors[:, None, None]
    shared = torch.randn(len(factors), 1, size)
    variances = torch.logspace(-1, 1, size) * torch.exp(factor * torch.randn(len(factors), ranks, size))
    return variances, shared + factor * torch.randn(len(factors), ranks, size)


def _squares_grad(x: Tensor, variances: Tensor, coefficients: Tensor) -> Tensor:
    features = variances.sqrt() * torch.randn(x.shape)
    return features * ((features * (x - coefficients)).sum() - 0.5 * torch.randn(()))


def _squares(x: Tensor, variances: Tensor, coefficients: Tensor) -> Tensor:
    total = tx.psum(variances, "data")
    best = tx.psum(variances * coefficients, "data") / total
    return 0.5 * (total / tx.axis_size("data") * (x - best) ** 2).sum()


ROSENBROCK = Problem(
    "Rosenbrock's function", 5760, (16, 192), (3e-3, 1e-2, 3e-2), (-1.2, 1.0), _tilts, _rosenbrock_grad, _rosenbrock
)
SQUARES = Problem(
    "Least squares", 2880, (16, 192), (3e-3, 1e-2, 3e-2), (0.0,) * 5, _regressions, _squares_grad, _squares
)
PROBLEMS = {"rosenbrock": ROSENBROCK, "squares": SQUARES}


def _reset_all(optimizer: tx.Optimizer) -> tx.Transform:
    """Resets the step count too, so that the bias correction starts anew."""

    def update(values: Any, state: Any, params: Any = None, **_: Any) -> Any:
        return optree.tree_map(torch.zeros_like, values), state

    assert optimizer.spec.name == "adam"  # its state starts with zeros
    return tx.Transform(lambda params: (), update, tx.Needs.LEAVES)


def pipeline(policy: str, period: int, rate: Any) -> tx.Pipeline:
    adam = tx.adam(rate)
    if policy == "mean of gradients":
        return tx.fuse(tx.mean("data"), adam)
    if policy == "reset, and its count":
        average = tx.every(period, tx.average_parameters("data"))
        return tx.fuse(tx.noop(), adam, average, tx.every(period, _reset_all(adam)))
    own = {"exp_avg": 3 * period, "exp_avg_sq": 6 * period}
    states: dict[str, Any] = {"kept": "keep", "averaged": "average", "own periods": own, "reset": "reset"}
    return tx.local_sgd(adam, "data", every=period, state=states[policy])


# The policy, and the values that it sends at an average, per parameter.
POLICIES = {"kept": 1.0, "averaged": 3.0, "own periods": 1.5, "reset": 1.0, "reset, and its count": 1.0}


def train(name: str, policy: str, period: int, ranks: int, seeds: int) -> dict[str, Any]:
    """Kind, rate -> the loss at the averages, for each seed."""
    problem = PROBLEMS[name]
    cases = list(itertools.product(KINDS, problem.rates, range(seeds)))
    torch.manual_seed(DATA)
    one, two = problem.data(ranks, torch.tensor([KINDS[kind] for kind, _, _ in cases]))
    rates = torch.tensor([rate for _, rate, _ in cases]).repeat_interleave(ranks)

    def one_rank(rate: Tensor, one: Tensor, two: Tensor) -> Tensor:
        steps_of = pipeline(policy, period, rate)
        params = {"x": torch.tensor(problem.start) + 0 * rate}
        state, losses = steps_of.init(params), []
        for step in range(problem.steps):
            params, state = steps_of.step(params, {"x": problem.grad(params["x"], one, two)}, state)
            if (step + 1) % period == 0:
                losses.append(problem.loss(params["x"], one, two))
        return torch.stack(losses)

    axes = {"case": len(cases), "data": ranks}
    curves = tx.simulate(one_rank, axes, list(rates), list(one.flatten(0, 1)), list(two.flatten(0, 1)), engine="vmap")
    out: dict[str, Any] = {}
    for (kind, rate, _), curve in zip(cases, curves[::ranks], strict=True):
        last = curve[-max(len(curve) // 5, 1) :].mean().item()
        apart = max(len(curve) // 25, 1)
        thinned = curve[apart - 1 :: apart].tolist()
        one_case = out.setdefault(f"{kind}|{rate}", {"last": [], "curves": []})
        one_case["last"].append(last)
        one_case["curves"].append(thinned)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("build/adam_states.json"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/RESULTS_ADAM_STATES.md"))
    parser.add_argument("--quick", action="store_true", help="8 ranks, 2 seeds, few steps: a test of the script")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.seeds = 8, 2
        PROBLEMS.update({name: some._replace(steps=48, periods=(16, 24)) for name, some in PROBLEMS.items()})
    torch.set_num_threads(1)
    args.runs.parent.mkdir(parents=True, exist_ok=True)
    runs = json.loads(args.runs.read_text()) if args.runs.exists() else {}
    for name, problem in PROBLEMS.items():
        some = [(policy, period) for period in problem.periods for policy in POLICIES]
        for policy, period in [("mean of gradients", 16), *some]:
            key = _key(name, policy, period, args)
            if key not in runs:
                start = time.perf_counter()
                runs[key] = train(name, policy, period, args.ranks, args.seeds)
                runs[key]["seconds"] = time.perf_counter() - start
                args.runs.write_text(json.dumps(runs))
                print(f"{key}: {runs[key]['seconds']:.1f} s", flush=True)
    write(runs, args)


def _key(name: str, policy: str, period: int, args: argparse.Namespace) -> str:
    return f"{name}|{policy}|{period}|{args.ranks}|{args.seeds}{'|quick' * args.quick}"


def write(runs: dict[str, Any], args: argparse.Namespace) -> None:
    seconds = sum(
        runs[_key(name, policy, period, args)]["seconds"]
        for name, problem in PROBLEMS.items()
        for policy, period in [("mean of gradients", 16), *itertools.product(POLICIES, problem.periods)]
    )
    command = f"python benchmarks/adam_states.py --ranks {args.ranks} --seeds {args.seeds}{' --quick' * args.quick}"
    lines = [
        "# Adam's states in local SGD",
        "",
        f"`{command}`, torch {torch.__version__}, fjoin {importlib.metadata.version('fjoin')}; {seconds / 60:.0f} minutes on "
        "one busy core.",
        "",
        *QUESTION,
        "",
        f"Setting: {args.ranks} ranks, Adam with betas 0.9 and 0.999, {args.seeds} seeds, each with noise and data of its own,",
        "which are the same for all policies. H = 1 is Adam on the mean of the gradients. " + FIGURES,
        "",
        *(() if args.quick else FINDINGS),
        "",
        "![loss over steps](adam_states.png)",
    ]
    for name, problem in PROBLEMS.items():
        lines += ["", f"## {problem.title}", "", f"{ABOUT[name]} {problem.steps} steps.", ""]
        for kind in KINDS:
            head = " | ".join(f"rate {rate:g}" for rate in problem.rates)
            lines += [f"{kind}:", "", f"| H | states | sent | {head} |", "|" + "---|" * (3 + len(problem.rates))]
            rows = [("1", "mean of gradients", 16, 1.0)]
            rows += [(str(h), policy, h, sent) for h in problem.periods for policy, sent in POLICIES.items()]
            for shown, policy, period, sent in rows:
                run = runs[_key(name, policy, period, args)]
                cells = [_cell(run[f"{kind}|{rate}"]["last"]) for rate in problem.rates]
                lines.append(f"| {shown} | {policy} | {sent:g} | " + " | ".join(cells) + " |")
            lines.append("")
        lines.pop()
    args.out.write_text("\n".join(lines) + "\n")
    picture(runs, args)


QUESTION = (
    "In local SGD the ranks' parameters are averaged once in H steps. Adam has two states of its own on each rank: should they be",
    "kept, averaged too, averaged with longer periods (3 H for exp_avg, 6 H for exp_avg_sq, as DES-LOC advises, arXiv:2505.22549),",
    "or reset? `tx.local_sgd(adam, axis, every=H, state=...)` has these four. Its reset keeps Adam's step count, so the bias",
    "correction does not begin anew; `reset, and its count` sets the count to 0 too, as a new optimizer has it.",
)
FIGURES = (
    "A cell has the loss of the\naveraged parameters above its least value, as the mean over the averages "
    "in the last fifth of the steps: the median of the\nseeds, and in brackets the smallest and the largest. `sent`: values sent "
    "at an average, per parameter. With H = 192 and own\nperiods exp_avg_sq is averaged 5 times in the run on Rosenbrock's function, "
    "and twice in the one on least squares."
)
FINDINGS = (
    "Result:",
    "",
    "- On iid data it does not matter whether the states are kept, averaged or averaged with own periods: the medians are within",
    "  5 % of each other in all 12 settings. That local states fail, as DES-LOC reports of Rosenbrock's function with 256 workers,",
    "  is not seen in these settings.",
    "- On non-iid data with H = 16 averages help at rates 0.01 and 0.03, in each of the 10 seeds: the median loss is 3.7 to 4.5",
    "  times smaller than with kept states on Rosenbrock's function, 16 to 18 times on least squares. Own periods give 8 to 10 times",
    "  on least squares, and nothing (within 7 %) on Rosenbrock's function. With H = 192 the medians of averages and own periods are",
    "  0 to 5 % from that of kept states on Rosenbrock's function; on least squares they are 10 % to 29 % smaller, with the seeds",
    "  divided (at best 7 of 10).",
    "- On iid data a reset makes the loss 2.7 to 5200 times that of kept states at the two larger rates. It keeps the step count, so",
    "  the bias correction is off after it, and Adam's first step is 3.2 times too long. With the count reset too, the factor is 1.7",
    "  to 500 for H = 16, and 0.34 to 1.4 for H = 192. At the smallest rate, where the others have not converged, both resets have",
    "  a smaller loss than kept states in 7 of 8 settings, down to 1/90: their longer steps speed up the start. On non-iid data the",
    "  factors are 0.02 to 130 for one reset, and 0.05 to 130 for the other.",
)
ABOUT = {
    "rosenbrock": "f(a, b) = (1 - a)^2 + 100 (b - a^2)^2 from (-1.2, 1); each gradient has Gaussian noise of 1.5. Non-iid: each "
    "rank\nhas a linear term in addition, Gaussian of 1.5; their sum over the ranks is 0, so the mean loss is f.",
    "squares": "Five features of variance 0.1 to 10, one sample per rank and step, label noise 0.5, from 0. Non-iid: each rank "
    "has\ncoefficients (Gaussian of 1) and variances of features (factors exp(N(0, 1))) of its own.",
}


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.2g} ({min(values):.2g}-{max(values):.2g})"


def picture(runs: dict[str, Any], args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 4, figsize=(18, 8), layout="constrained")
    for row, (name, problem) in zip(panels, PROBLEMS.items(), strict=True):
        rate = problem.rates[1]
        for axes, (kind, period) in zip(row, itertools.product(KINDS, problem.periods), strict=True):
            for policy in ("mean of gradients", *POLICIES):
                run = runs[_key(name, policy, 16 if policy == "mean of gradients" else period, args)]
                curves = run[f"{kind}|{rate}"]["curves"]
                median = [statistics.median(values) for values in zip(*curves, strict=True)]
                steps = [(i + 1) * problem.steps / len(median) for i in range(len(median))]
                dotted = ":" if policy == "mean of gradients" else "-"
                axes.plot(steps, median, dotted, label=policy, linewidth=1.2)
            axes.set(yscale="log", title=f"{problem.title}, {kind}, H = {period}, rate {rate:g}", xlabel="steps")
    panels[0][0].set_ylabel("loss above its least")
    panels[0][0].legend(fontsize=8)
    figure.savefig(args.out.parent / "adam_states.png", dpi=80)


if __name__ == "__main__":
    main()
