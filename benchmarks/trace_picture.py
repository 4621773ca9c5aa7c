"""A picture of one step of a trace: docs/images/trace.png.

    python benchmarks/trace_picture.py

It trains the transformer of examples/_text_model.py for some steps on two ranks under `fjoin.trace`, and draws the step
whose time is the median. `--keep run.json` keeps the trace, for ui.perfetto.dev; `--trace run.json` draws another one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
RANKS, STEPS, WARM_UP, BUCKET_BYTES = 2, 7, 3, 3 << 19
# Names of spans by what they begin with -> the legend's word and a colour. Others are short, and grey.
KINDS = {
    "forward": ("forward", "#4c78a8"),
    "backward": ("backward", "#83b8d8"),
    "wait for": ("wait", "#e4e4e4"),
    "optimizer": ("optimizer", "#59a14f"),
}
MESSAGE, WAITED, OTHER, TEXT = "#f6c272", "#e08a1e", "#9d9d9d", "#333333"


class Span(NamedTuple):
    name: str
    begun_ms: float
    ended_ms: float
    bytes: int = 0
    waited_ms: float = 0.0


class Lane(NamedTuple):
    """What one rank does in a step."""

    program: list[Span]
    launches: list[Span]
    messages: list[Span]


def train(path: str) -> None:
    """What each rank runs."""
    import torch

    import fjoin
    from fjoin import transforms as tx

    sys.path.insert(0, str(HERE.parent / "examples"))
    from _text_model import Batch, Decoder, batches_of, cross_entropy, source_files

    torch.manual_seed(0)
    apply, params, _ = fjoin.functional(Decoder(width=192, heads=4, layers=4, context=64))
    batches = batches_of(source_files(200_000), context=64, sequences=16)

    def loss_fn(params: Any, batch: Any) -> Any:
        return cross_entropy(apply(params, {}, batch.inputs), batch)

    mesh, pipeline = fjoin.mesh({"data": -1}), tx.fuse(tx.mean("data"), tx.adamw(1e-3))
    step = fjoin.train_step(loss_fn, pipeline, mesh=mesh, weight=lambda batch: batch.tokens, bucket_bytes=BUCKET_BYTES)
    # The last rank has fewer rows, and waits for the others.
    own = [Batch(*(rows[: 16 - 3 * mesh.rank] for rows in batch)) for batch in batches[mesh.rank :: RANKS]]
    state = step.init(params)
    for batch in own[:WARM_UP]:
        state, _ = step(state, batch)
    with fjoin.trace(path):
        for batch in own[WARM_UP : WARM_UP + STEPS]:
            state, _ = step(state, batch)
    step.close()


def record(path: Path) -> None:
    """Run the ranks."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*run, __file__, "--train", str(path)], env=env, check=True, timeout=300)


def lanes(path: Path) -> list[Lane]:
    """Those of the step whose time is the median, from the moment at which its first rank begins."""
    events = json.loads(path.read_text())["traceEvents"]
    ranks = sorted({event["pid"] for event in events})
    steps = [[e for e in events if e["name"] == "step" and e["pid"] == rank] for rank in ranks]
    number = sorted(range(len(steps[0])), key=lambda k: steps[0][k]["dur"])[len(steps[0]) // 2]
    zero = min(own[number]["ts"] for own in steps)

    def lane(rank: int) -> Lane:
        begun, ended = steps[rank][number]["ts"], steps[rank][number]["ts"] + steps[rank][number]["dur"]
        inside = [e for e in events if e["pid"] == rank and e["ph"] == "X" and begun <= e["ts"] < ended]
        spans = [(e, (e["ts"] - zero) / 1e3, (e["ts"] + e["dur"] - zero) / 1e3) for e in inside if e["name"] != "step"]
        program = [Span(e["name"], a, b) for e, a, b in spans if e["tid"] == 0]
        # Each wait knows when its message was launched.
        messages = [
            Span(e["args"]["stage"], b - (e["dur"] + e["ts"] - e["args"]["launched_ns"] / 1e3) / 1e3, b, *sizes)
            for e, a, b in spans
            if e["tid"] == 1
            for sizes in [(e["args"]["sent_bytes"], b - a)]
        ]
        return Lane(
            [span for span in program if not span.name.startswith("bucket")],
            [span for span in program if span.name.startswith("bucket")],
            messages,
        )

    return [lane(rank) for rank in ranks]


def draw(found: list[Lane], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    end = max(span.ended_ms for lane in found for span in lane.program)
    figure, axes = pyplot.subplots(
        figsize=(11, 1.6 + 0.27 * sum(4 + len(lane.messages) for lane in found)), layout="constrained"
    )
    y, ticks = 0.0, list[tuple[float, str]]()

    def text(x: float, y: float, words: str, **how: Any) -> None:
        axes.text(x, y, words, va="center", fontsize=9, **({"color": TEXT} | how))

    for rank, lane in enumerate(found):
        for span in lane.program:
            kind = next((kind for start, kind in KINDS.items() if span.name.startswith(start)), ("", OTHER))
            axes.barh(y, span.ended_ms - span.begun_ms, 1.5, span.begun_ms, color=kind[1], linewidth=0)
            if span.ended_ms - span.begun_ms > 0.012 * end * len(kind[0]):
                dark = kind[0] == "forward"
                text(
                    (span.begun_ms + span.ended_ms) / 2,
                    y,
                    kind[0],
                    ha="center",
                    color="white" if dark else TEXT,
                    bbox={"fc": kind[1], "lw": 0, "pad": 2},
                )
        for span in lane.launches:
            axes.plot([span.ended_ms] * 2, [y - 0.75, y + 0.75], color=WAITED, linewidth=1.5, solid_capstyle="butt")
        ticks.append((y, f"rank {rank}"))
        y += 0.55
        for span in lane.messages:
            y += 0.85
            axes.barh(y, span.ended_ms - span.begun_ms, 0.6, span.begun_ms, color=MESSAGE, linewidth=0)
            axes.barh(y, span.waited_ms, 0.6, span.ended_ms - span.waited_ms, color=WAITED, linewidth=0)
            text(span.begun_ms - 0.005 * end, y, f"{span.name}, {span.bytes / 1e6:.1f} MB", ha="right")
        ticks.append(((ticks[-1][0] + 1.4 + y) / 2, "messages"))
        y += 2.2
    shown = [*KINDS.values(), ("message, from its launch", MESSAGE), ("wait for it", WAITED)]
    axes.legend(
        handles=[Patch(color=color, label=name) for name, color in shown],
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=len(shown),
        frameon=False,
        fontsize=9,
        handlelength=1.2,
    )
    axes.set(xlim=(0, end * 1.01), ylim=(y - 1.2, -1.0), xlabel="ms since the step has begun")
    axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--trace", type=Path, help="draw this trace")
    parser.add_argument("--keep", type=Path, help="keep the trace here")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "images" / "trace.png")
    args = parser.parse_args()
    if args.train:
        train(args.train)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = args.trace or Path(folder) / "run.json"
        if args.trace is None:
            record(path)
        draw(lanes(path), args.out)
        if args.keep:
            shutil.copyfile(path, args.keep)


if __name__ == "__main__":
    main()
