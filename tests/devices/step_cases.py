"""Steps of all transforms and optimizers, and of all options of a step, for runs on several devices."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies
from fjoin.transforms.base.state_dicts import names_of
from tests.helpers import same_bits
from tests.optimizer_table import OPTIMIZERS
from tests.training.small import net_batch
from tests.transform_table import TRANSFORMS

SIZES = [5, 3, 4, 0]  # the batches of each rank


class Case(NamedTuple):
    """A pipeline and the options of its step.

    Attributes:
        loss: One of `LOSSES`.
        room: The allowed deviation of the parameters, relative to the distance moved. The sums of a GPU have another order.
        flush: Whether the run ends in a flush.
        poisoned: The steps in which the loss is infinite on rank 1.
    """

    pipeline: Callable[[], tx.Pipeline]
    options: dict[str, Any] = {}
    loss: str = "plain"
    room: float = 1e-4
    flush: bool = False
    poisoned: tuple[int, ...] = ()


def net_params() -> dict[str, Tensor]:
    """With the names of the table of transforms, an empty parameter and a number."""
    g = torch.Generator().manual_seed(0)
    shapes = {
        "layer.weight": (5, 4), "layer.bias": (4,), "last.weight": (4, 3), "last.bias": (3,), "none": (0, 2),
        "scale": (),
    }  # fmt: skip
    return {path: torch.randn(shape, generator=g, dtype=torch.float64) for path, shape in shapes.items()}


# -- losses -------------------------------------------------------------------------------------------------------------


def hidden(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(x @ w + b)


def net_loss(params: Any, batch: Tensor, first: Callable[..., Tensor] = hidden) -> Tensor:
    x = first(batch, params["layer.weight"], params["layer.bias"]) @ params["last.weight"] + params["last.bias"]
    return (x * params["scale"]).square().mean() + params["none"].sum()


def offloaded(policy: Any) -> Callable[..., Tensor]:
    """The intermediate values of a GPU wait in pinned memory of the host."""
    return lambda params, batch: net_loss(
        params, batch, tx.remat(hidden, policy, None if batch.device.type == "cpu" else "cpu")
    )


def with_buffers(params: Any, buffers: Any, batch: Tensor) -> Any:
    """A running mean of the batches, and their number."""
    new = {"mean": 0.9 * buffers["mean"] + 0.1 * batch.mean(0), "count": buffers["count"] + len(batch)}
    return net_loss(params, batch - new["mean"].detach()), None, new


LOSSES: dict[str, Any] = {
    "plain": net_loss, "remat": lambda params, batch: tx.remat(net_loss)(params, batch), "offload": offloaded(None),
    "offload, all": offloaded(policies.everything_saveable), "buffers": with_buffers,
    "auxiliary": lambda params, batch: (net_loss(params, batch), {"sum": {"samples": len(batch)}, "first": batch[0]}),
}  # fmt: skip

# -- the tables ---------------------------------------------------------------------------------------------------------

SGD, ADAM = tx.sgd(0.05, momentum=0.9), tx.adamw(0.05)
AFTER = {
    "average_parameters", "ema", "outer_step",
}  # fmt: skip
ON_BUFFERS = {"average_buffers", "broadcast_buffers"}
# A step accumulates by an option of its own. JAX would need a CUDA of its own.
LEFT_OUT = {"accumulate", "from_optax"}


def of_row(name: str, make: Callable[[], tx.Transform]) -> Case:
    if name in AFTER:
        return Case(lambda: tx.fuse(tx.identity(), SGD, after=make()))
    if name in ON_BUFFERS:
        return Case(lambda: tx.fuse(tx.mean("data"), SGD), {"on_buffers": make()}, "buffers")
    return Case(lambda: tx.fuse(make(), SGD))


def rows() -> dict[str, Case]:
    """One case for each row of the table of transforms."""
    return {
        f"{name} {i}": of_row(name, make)
        for name, found in TRANSFORMS.items() if name not in LEFT_OUT for i, make in enumerate(found)
    }  # fmt: skip


def on_nodes(case: Case) -> bool:
    return "'local'" in repr(case.pipeline())


def optimizers() -> dict[str, Case]:
    """Muon computes in bfloat16."""
    return {
        f"{name} {i}": Case(lambda make=make: tx.fuse(tx.mean("data"), make()), room=0.05 if name == "muon" else 1e-4)  # type: ignore[misc]
        for name, found in OPTIMIZERS.items() for i, make in enumerate(found)
    }  # fmt: skip


def averaged(*ends: Any) -> Callable[[], tx.Pipeline]:
    return lambda: tx.fuse(tx.identity(), ADAM, *ends)


def zero(hook: tx.Transform | None = None, optimizer: tx.Optimizer = ADAM) -> Callable[[], tx.Pipeline]:
    return lambda: tx.zero(hook or tx.mean("data"), optimizer, "data")


def scaled(pipeline: Callable[[], tx.Pipeline], **options: Any) -> Callable[[], tx.Pipeline]:
    return lambda: tx.dynamic_loss_scale(pipeline(), 64.0, growth_interval=2, **options)


def mean() -> tx.Pipeline:
    return tx.fuse(tx.mean("data"), ADAM)


def coded() -> tx.Pipeline:
    return tx.fuse(tx.error_feedback(tx.compress(tx.int8(block=8), tx.mean("data"))), ADAM)


CLIP = tx.clip_by_global_norm(0.5)
DILOCO: dict[str, Any] = {"every": 2, "delay": 1}
OPTIONS: dict[str, Case] = {
    "one bucket": Case(mean, {"bucket_bytes": 10**6}),
    "kept states": Case(mean, {"donate": False}),
    "kept states, feedback": Case(coded, {"donate": False}),
    "accumulated": Case(mean, {"accumulate": 2}),
    "auxiliary values": Case(mean, loss="auxiliary"),
    "remat": Case(mean, loss="remat"),
    "remat, offloaded": Case(mean, loss="offload"),
    "remat, all offloaded": Case(coded, loss="offload, all"),
    "zero": Case(zero()),
    "zero, Muon": Case(zero(optimizer=tx.partition({"*.weight": tx.muon(0.05), "*": ADAM})), room=0.05),
    "zero, masters": Case(zero(optimizer=tx.mixed_precision(ADAM))),
    "zero, kept states": Case(zero(), {"donate": False}),
    "zero, accumulated": Case(zero(), {"accumulate": 2}),
    "zero, offloaded": Case(zero(), loss="offload"),
    "zero, clip": Case(zero(tx.chain(tx.mean("data"), CLIP))),
    "zero, coded gathers": Case(lambda: tx.fuse(tx.scatter_mean("data"), ADAM, gather_codec=tx.int8(block=8))),
    "zero, clip of slices": Case(lambda: tx.fuse(tx.chain(tx.scatter_mean("data"), CLIP), ADAM)),
    "local SGD": Case(lambda: tx.local_sgd(ADAM, tx.mean("data"), 2)),
    "local SGD, states too": Case(lambda: tx.local_sgd(ADAM, tx.mean("data"), 2, state="average")),
    "local SGD, int8": Case(lambda: tx.local_sgd(ADAM, tx.error_feedback(tx.compress(tx.int8(block=8), tx.mean("data"))), 2)),
    "local SGD, flushed": Case(lambda: tx.local_sgd(ADAM, tx.mean("data"), 3), flush=True),
    "post-local": Case(lambda: tx.post_local_sgd(ADAM, tx.mean("data"), 2, 2)),
    "DiLoCo": Case(lambda: tx.diloco(ADAM, tx.mean("data"), 2)),
    "DiLoCo, late": Case(lambda: tx.diloco(ADAM, tx.mean("data"), **DILOCO)),
    "DiLoCo, late, flushed": Case(lambda: tx.diloco(ADAM, tx.mean("data"), **DILOCO), flush=True),
    "DiLoCo, late, kept states": Case(lambda: tx.diloco(ADAM, tx.mean("data"), **DILOCO), {"donate": False}),
    "DiLoCo, late, int8": Case(lambda: tx.diloco(ADAM, tx.error_feedback(tx.compress(tx.int8(block=8), tx.mean("data"))), **DILOCO)),
    "DiLoCo, fragments": Case(lambda: tx.diloco(ADAM, tx.mean("data"), 4, delay=1, fragments=2, mix=0.5), flush=True),
    "clip": Case(lambda: tx.fuse(tx.chain(tx.mean("data"), CLIP), ADAM)),
    "left out": Case(lambda: tx.skip_if_nonfinite(mean()), poisoned=(1, 2)),
    "left out, feedback": Case(lambda: tx.skip_if_nonfinite(coded()), poisoned=(1,)),
    "left out, zero": Case(lambda: tx.skip_if_nonfinite(zero()()), poisoned=(1,)),
    "loss scale": Case(scaled(mean), poisoned=(1, 2)),
    "loss scale, zero": Case(scaled(zero()), poisoned=(2,)),
    "loss scale, clip, kept states": Case(scaled(lambda: tx.fuse(tx.chain(tx.mean("data"), CLIP), ADAM)), {"donate": False}, poisoned=(1,)),
    "buffers of each rank": Case(mean, loss="buffers"),
    "buffers, every second step": Case(mean, {"on_buffers": tx.every(2, tx.average_buffers("data"))}, "buffers"),
    "a moving average": Case(averaged(tx.chain(tx.every(2, tx.average_parameters("data")), tx.ema(0.9)))),
    "a moving average of means": Case(lambda: tx.fuse(tx.mean("data"), ADAM, after=tx.ema(0.9)), {"donate": False}),
}  # fmt: skip

SOME = ["zero", "zero, coded gathers", "DiLoCo, late, flushed", "left out, feedback", "loss scale, zero"]

# -- a run --------------------------------------------------------------------------------------------------------------


def host(tree: Any) -> dict[str, Tensor]:
    """The tensors of a tree by path, copied to the host."""
    leaves = zip(names_of(tree), optree.tree_leaves(tree), strict=True)
    return {name: x.to("cpu", copy=True) for (name, _), x in leaves if isinstance(x, Tensor)}


def run(case: Case, device: str, mesh: Any) -> dict[str, Any]:
    """A rank's run: its parameters, buffers and state at the end, and what each step has reported."""
    step = fjoin.train_step(
        LOSSES[case.loss], case.pipeline(), mesh=mesh, weight=lambda batch: 1.0 + mesh.rank,
        **{"bucket_bytes": 64, **case.options},
    )  # fmt: skip
    params = {path: p.to(device) for path, p in net_params().items()}
    buffers = {"mean": torch.zeros(5, dtype=torch.float64, device=device), "count": torch.zeros((), device=device)}
    state, seen, calls = (
        step.init(params, buffers if case.loss == "buffers" else None), [], case.options.get("accumulate", 1),
    )  # fmt: skip
    batches = [net_batch(mesh.rank, i).to(device) for i in range(calls * SIZES[mesh.rank])]
    if mesh.rank == 1:
        for i in case.poisoned:
            batches[i].fill_(torch.inf)
    for batch in step.join(batches):
        before = state.clone() if case.options.get("donate") is False else None
        new, metrics = step(state, batch)
        if before is not None:  # a state that is kept has not changed
            assert same_bits(host(state.params), host(before.params)) and same_bits(state.pipeline, before.pipeline)
        state = new
        seen.append((float(metrics.loss), float(metrics.weight), dict(metrics.sums or {})))
    if case.flush:
        state = step.flush(state)
    end = state.clone()
    step.close()
    assert all(p.device.type == device for p in end.params.values())
    return {"params": host(end.params), "buffers": host(end.buffers or {}), "state": host(end.pipeline), "seen": seen}


def runs(kind: str, device: str, axes: dict[str, int]) -> dict[str, dict[str, Any]]:
    """A rank's runs of all cases of a kind, with one mesh."""
    out = {}
    with warnings.catch_warnings(), fjoin.mesh(axes, timeout_s=60) as mesh:
        warnings.simplefilter("ignore")  # NCCL's and CUDA's; and of ranks that share nothing
        for name, case in cases(kind).items():
            try:
                out[name] = run(case, device, mesh)
            except BaseException as error:
                error.add_note(f"in the case {name!r}")
                raise
    return out


def cases(kind: str) -> dict[str, Case]:
    if kind in ("rows", "rows on nodes"):
        return {name: case for name, case in rows().items() if on_nodes(case) == (kind == "rows on nodes")}
    if kind == "some options":
        return {name: OPTIONS[name] for name in SOME}
    return {"optimizers": optimizers(), "options": OPTIONS}[kind]
