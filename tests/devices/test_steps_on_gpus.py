"""Steps with tensors on GPUs, over NCCL, and on CPUs, over gloo: each rank has what a simulated rank on the CPU has.

Steps of all transforms and optimizers, and of all options of a step. All cases of a kind are one job, since a process
group of GPUs takes seconds to make.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies
from fjoin.transforms.base.state_dicts import names_of
from tests.devices.fake_device import Make
from tests.helpers import same_bits
from tests.optimizer_table import OPTIMIZERS
from tests.pool import Pool
from tests.training.small import net_batch
from tests.transform_table import TRANSFORMS

SIZES = [5, 3, 4, 0]  # the batches of each rank


class Case(NamedTuple):
    """A pipeline and the options of its step.

    Attributes:
        loss: One of `LOSSES`.
        room: The allowed deviation of the parameters, relative to the distance moved. A GPU sums in another order.
        flush: Whether the run ends in a flush.
        poisoned: The steps in which the loss is infinite on rank 1.
    """

    pipeline: Make
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


# -- losses ------------------------------------------------------------------------------------------------------------


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

# -- the tables --------------------------------------------------------------------------------------------------------

SGD, ADAM, CLIP = tx.sgd(0.05, momentum=0.9), tx.adamw(0.05), tx.clip_by_global_norm(0.5)
MEAN, SCATTER = tx.mean("data"), tx.scatter_mean("data")
INT8 = tx.error_feedback(tx.compress(tx.int8(block=8), MEAN))
AFTER, ON_BUFFERS = {"average_parameters", "ema", "outer_step"}, {"average_buffers", "broadcast_buffers"}
# A step accumulates by an option of its own. JAX would need a CUDA of its own.
LEFT_OUT = {"accumulate", "from_optax"}


def of_row(name: str, make: Callable[[], tx.Transform]) -> Case:
    if name in AFTER:
        return Case(lambda: tx.fuse(tx.identity(), SGD, after=make()))
    if name in ON_BUFFERS:
        return Case(lambda: tx.fuse(tx.mean("data"), SGD), {"on_buffers": make()}, "buffers")
    return Case(lambda: tx.fuse(make(), SGD))


def rows(on_nodes: bool) -> dict[str, Case]:
    """One case for each row of the table of transforms; those over two axes are apart."""
    found = {
        f"{name} {i}": of_row(name, make)
        for name, makes in TRANSFORMS.items() if name not in LEFT_OUT for i, make in enumerate(makes)
    }  # fmt: skip
    return {name: case for name, case in found.items() if ("'local'" in repr(case.pipeline())) == on_nodes}


def stepped_by(make: Callable[[], tx.Optimizer]) -> Make:
    return lambda: tx.fuse(MEAN, make())


def optimizers() -> dict[str, Case]:
    """Muon computes in bfloat16."""
    return {
        f"{name} {i}": Case(stepped_by(make), room=0.05 if name == "muon" else 1e-4)
        for name, found in OPTIMIZERS.items()
        for i, make in enumerate(found)
    }


def averages() -> tx.Pipeline:
    return tx.fuse(tx.identity(), ADAM, after=tx.chain(tx.every(2, tx.average_parameters("data")), tx.ema(0.9)))


PIPELINES: dict[str, Make] = {
    "mean": lambda: tx.fuse(MEAN, ADAM), "coded": lambda: tx.fuse(INT8, ADAM), "clip": lambda: tx.fuse(tx.chain(MEAN, CLIP), ADAM),
    "zero": lambda: tx.zero(MEAN, ADAM, "data"), "zero, masters": lambda: tx.zero(MEAN, tx.mixed_precision(ADAM), "data"),
    "zero, Muon": lambda: tx.zero(MEAN, tx.partition({"*.weight": tx.muon(0.05), "*": ADAM}), "data"),
    "zero, clip": lambda: tx.zero(tx.chain(MEAN, CLIP), ADAM, "data"),
    "zero, coded gathers": lambda: tx.fuse(SCATTER, ADAM, gather_codec=tx.int8(block=8)),
    "zero, clip of slices": lambda: tx.fuse(tx.chain(SCATTER, CLIP), ADAM), "local SGD": lambda: tx.local_sgd(ADAM, MEAN, 3),
    "local SGD, states too": lambda: tx.local_sgd(ADAM, MEAN, 2, state="average"),
    "local SGD, int8": lambda: tx.local_sgd(ADAM, INT8, 2), "post-local": lambda: tx.post_local_sgd(ADAM, MEAN, 2, 2),
    "DiLoCo": lambda: tx.diloco(ADAM, MEAN, 2), "DiLoCo, late": lambda: tx.diloco(ADAM, MEAN, 2, delay=1),
    "DiLoCo, late, int8": lambda: tx.diloco(ADAM, INT8, 2, delay=1),
    "DiLoCo, fragments": lambda: tx.diloco(ADAM, MEAN, 4, delay=1, fragments=2, mix=0.5), "a moving average": averages,
}  # fmt: skip


def skipping(name: str) -> Make:
    return lambda: tx.skip_if_nonfinite(PIPELINES[name]())


def scaled(name: str) -> Make:
    return lambda: tx.dynamic_loss_scale(PIPELINES[name](), 64.0, growth_interval=2)


KEPT: dict[str, Any] = {"donate": False}
MEAN_OF: Make = PIPELINES["mean"]
OPTIONS: dict[str, Case] = {
    **{name: Case(make, room=0.05 if "Muon" in name else 1e-4) for name, make in PIPELINES.items()},
    **{f"{name}, kept states": Case(PIPELINES[name], KEPT) for name in ("mean", "coded", "zero", "DiLoCo, late")},
    **{f"{name}, accumulated": Case(PIPELINES[name], {"accumulate": 2}) for name in ("mean", "zero")},
    **{f"{name}, flushed": Case(PIPELINES[name], flush=True) for name in ("local SGD", "DiLoCo, late", "DiLoCo, fragments")},
    **{f"{loss}, {name}": Case(PIPELINES[name], loss=loss) for loss, name in (
        ("auxiliary", "mean"), ("remat", "mean"), ("offload", "mean"), ("offload, all", "coded"), ("offload", "zero"), ("buffers", "mean"),
    )}, "one bucket": Case(MEAN_OF, {"bucket_bytes": 10**6}), "left out": Case(skipping("mean"), poisoned=(1, 2)),
    "left out, feedback": Case(skipping("coded"), poisoned=(1,)), "left out, zero": Case(skipping("zero"), poisoned=(1,)),
    "loss scale": Case(scaled("mean"), poisoned=(1, 2)), "loss scale, zero": Case(scaled("zero"), poisoned=(2,)),
    "loss scale, clip, kept states": Case(scaled("clip"), KEPT, poisoned=(1,)),
    "buffers, every second step": Case(MEAN_OF, {"on_buffers": tx.every(2, tx.average_buffers("data"))}, "buffers"),
    "a moving average of means": Case(lambda: tx.fuse(MEAN, ADAM, after=tx.ema(0.9)), KEPT),
}  # fmt: skip


def cases(kind: str) -> dict[str, Case]:
    return {
        "rows": lambda: rows(False), "rows on nodes": lambda: rows(True), "optimizers": optimizers,
        "options": lambda: OPTIONS,
    }[kind]()  # fmt: skip


# -- a run -------------------------------------------------------------------------------------------------------------


def host(tree: Any) -> dict[str, Tensor]:
    """The tensors of a tree by path, copied to the host."""
    leaves = zip(names_of(tree), optree.tree_leaves(tree), strict=True)
    return {name: x.to("cpu", copy=True) for (name, _), x in leaves if isinstance(x, Tensor)}


def run(case: Case, device: str, mesh: Any) -> dict[str, Any]:
    """A rank's run: its parameters, buffers and state at the end, and what each step has reported."""
    options = {"bucket_bytes": 64, **case.options}
    step = fjoin.train_step(
        LOSSES[case.loss], case.pipeline(), mesh=mesh, weight=lambda batch: 1.0 + mesh.rank, **options
    )
    params = {path: p.to(device) for path, p in net_params().items()}
    buffers = {"mean": torch.zeros(5, dtype=torch.float64, device=device), "count": torch.zeros((), device=device)}
    state, seen = step.init(params, buffers if case.loss == "buffers" else None), []
    batches = [net_batch(mesh.rank, i).to(device) for i in range(options.get("accumulate", 1) * SIZES[mesh.rank])]
    for i in case.poisoned if mesh.rank == 1 else ():
        batches[i].fill_(torch.inf)
    for batch in step.join(batches):
        before = state.clone() if options.get("donate") is False else None
        new, metrics = step(state, batch)
        if before is not None:  # a state that is kept has not changed
            assert same_bits(host(state.params), host(before.params)) and same_bits(state.pipeline, before.pipeline)
        state = new
        seen.append((float(metrics.loss), float(metrics.weight), dict(metrics.sums or {})))
    end = (step.flush(state) if case.flush else state).clone()
    step.close()
    assert all(p.device.type == device for p in end.params.values())
    return {"params": host(end.params), "buffers": host(end.buffers or {}), "state": host(end.pipeline), "seen": seen}


