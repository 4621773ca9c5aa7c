"""The results as a Markdown page."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from importlib.metadata import version
from typing import Any, NamedTuple

NOTES = "## What bounds the missed targets"
CONTROL_WITHIN = 0.03
Groups = dict[str, dict[str, Any]]
TITLES = {
    "host gpt149": "149 tensors of a transformer, bound by the host",
    "host res161": "161 tensors of a residual net, half of them buffers, bound by the host",
    "tiny": "tiny MLP",
    "1m": "1M MLP",
    "10m": "10M transformer",
    "50m": "50M MLP, large tensors",
    "shared tiny": "tiny MLP, one host",
    "shared 1m": "1M MLP, one host",
    "shared 10m": "10M transformer, one host",
    "shared 50m": "50M MLP, one host",
    "four 1m": "1M MLP, 4 ranks on one host",
    "four 10m": "10M transformer, 4 ranks on one host",
    "join": "10M transformer, epochs of 14 against 10 batches",
    "step 1m": "1M MLP, optimizer alone",
    "step 10m": "10M transformer, optimizer alone",
    "step 50m": "50M MLP, optimizer alone",
    "link": "10M transformer at 1 Gbit/s",
    "wire": "10M transformer at 1 Gbit/s",
    "slow wire": "10M transformer at 100 Mbit/s",
    "two hosts": "10M transformer on two hosts at 1 Gbit/s",
    "two far hosts": "10M transformer on two hosts at 1 Gbit/s, 10 ms there and back",
    "local": "10M transformer, local SGD with period 4",
    "slow local": "10M transformer at 100 Mbit/s, local SGD with period 4",
    "zero": "10M transformer, ZeRO",
    "zero 50m": "50M MLP, ZeRO",
    "slow zero": "10M transformer at 1 Gbit/s, ZeRO",
    "power": "10M transformer at 1 Gbit/s, PowerSGD of rank 4",
    "slow power": "10M transformer at 100 Mbit/s, PowerSGD of rank 4",
}


# Variant -> the loop written by hand that does the same.
BY_HAND = {
    "ours": "hand",
    "ddp our hook": "hand registered",
    "donate": "hand donate",
    "pure": "hand pure",
    "pure value_and_grad": "hand pure autograd",
}
BY_HAND |= {
    f"shared {name}".replace("shared ours", "shared").replace("shared ddp", "shared"): f"shared {hand}"
    for name, hand in BY_HAND.items()
}


LINKS = ("link", "wire", "two hosts", "two far hosts", "slow wire", "slow local", "slow zero", "power", "slow power")


class Row(NamedTuple):
    """One claim: the time of `what` over that of `base` in the same round: of the wall's clock, or "cpu"."""

    text: str
    group: str
    what: str
    base: str
    target: float | None = None
    clock: str = "wall"


