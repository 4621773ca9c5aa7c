"""The checks at the end of `uneven_text.py`. All ranks run all of them; rank 0 prints."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import optree
import torch
import torch.distributed as dist
from _text_model import IGNORE, Batch, Decoder, cross_entropy
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx

SMALL = {"width": 32, "heads": 2, "layers": 2, "context": 16}
BUCKET_BYTES = 2**14  # several messages for the small model too
PEAK = 3e-3  # learning rate
MakePipeline = Callable[[int, float], tx.Pipeline]


class Report:
    """Prints a line per check and records whether one failed, equally on all ranks."""

    def __init__(self, mesh: fjoin.Mesh) -> None:
        self.mesh, self.first, self.failed = mesh, mesh.rank == 0, False

    def check(self, claim: str, ok: bool, detail: str) -> None:
        ok = all(gather(ok))
        self.failed = self.failed or not ok
        self.say(f"  {'ok    ' if ok else 'FAILED'}  {claim}: {detail}")

    def say(self, text: str) -> None:
        if self.first:
            print(text, flush=True)

    def exit(self) -> None:
        """End with code 1, on all ranks, if a check has failed."""
        if self.failed:
            raise SystemExit(1)
        self.say("all checks passed" if self.mesh.size > 1 else "all checks that one rank can make passed")


def gather(value: Any) -> list[Any]:
    """Every rank's value, by torch.distributed, in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def digest(tree: Any) -> str:
    """A hash of all bits of all tensors of a tree."""
    sha = hashlib.sha256()
    for leaf in optree.tree_leaves(tree):
        sha.update(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def equal_on_all_ranks(report: Report, state: fjoin.TrainState) -> None:
    """Check that parameters and optimizer state have the same bits on all ranks, despite uneven inputs."""
    if report.mesh.size == 1:
        return report.say("  skipped equality between ranks: there is one rank")
    for name, tree in (("parameters", state.params), ("optimizer state", state.pipeline.optimizer)):
        digests = gather(digest(tree))
        ok = len(set(digests)) == 1
        report.check(f"{name} equal on all ranks, to the bit", ok, " ".join(d[:12] for d in digests))


def equal_to_one_process(report: Report, make_pipeline: MakePipeline) -> None:
    """Check that steps on uneven ranks move the parameters as plain torch does on all their batches together."""
    world, rank = report.mesh.size, report.mesh.rank
    counts = [4] + [2] * (world - 1)
    batches = [uneven_batches(seed=r, count=n) for r, n in enumerate(counts)]
    torch.manual_seed(1)
    model = Decoder(**SMALL).double()
    apply, params, _ = fjoin.functional(model)

    step = fjoin.train_step(
        lambda p, b: cross_entropy(apply(p, {}, b.inputs), b),
        make_pipeline(max(counts), PEAK),
        mesh=report.mesh,
        weight=lambda b: b.tokens,
        bucket_bytes=BUCKET_BYTES,
    )
    state = step.init(params)
    for batch in step.join(batches[rank]):
        state, _ = step(state, batch)

    difference = largest = 0.0
    clipped = 0
    if rank == 0:
        clipped = train_with_torch(model, batches, PEAK)
        before, ours = vector(params.values()), vector(state.params.values())
        expected = vector(model.parameters()) - before
        difference = (ours - before - expected).abs().max().item()
        largest = expected.abs().max().item()
    step.close()
    report.check(
        f"equal to one process of plain torch, float64, on {' + '.join(map(str, counts))} batches",
        difference <= 1e-12 and (largest > 0 or rank > 0),
        f"displacements up to {largest:.1e} differ by {difference:.1e} at most ({clipped} of {max(counts)} steps clipped)",
    )


def train_with_torch(model: nn.Module, batches: list[list[Batch]], peak: float) -> int:
    """Train in one process, with all ranks' batches of a step as one batch; returns the number of clipped steps."""
    steps = max(map(len, batches))
    named = dict(model.named_parameters())
    plain = [p for path, p in named.items() if "norm" in path or path.endswith("bias")]
    decayed = [p for path, p in named.items() if not ("norm" in path or path.endswith("bias"))]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.99), foreach=False, fused=False)
    warmup, clipped = max(1, steps // 10), 0
    for number in range(steps):
        falling = 0.5 * (1 + math.cos(math.pi * (number - warmup) / (steps - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = peak * ((number + 1) / warmup if number < warmup else falling)
        together = Batch(*map(torch.cat, zip(*(b[number] for b in batches if number < len(b)), strict=True)))
        optimizer.zero_grad()
        cross_entropy(model(together.inputs), together).backward()
        clipped += nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() > 1.0
        optimizer.step()
    return clipped


def one_message_per_bucket(
    report: Report, step: fjoin.TrainStep, state: fjoin.TrainState, loader: list[Batch], announced: int
) -> None:
    """Count messages by torch's profiler: only the buckets, and one message before the first step."""
    own = 3 if report.mesh.rank == 0 else 2  # uneven here as well
    steps = 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for batch in step.join(loader[:own]):
            with torch.profiler.record_function("one step"):
                state, _ = step(state, batch)
            steps += 1
    sent = [event.time_range.start for event in profile.events() if event.name.startswith(("c10d::", "fjoin::"))]
    spans = [event.time_range for event in profile.events() if event.name == "one step"]
    each = [sum(span.start <= at <= span.end for at in sent) for span in spans]
    if report.mesh.size == 1:
        report.check("collectives", not sent, "one rank sends nothing")
        return
    report.check(
        "collectives per step as many as buckets",
        each == [announced] * steps,
        f"{' '.join(map(str, each))}, counted by torch.profiler; explain announced {announced}",
    )
    report.check(
        "one more in a whole loop of join",
        len(sent) == steps * announced + 1,
        f"{len(sent)} for {steps} steps = {steps} x {announced} + 1",
    )


def next_to_torch_join(report: Report, make_pipeline: MakePipeline) -> None:
    """Compare how far ranks drift apart after an epoch of uneven inputs: fjoin, and torch's DDP with Join."""
    if report.mesh.size == 1:
        return report.say("  skipped the comparison with torch's Join: there is one rank")
    batches = uneven_batches(seed=10 + report.mesh.rank, count=4 if report.mesh.rank == 0 else 2)
    torch.manual_seed(2)
    model = Decoder(**SMALL)
    apply, params, _ = fjoin.functional(model)

    # Both train for two epochs and keep the parameters after the first step of the second epoch. In that
    # step all ranks have a batch; only their optimizer states can differ.
    step = fjoin.train_step(
        lambda p, b: cross_entropy(apply(p, {}, b.inputs), b),
        make_pipeline(8, PEAK),
        mesh=report.mesh,
        weight=lambda b: b.tokens,
        bucket_bytes=BUCKET_BYTES,
    )
    state = step.init(params)
    for epoch in range(2):
        for number, batch in enumerate(step.join(batches)):
            state, _ = step(state, batch)
            if (epoch, number) == (1, 0):
                ours = vector(state.params.values())
    step.close()

    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=PEAK)
    for epoch in range(2):
        with Join([wrapped]):
            for number, batch in enumerate(batches):
                if (epoch, number) == (1, 0):
                    before = vector(wrapped.parameters())
                optimizer.zero_grad()
                cross_entropy(wrapped(batch.inputs), batch).backward()
                optimizer.step()
                if (epoch, number) == (1, 0):
                    theirs = vector(wrapped.parameters())

    drift_ours, drift_before, drift_theirs = drift(ours), drift(before), drift(theirs)
    report.check(
        "no drift between ranks after the first step of a second epoch, AdamW, uneven inputs",
        drift_ours == 0.0,
        f"largest difference of a parameter {drift_ours:g}",
    )
    report.say(
        "          on the same batches, torch's DistributedDataParallel, Join and AdamW: "
        f"{drift_theirs:.1e} after that step, {drift_before:g} before it"
    )


def vector(params: Iterable[Tensor]) -> Tensor:
    """A copy of all parameters in one vector."""
    return torch.cat([p.detach().flatten() for p in params])


def drift(mine: Tensor) -> float:
    """The largest difference between rank 0's vector and another rank's."""
    vectors = torch.stack(gather(mine))
    return (vectors - vectors[0]).abs().max().item()


def uneven_batches(seed: int, count: int) -> list[Batch]:
    """Random batches for the small model, of 2 to 4 sequences that end early."""
    chance = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(count):
        bytes_ = torch.randint(0, 256, (2 + (seed + i) % 3, SMALL["context"] + 1), generator=chance)
        inputs, targets = bytes_[:, :-1].contiguous(), bytes_[:, 1:].contiguous()
        targets[-1, 3 + 2 * i + seed % 3 :] = IGNORE
        batches.append(Batch(inputs, targets))
    return batches