def runs(kind: str, device: str, axes: dict[str, int]) -> dict[str, dict[str, Any]]:
    """A rank's runs of all cases of a kind, with one mesh."""
    with fjoin.mesh(axes, timeout_s=60) as mesh:
        return all_of(cases(kind), lambda case: run(case, device, mesh))


def all_of(cases: dict[str, Any], run: Callable[[Any], Any]) -> dict[str, Any]:
    """The results of all cases; an error says in which one."""
    out = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NCCL's and CUDA's; and of ranks that share nothing
        for name, case in cases.items():
            try:
                out[name] = run(case)
            except BaseException as error:
                error.add_note(f"in the case {name!r}")
                raise
    return out


def compare(name: str, room: float, got: dict[str, Any], want: dict[str, Any]) -> None:
    way = max((want["params"][path] - p).norm().item() for path, p in net_params().items())
    for path, p in want["params"].items():
        assert (got["params"][path] - p).norm() <= room * way + 1e-9, (name, path)
    for part in ("buffers", "state"):
        assert {path: x.shape for path, x in got[part].items()} == {path: x.shape for path, x in want[part].items()}
    for buffer, x in want["buffers"].items():
        assert (got["buffers"][buffer] - x).abs().max() <= 1e-6, (name, buffer)
    for (*numbers, sums), (*wanted, sums_wanted) in zip(got["seen"], want["seen"], strict=True):
        assert numbers == pytest.approx(wanted, rel=max(room, 1e-6), nan_ok=True), name  # NaN within a window
        assert sums == sums_wanted, name


@pytest.mark.long
@pytest.mark.parametrize("kind", ["rows", "rows on nodes", "optimizers", "options"])
def test_each_rank_has_what_a_simulated_rank_has(ranks: tuple[str, Pool], kind: str) -> None:
    device, pool = ranks
    axes = {"node": 2, "local": 2} if kind == "rows on nodes" else {"data": 2}
    simulated = tx.simulate(lambda: runs(kind, "cpu", axes), axes)
    for got, want in zip(pool.run(math.prod(axes.values()), runs, kind, device, axes), simulated, strict=True):
        assert got.keys() == want.keys()
        for name, case in cases(kind).items():
            compare(name, case.room, got[name], want[name])