ROWS = [
    *(
        Row(f"{text} / DDP, CPU", f"host {model}", what, "ddp", target, "cpu")
        for text, what, target in (
            ("fjoin", "ours", 0.90),
            ("fjoin in a join", "ours join", 0.93),
            ("fjoin.ddp.register", "ddp our hook", 1.00),
            ("a loop of one's own, donate", "donate", 1.12),
            ("fjoin.value_and_grad and the pure pipeline", "pure value_and_grad", 1.30),
            ("torch.func.grad_and_value and the pure pipeline", "pure", None),
            ("ZeRO", "ours zero", 1.00),
            ("int8 with error feedback", "ours int8 fed back", 1.10),
        )
        for model in ("gpt149", "res161")
    ),
    Row("fjoin / DDP", "tiny", "ours", "ddp", 0.85),
    Row("fjoin / DDP", "1m", "ours", "ddp", 0.98),
    Row("fjoin / bound", "1m", "ours", "bound", 1.15),
    Row("fjoin / DDP", "10m", "ours", "ddp", 0.99),
    Row("fjoin / bound", "10m", "ours", "bound", 1.06),
    Row("fjoin / DDP", "50m", "ours", "ddp", 0.97),
    Row("fjoin / bound", "50m", "ours", "bound", 1.03),
    *(
        Row(text, f"shared {model}", what, "ddp", target)
        for text, what, targets in (
            ("fjoin over gloo / DDP", "ours", (0.75, 1.00, 1.00, 0.97)),
            ("fjoin in shared memory / DDP", "shared", (0.50, 0.70, 0.88, 0.76)),
            ("fjoin in shared memory, ZeRO / DDP", "shared zero", (None, 0.69, 0.83, 0.69)),
            ("fjoin.ddp.register over gloo / DDP", "ddp our hook", (0.80, 1.02, 1.00, 1.00)),
            ("fjoin.ddp.register in shared memory / DDP", "shared our hook", (1.05, 1.00, 1.00, 1.00)),
            ("a loop of one's own, donate, over gloo / DDP", "donate", (0.75, 1.02, 1.02, 1.05)),
            ("a loop of one's own, donate, in shared memory / DDP", "shared donate", (0.50, 0.76, 0.94, 1.05)),
            ("torch.func.grad and the pure pipeline, in shared memory / DDP", "shared pure", (0.85, 1.08, 1.20, None)),
        )
        for model, target in zip(("tiny", "1m", "10m", "50m"), targets, strict=True)
    ),
    *(
        Row(text, f"four {model}", what, "ddp", target)
        for text, what, targets in (
            ("fjoin over gloo / DDP", "ours", (None, None)),
            ("fjoin in shared memory / DDP", "shared", (0.80, 0.88)),
            ("fjoin in shared memory, ZeRO / DDP", "shared zero", (None, None)),
        )
        for model, target in zip(("1m", "10m"), targets, strict=True)
    ),
    Row("fjoin / DDP as it comes", "link", "ours", "ddp", 0.80),
    Row("fjoin / DDP with its best bucket size", "link", "ours", "ddp best", 0.97),
    Row("fjoin / bound", "link", "ours", "bound", 1.25),
    Row("bfloat16 / DDP in float32", "wire", "ours bf16", "ddp", 0.75),
    Row("bfloat16 / DDP with torch's bf16 hook", "wire", "ours bf16", "ddp bf16", 0.92),
    Row("bfloat16 / DDP with torch's bf16 hook, buckets of 5 MB", "wire", "ours bf16", "ddp bf16 5"),
    Row("int8 / bfloat16", "wire", "ours int8", "ours bf16"),
    *(
        Row(f"{text} / DDP", group, what, "ddp")
        for group in ("two hosts", "two far hosts")
        for text, what in (("fjoin", "ours"), ("int8", "ours int8"), ("DiLoCo with period 4", "ours diloco"))
    ),
    Row("bfloat16 / DDP in float32", "slow wire", "ours bf16", "ddp"),
    Row("bfloat16 / DDP with torch's bf16 hook", "slow wire", "ours bf16", "ddp bf16"),
    Row("int8 / bfloat16", "slow wire", "ours int8", "ours bf16", 0.65),
    Row("int8 with error feedback / int8", "slow wire", "ours int8 fed back", "ours int8"),
    Row("int4 / int8", "slow wire", "ours int4", "ours int8"),
    *(
        Row(text, group, what, base, target)
        for group in ("power", "slow power")
        for text, what, base, target in (
            ("PowerSGD with error feedback / DDP with torch's powerSGD_hook", "ours power", "ddp power", 0.80),
            ("the same / that in batches of equal shapes", "ours power", "ddp power batched", None),
            ("PowerSGD with error feedback / DDP in float32", "ours power", "ddp", None),
            ("the same / in buckets of 5 MiB", "ours power", "ours power 5", None),
            ("PowerSGD in bfloat16 / PowerSGD", "ours power bf16", "ours power", None),
        )
    ),
    Row("local SGD / DDP with torch's PostLocalSGDOptimizer", "local", "ours local", "ddp local", 0.95),
    Row("DDP with fjoin's PostLocalSGDOptimizer / DDP with torch's", "local", "ddp our local", "ddp local", 1.00),
    Row("DDP with torch's PostLocalSGDOptimizer / DDP", "local", "ddp local", "ddp"),
    Row("local SGD / DDP", "slow local", "ours local", "ddp", 0.35),
    Row("DDP with torch's PostLocalSGDOptimizer / DDP", "slow local", "ddp local", "ddp"),
    *(
        Row(text, group, what, base, target)
        for group, of_ddp, of_zero in (("zero", 0.97, 0.90), ("zero 50m", 0.97, 0.90), ("slow zero", None, 0.75))
        for text, what, base, target in (
            ("zero / DDP", "ours zero", "ddp", of_ddp),
            ("zero / DDP with torch's ZeroRedundancyOptimizer", "ours zero", "ddp zero", of_zero),
            ("zero / fjoin without it", "ours zero", "ours", None),
            ("DDP with torch's ZeroRedundancyOptimizer / DDP", "ddp zero", "ddp", None),
            ("DDP with fjoin's ZeroRedundancyOptimizer / DDP with torch's", "ddp our zero", "ddp zero", None),
            ("DDP with fjoin's hook_with_zero_step / DDP with torch's class", "ddp our zero hook", "ddp zero", None),
        )
    ),
    Row("fjoin in join, even inputs / fjoin without join", "tiny", "ours join", "ours", 1.02),
    Row("fjoin in join, even inputs / fjoin without join", "1m", "ours join", "ours", 1.02),
    Row("fjoin in join, 14 against 10 batches / fjoin without join", "tiny", "ours join uneven", "ours"),
    Row("fjoin in join, 14 against 10 batches / DDP in torch's Join", "tiny", "ours join uneven", "ddp join", 0.65),
    Row("DDP and its optimizer in fjoin's Join / DDP in torch's Join", "tiny", "ddp our join", "ddp join", 0.90),
    Row("DDP and its optimizer in fjoin's Join / DDP in torch's Join", "join", "ddp our join", "ddp join"),
    Row("fjoin in join / DDP in torch's Join", "join", "ours join uneven", "ddp join"),
    Row("fused AdamW / DDP's _hook_then_optimizer", "10m", "ours", "ddp fused hook", 0.82),
    Row("DDP with fjoin's pipeline as its hook / DDP", "10m", "ddp our hook", "ddp", 1.00),
    Row(
        "DDP with fjoin's pipeline as its hook / DDP's _hook_then_optimizer",
        "10m",
        "ddp our hook",
        "ddp fused hook",
        0.95,
    ),
    *(
        Row(
            f"{kind}, {text}",
            f"step {model}",
            f"O {name}{what}".strip(),
            f"O {name}{base}".strip(),
            target and target(model),
        )
        for model in ("1m", "10m", "50m")
        for kind, name in (("AdamW", ""), ("SGD momentum", "sgd "))
        for text, what, base, target in (
            ("flat / torch's fused", "flat", "", lambda model: 0.95 if model == "10m" else None),
            ("flat / torch's foreach", "flat", "foreach", None),
            ("flat / torch's step_param loop", "flat", "loop", lambda model: 0.60 if model == "10m" else None),
            ("fjoin.Optimizer / torch's fused", "list", "", None),
        )
    ),
    *(
        Row(f"AdamW, {text} / torch's foreach", f"step {model}", f"O {what}", "O foreach")
        for model in ("1m", "10m")
        for text, what in (("from_optax", "optax"), ("from_optax, one flat tensor", "optax flat"))
    ),
    *(
        Row(f"fjoin / DDP{text}", model, ours, theirs)
        for model in ("1m", "10m", "50m")
        for text, ours, theirs in (
            (", SGD momentum", "ours sgd", "ddp sgd"),
            (" with foreach AdamW", "ours", "ddp foreach"),
        )
    ),
    Row("pure reference path / DDP", "1m", "pure", "ddp"),
    Row("pure reference path / DDP", "10m", "pure", "ddp"),
]


