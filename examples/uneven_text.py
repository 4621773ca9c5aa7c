"""Train a small transformer on the source of Python's standard library, on ranks with uneven data.

    torchrun --nproc-per-node 2 examples/uneven_text.py
    python examples/uneven_text.py

Each rank has files of its own, so the ranks have different numbers of batches, and batches have different
numbers of tokens. fjoin trains on them as one process would on all the data together. After three quarters
it saves a checkpoint. At its end the script starts over from there, and checks that it ends with the same bits;
and it checks itself against plain torch. It exits with 1 if a check fails.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time
from typing import Any

import _checks as checks
import _resume
import torch
import torch.distributed as dist
from _text_model import Batch, Decoder, batches_of, cross_entropy, source_files
from torch import Tensor

import fjoin
from fjoin import transforms as tx

OUT = pathlib.Path(__file__).parent / "out"
CONTEXT, SEQUENCES, BYTES_PER_RANK = 128, 4, 200_000
BUCKET_BYTES = 2**20  # small, so that even this model's gradients travel in several messages


def make_pipeline(steps: int, peak: float = 3e-3) -> tx.Pipeline:
    """The pipeline: the mean of the gradients over all tokens, clipped, then AdamW."""
    schedule = tx.warmup_cosine(peak, warmup_steps=max(1, steps // 10), total_steps=steps)
    plain = tx.adamw(schedule, betas=(0.9, 0.99), weight_decay=0.0)
    decayed = tx.adamw(schedule, betas=(0.9, 0.99), weight_decay=0.1)
    return tx.fuse(
        tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)),
        tx.partition({("*bias", "*norm*"): plain, "*": decayed}),
    )


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the demo is for CPUs, whatever the machine has
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps torch's profiler, which counts messages, silent
    torch.set_num_threads(1)  # the ranks share this machine
    torch.manual_seed(0)
    mesh = fjoin.mesh({"data": -1})  # torchrun's processes, or one rank without torchrun
    world, first = mesh.size, mesh.rank == 0

    # Data: every rank reads its own files. The schedule needs the largest number of batches of any rank.
    files = source_files(world * BYTES_PER_RANK)
    loaders = [batches_of(files[rank::world], CONTEXT, SEQUENCES) for rank in range(world)]
    loader, steps = loaders[mesh.rank], max(map(len, loaders))
    apply, params, _ = fjoin.functional(Decoder(width=160, heads=5, layers=3, context=CONTEXT))

    def loss_fn(params: dict[str, Tensor], batch: Batch) -> Tensor:
        return cross_entropy(apply(params, {}, batch.inputs), batch)

    pipeline = make_pipeline(steps)
    plan = tx.explain(pipeline, params, {"data": world}, bucket_bytes=BUCKET_BYTES)
    if first:
        print(f"{sum(p.numel() for p in params.values()):,} parameters, {world} rank{'s' * (world > 1)}")
        for rank, batches in enumerate(loaders):
            tokens = [batch.tokens for batch in batches]
            print(
                f"rank {rank}: {len(batches)} batches of {min(tokens)} to {max(tokens)} tokens, {sum(tokens):,} in all"
            )
        print(f"\n{plan}\n", flush=True)

    def make_step() -> fjoin.TrainStep:
        return fjoin.train_step(loss_fn, pipeline, mesh=mesh, weight=lambda b: b.tokens, bucket_bytes=BUCKET_BYTES)

    OUT.mkdir(exist_ok=True)
    with _resume.common_folder(OUT) as folder:
        # Training: `step.join` is the only addition for uneven inputs.
        step = make_step()
        state = step.init(params)
        runs = fjoin.Checkpoints(folder, step)
        losses, progress = [], Progress(steps, shown=first)
        for batch in step.join(loader):
            state, metrics = step(state, batch)
            losses.append(metrics.loss)
            progress.update(metrics)
            if state.step == 3 * steps // 4:
                runs.save(state)

        if first:
            print(f"\n--- a sample ---\n{generate(apply, state.params, 'def ', 240)}\n---\n")
            plot(losses, ends=[len(batches) for batches in loaders if len(batches) < steps])
            print("\nchecks", flush=True)

        report = checks.Report(mesh)
        checks.equal_on_all_ranks(report, state)
        _resume.equal_to_uncut(report, make_step, params, folder, loader, state)
    checks.equal_to_one_process(report, make_pipeline)
    checks.one_message_per_bucket(report, step, state, loader, plan.messages)
    checks.next_to_torch_join(report, make_pipeline)
    step.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    report.exit()


class Progress:
    """A line of progress: rewritten in place on a terminal; otherwise a new line at intervals."""

    def __init__(self, steps: int, shown: bool) -> None:
        self.steps, self.shown, self.terminal = steps, shown, sys.stdout.isatty()
        self.tokens, self.start = 0.0, time.perf_counter()

    def update(self, metrics: fjoin.Metrics) -> None:
        self.tokens += metrics.weight
        done = metrics.step + 1
        if not self.shown or not (self.terminal or done == self.steps or done % max(1, self.steps // 10) == 0):
            return
        bar = "#" * (24 * done // self.steps)
        speed = self.tokens / (time.perf_counter() - self.start)
        line = f"[{bar:<24}] {done}/{self.steps}  loss {metrics.loss:.3f}  {speed:,.0f} tokens/s"
        print(
            f"\r{line}  " if self.terminal else line,
            end="" if self.terminal and done < self.steps else "\n",
            flush=True,
        )


def generate(apply: Any, params: dict[str, Tensor], prompt: str, count: int) -> str:
    """Sample some bytes, one by one."""
    text = torch.tensor([list(prompt.encode())])
    with torch.no_grad():
        for _ in range(count):
            logits = apply(params, {}, text[:, -CONTEXT:])[0, -1]
            text = torch.cat([text, torch.multinomial((logits / 0.7).softmax(0), 1)[None]], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def plot(losses: list[float], ends: list[int]) -> None:
    """Save the loss curve as a picture, where matplotlib is installed.

    Args:
        ends: The steps at which ranks run out of input.
    """
    try:
        import matplotlib
    except ImportError:
        print("no picture of the loss: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1)
    for i, end in enumerate(ends):
        axes.axvline(end, color="gray", linestyle="--", label=None if i else "a rank is out of input")
    if ends:
        axes.legend()
    axes.set(xlabel="step", ylabel="loss per byte (nats)", title="uneven_text: loss over all ranks' tokens")
    axes.grid(alpha=0.3)
    figure.savefig(OUT / "uneven_text_loss.png", dpi=120)
    pyplot.close(figure)
    print(f"loss curve: {os.path.relpath(OUT / 'uneven_text_loss.png')}")


if __name__ == "__main__":
    main()