def bounded(name: str, group: dict[str, Any]) -> dict[str, Any]:
    """The group with two derived series: the lower bound, and DDP with its best bucket size."""
    wall, cpu = dict(group["wall"]), dict(group["cpu"])
    if {"C", "M", "O"} <= wall.keys():
        rows = zip(wall["C"], wall["M"], wall["O"], strict=True)
        # Over loopback messages keep the processors busy and overlap with nothing; over a link they can overlap wholly.
        wall["bound"] = [max(c + o, m) if name in LINKS else c + m + o for c, m, o in rows]
    sizes = [v for v in wall if v in ("ddp", "ddp 5", "ddp 10")]
    if len(sizes) > 1:
        best = min(sizes, key=lambda v: statistics.median(wall[v]))
        wall["ddp best"], cpu["ddp best"] = wall[best], cpu[best]
    return {**group, "wall": wall, "cpu": cpu}


def ratio(series: dict[str, list[float]], what: str, base: str) -> tuple[float, float, float]:
    """(first quartile, median, third quartile) of the ratio per round."""
    values = [a / b for a, b in zip(series[what], series[base], strict=True)]
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return q1, median, q3


def judge(median: float, target: float | None, control: float) -> str:
    if target is None:
        return "no target"
    if abs(control - 1) > CONTROL_WITHIN:
        return f"not judged: control at {control:.3f}"
    return "met" if median <= target else "**missed**"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def shown(value: tuple[float, float, float]) -> str:
    return f"{value[1]:.3f} [{value[0]:.3f}, {value[2]:.3f}]"


def claims(groups: Groups, memory: dict[str, Any]) -> list[str]:
    rows = []
    for row in ROWS:
        if row.group not in groups:
            continue
        wall = groups[row.group][row.clock]
        if not {row.what, row.base} <= wall.keys():
            continue
        value, control = ratio(wall, row.what, row.base), ratio(wall, "ddp again", "ddp")[1]
        target = "" if row.target is None else f"<= {row.target:.2f}"
        hand = BY_HAND.get(row.what)
        by_hand = (
            [f"{ratio(wall, one, base)[1]:.2f}" for one, base in ((hand, row.base), (row.what, hand))]
            if hand in wall
            else ["", ""]
        )
        text = f"{TITLES[row.group]}: {row.text}"
        rows.append([text, shown(value), *by_hand, target, judge(value[1], row.target, control)])
    for model, found in memory.items():
        for variant in found:
            value = found[variant]["peak"] / found["ddp"]["peak"]
            if variant != "ddp":
                text = f"{TITLES[model]}: peak memory, {variant} / DDP"
                rows.append([text, f"{value:.3f}", "", "", "<= 1.00", judge(value, 1.0, 1.0)])
    return table(["case", "measured: median [q1, q3]", "by hand", "of by hand", "target", "judged"], rows)


def bounds(groups: Groups) -> list[str]:
    rows = []
    for name, group in groups.items():
        wall = group["wall"]
        if "bound" in wall:
            pieces = [f"{statistics.median(wall[piece]) * 1e3:.3g}" for piece in ("C", "M", "O", "bound")]
            rows.append([TITLES[name], *pieces, *(shown(ratio(wall, v, "bound")) for v in ("ddp", "ours"))])
    if not rows:
        return []
    head = ["model", "C ms", "M ms", "O ms", "bound ms", "DDP / bound", "fjoin / bound"]
    return ["## Lower bounds", "", BOUNDS, "", *table(head, rows)]


def variants(groups: Groups) -> list[str]:
    lines = []
    for name, group in groups.items():
        wall, cpu = group["wall"], group["cpu"]
        rounds, steps = len(wall["ddp"]), group["steps"]
        lines += [f"**{TITLES[name]}**: {group['parameters']:,} parameters, {rounds} rounds of {steps} steps", ""]
        rows = [
            [
                variant,
                f"{statistics.median(wall[variant]) * 1e3:.3f}",
                f"{statistics.median(cpu[variant]) * 1e3 / group['ranks']:.3f}",
                shown(ratio(wall, variant, "ddp")),
                shown(ratio(cpu, variant, "ddp")),
            ]
            for variant in cpu
            if variant != "ddp best"
        ]
        lines += table(["variant", "wall ms", "CPU ms per rank", "wall / DDP", "CPU / DDP"], rows)
    return lines


INTRODUCTION = (
    "Two processes, or four where it says so, gloo or shared memory where it says so, one thread each, AdamW. Variants "
    "are interleaved: each round runs every variant once, in "
    "shuffled order, after a barrier. A time is that of the slower rank, a ratio is taken within a round. DDP stands "
    "for DistributedDataParallel(gradient_as_bucket_view=True) with the fused AdamW. A second, identical DDP is the "
    f"control: a row is judged only where its median ratio is within {CONTROL_WITHIN:.0%} of 1. By hand: the same ratio of a loop "
    "written by hand in plain torch with the same semantics (`benchmarks/floors.py`), and what fjoin takes of its time."
)
BOUNDS = (
    "C: forward and backward without messages. M: all gradients all-reduced back to back. O: the fused AdamW alone. "
    "Over loopback the bound is C + M + O, since the messages keep the same processors busy; over the link it is "
    "max(C + O, M). Medians; the ratios are taken within a round."
)


def page(
    groups: Groups,
    memory: dict[str, Any],
    simulator: list[dict[str, Any]],
    skipped: list[str],
    command: str,
    notes: str,
) -> str:
    """The whole page; `notes` is the handwritten end of the previous page."""
    mb = 1e6
    groups = {name: bounded(name, group) for name, group in groups.items()}
    versions = f"Python {platform.python_version()}, torch {version('torch')}, fjoin {version('fjoin')}"
    machine = f"{os.cpu_count()} CPUs ({platform.machine()}, {platform.system()})"
    made = f"{datetime.date.today().isoformat()}, `{command}`, {versions}, {machine}."
    lines = [
        "# Measured speed and memory",
        "",
        "Of ZeRO: [RESULTS_ZERO.md](RESULTS_ZERO.md). Of local SGD: "
        "[RESULTS_LOCAL_SGD_SPEED.md](RESULTS_LOCAL_SGD_SPEED.md). Of remat: [RESULTS_REMAT.md](RESULTS_REMAT.md). Of "
        "optimizers: [RESULTS_OPTIMIZERS.md](RESULTS_OPTIMIZERS.md). Of encoded messages: [RESULTS_WIRE.md](RESULTS_WIRE.md); "
        "what a model learns with them: [RESULTS_QUALITY.md](RESULTS_QUALITY.md). "
        "What a step does: [RESULTS_COUNTS.md](RESULTS_COUNTS.md). What the host bounds: [RESULTS_HOST.md](RESULTS_HOST.md).",
        "",
        made,
        "",
        INTRODUCTION,
        "",
        "## Targets",
        "",
        *claims(groups, memory),
        *bounds(groups),
        "## All variants",
        "",
        *variants(groups),
    ]
    if memory:
        rows = [
            [TITLES[model], v, f"{m['peak'] / mb:.0f}", f"{m['steady'] / mb:.0f}", f"{m['faults']:.0f}"]
            for model, found in memory.items()
            for v, m in found.items()
        ]
        lines += [
            "## Memory per rank",
            "",
            "RSS in MB of a process that runs one variant alone, set-up included; of memory that two processes share, half. Page "
            "faults are those of a step.",
            "",
        ]
        lines += table(["model", "variant", "peak", "after the last step", "page faults"], rows)
    if simulator:
        rows = [
            [
                str(r["ranks"]),
                f"{r['seconds'] * 1e3:.0f}",
                f"{r['added'] / mb:.0f}",
                f"{r['peak'] / mb:.0f}",
            ]
            for r in simulator
        ]
        lines += [
            "## The simulator",
            "",
            "Three steps of the tiny MLP with mean and sgd, all ranks in one process.",
            "",
        ]
        lines += table(["ranks", "ms", "MB added", "peak RSS MB"], rows)
    if skipped:
        lines += ["## Not measured", "", *(f"- {text}" for text in skipped), ""]
    return "\n".join([*lines, NOTES, "", notes.strip() or "(to be written)", ""])
