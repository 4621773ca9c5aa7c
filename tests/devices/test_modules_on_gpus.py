"""Modules, torch's interfaces, loops and checkpoints on GPUs, over NCCL, give what they give on CPUs, over gloo.

Each case takes a device and returns tensors by name, which depend on no device. On a machine without a GPU the cases
run on CPUs; some are compared with one process. All cases of a kind are one job, since a process group of GPUs takes
seconds to make.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.sync import BatchNormState
from tests.devices.fake_device import Make
from tests.devices.test_steps_on_gpus import (
    ADAM,
    AFTER,
    LEFT_OUT,
    ON_BUFFERS,
    PIPELINES as STEPS,
    all_of,
    scaled,
    skipping,
)
from tests.oracle import whole_batch
from tests.pool import Pool
from tests.transform_table import TRANSFORMS
from tests.uneven.test_join_context import make_counter

Values = dict[str, Tensor]
F64 = torch.float64


def model(norm: bool = False) -> nn.Sequential:
    """With the names of the table of transforms; its layers are "layer" and "last"."""
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("layer", nn.Linear(6, 8))
    net.add_module("norm", nn.BatchNorm1d(8) if norm else nn.Tanh())
    net.add_module("last", nn.Linear(8, 3))
    net.register_parameter("scale", nn.Parameter(torch.ones(())))
    net.register_forward_hook(lambda module, given, out: out * module.scale)
    return net.to(F64)


def batches(device: str, n: int = 3, rank: int | None = None) -> list[Tensor]:
    gen = torch.Generator().manual_seed(1 + (dist.get_rank() if rank is None else rank))
    return [torch.randn(4, 6, generator=gen, dtype=F64).to(device) for _ in range(n)]


def loss(net: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = net(batch).square().mean()
    return out


def values(net: nn.Module) -> Values:
    return {path: p.detach().to("cpu", copy=True) for path, p in net.state_dict().items()}


def ddp_of(device: str, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model().to(device), **{"bucket_cap_mb": 1e-4, **options})


# -- fjoin.ddp.register ------------------------------------------------------------------------------------------------


def registered(device: str, what: Any, scaled: bool = False, window: int = 1, **options: Any) -> Values:
    ddp = ddp_of(device, **options)
    handle = fjoin.ddp.register(ddp, what)
    for i, batch in enumerate(batches(device, 3 * window)):
        ddp.require_backward_grad_sync = (i + 1) % window == 0
        handle.weight(1.0 + dist.get_rank())
        (handle.scale(loss(ddp, batch)) if scaled else loss(ddp, batch)).backward()
        if not isinstance(what, tx.Pipeline):
            with torch.no_grad():
                for p in ddp.parameters():
                    p -= 0.1 * p.grad
            ddp.zero_grad()
    assert all(p.device.type == device for p in ddp.parameters())
    return values(ddp.module)


PIPELINES: dict[str, tuple[Make, dict[str, Any]]] = {
    **{name: (STEPS[name], {}) for name in ("mean", "zero", "zero, clip", "clip", "local SGD", "DiLoCo, late")},
    "one bucket": (STEPS["mean"], {"bucket_cap_mb": 25}), "views": (STEPS["mean"], {"gradient_as_bucket_view": True}),
    "static graph": (STEPS["mean"], {"static_graph": True}), "windows": (STEPS["mean"], {"window": 2}),
    "left out": (skipping("mean"), {}), "loss scale": (scaled("mean"), {"scaled": True}),
}  # fmt: skip


def hooks() -> dict[str, tx.Transform]:
    """The rows of the table that are hooks over one axis."""
    found = {
        f"{name} {i}": make()
        for name, rows in TRANSFORMS.items() if name not in AFTER | ON_BUFFERS | LEFT_OUT for i, make in enumerate(rows)
    }  # fmt: skip
    return {name: hook for name, hook in found.items() if "'local'" not in repr(hook)}


# -- torch's interfaces ------------------------------------------------------------------------------------------------


def train(net: nn.Module, optimizer: Any, data: Iterable[Tensor], after: Callable[[], Any] = lambda: None) -> None:
    for batch in data:
        optimizer.zero_grad()
        loss(net, batch).backward()
        optimizer.step()
        after()


def sharded(ddp: DistributedDataParallel, kind: Any = torch.optim.AdamW, lr: float = 0.05, **options: Any) -> Any:
    return fjoin.ZeroRedundancyOptimizer(ddp.parameters(), kind, lr=lr, **options)


def stepped(device: str, make: Callable[[DistributedDataParallel], Any]) -> Values:
    ddp = ddp_of(device)
    optimizer = make(ddp)
    train(ddp, optimizer, batches(device))
    if isinstance(optimizer, fjoin.ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
    return values(ddp.module)


def zero_hooked(ddp: DistributedDataParallel) -> Any:
    """The optimizer steps in the backward passes."""
    optimizer = sharded(ddp, overlap_with_ddp=True)
    ddp.register_comm_hook(None, fjoin.ddp.hook_with_zero_step(allreduce_hook, ddp, optimizer))
    return optimizer


def scaled_by_torch(device: str) -> Values:
    """A GradScaler, with an overflow on rank 1 in the second step."""
    ddp = ddp_of(device)
    optimizer = sharded(ddp)
    scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)  # type: ignore[attr-defined]
    for i, batch in enumerate(batches(device)):
        optimizer.zero_grad()
        scaler.scale(loss(ddp, batch) * (torch.inf if i == dist.get_rank() == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return values(ddp.module) | {"scale": torch.tensor(scaler.get_scale())}


def averaged(device: str, averager: Any, post: bool = False) -> Values:
    """Rank r moves its own parameters; with `post` through PostLocalSGDOptimizer."""
    net = model(norm=True).to(device)
    inner = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    if post:
        train(net, fjoin.PostLocalSGDOptimizer(inner, averager), batches(device, 5))
    else:
        train(net, inner, batches(device, 5), lambda: averager.average_parameters(net.parameters()))
    return values(net)


def joined(device: str, make: Callable[[DistributedDataParallel], Any]) -> Values:
    """Uneven inputs of a DistributedDataParallel and an optimizer in our Join."""
    ddp = ddp_of(device)
    optimizer = make(ddp)
    with fjoin.Join([ddp, optimizer], divide_by_initial_world_size=False):
        train(ddp, optimizer, batches(device, 4 - 2 * dist.get_rank()))
    return values(ddp.module)


def counted(device: str) -> Values:
    """The example of torch's documentation: the number of inputs of all ranks."""
    counter = make_counter("fjoin", "fjoin", device)([])
    with fjoin.Join([counter], sync_max_count=True):
        for _ in range(3 - 2 * dist.get_rank()):
            counter()
    return {"count": counter.count.cpu()}


# -- loops -------------------------------------------------------------------------------------------------------------


def own_loop(device: str) -> Values:
    """A loop of one's own over uneven inputs, with a pure pipeline."""
    pipeline = tx.fuse(tx.error_feedback(tx.compress(tx.int8(block=4), tx.mean("data"))), ADAM)
    apply, params, _ = fjoin.functional(model().to(device))
    with fjoin.mesh({"data": -1}) as mesh, fjoin.bind(mesh):
        state = pipeline.init(params)
        loop = fjoin.join(batches(device, 4 - 2 * dist.get_rank()), mesh=mesh, weight=len)
        for batch in loop:
            grad_of = fjoin.value_and_grad(lambda p, x: apply(p, {}, x).square().mean())
            _, grads = grad_of(params, batch)
            params, state = pipeline.step(params, grads, state, weight=loop.weight)
    return {path: p.detach().to("cpu", copy=True) for path, p in params.items()}


def evaluated(device: str) -> Values:
    own = batches(device, 3 - dist.get_rank())
    found = fjoin.evaluate(
        lambda x: {"mean": x.mean(), "columns": x.mean(0), "sum": {"positive": (x > 0).sum()}}, own, weight=len
    )
    means = {name: torch.as_tensor(value).cpu() for name, value in found.means.items()}
    return means | {"positive": torch.tensor(found.sums["positive"]), "weight": torch.tensor(found.weight)}


def normalised(device: str) -> Values:
    """Batch statistics over all ranks, and values of the last rank with input."""
    x, channels = batches(device, 1)[0], torch.zeros(6, dtype=F64, device=device)
    with fjoin.mesh({"data": -1}) as mesh, fjoin.bind(mesh):
        y, state = tx.sync_batch_norm(x, BatchNormState(channels, channels + 1), axis="data", weight=1.0)
        last = tx.broadcast_from_last("data").post({"x": x}, dist.get_rank() == 0)["x"]
    return {"y": y.cpu(), "mean": state.mean.cpu(), "var": state.var.cpu(), "last": last.cpu()}


# -- checkpoints -------------------------------------------------------------------------------------------------------


def same_ends(uncut: Values, resumed: Values) -> Values:
    assert all(torch.equal(uncut[path], p) for path, p in resumed.items())
    return uncut


def resumed(device: str, folder: str, pipeline: Make, background: bool = False) -> Values:
    """Saved after two steps from the device; a step made anew goes on from there, as the uncut run to the bit."""
    apply, params, _ = fjoin.functional(model().to(device))
    data, ends = batches(device, 4), []
    with fjoin.mesh({"data": -1}) as mesh:
        for restores in (False, True):
            step = fjoin.train_step(
                lambda p, x: apply(p, {}, x).square().mean(), pipeline(), mesh=mesh, bucket_bytes=64
            )
            runs = fjoin.Checkpoints(folder, step, every=2, keep_last=None, background=background)
            state = runs.restore(params) if restores else step.init(params)
            for batch in data[state.step :]:
                state, metrics = step(state, batch)
                if not restores and state.step == 2:
                    runs.save(state, metrics)
                    runs.wait()
            assert all(p.device.type == device for p in state.params.values())
            ends.append({path: p.to("cpu", copy=True) for path, p in state.params.items()})
            step.close()
    return same_ends(*ends)


def objects(device: str, folder: str) -> Values:
    """A module and the state of its pipeline."""
    data, ends = batches(device, 4), []
    for restores in (False, True):
        ddp = ddp_of(device)
        parts: dict[str, Any] = {"model": ddp, "handle": fjoin.ddp.register(ddp, STEPS["zero"]())}
        done = fjoin.load(folder, parts) if restores else 0
        for i, batch in enumerate(data[done:], done):
            if not restores and i == 2:
                fjoin.save(folder, parts, 2)
            loss(ddp, batch).backward()
        ends.append(values(ddp.module))
    return same_ends(*ends)


# -- the table ---------------------------------------------------------------------------------------------------------

INTERFACES: dict[str, Callable[[str], Values]] = {
    **{
        f"registered: {name}": lambda device, row=row: registered(device, row[0](), **row[1])  # type: ignore[misc]
        for name, row in PIPELINES.items()
    },
    "Optimizer": lambda device: stepped(device, lambda ddp: fjoin.Optimizer(ddp.parameters(), ADAM)),
    "ZeroRedundancyOptimizer": lambda device: stepped(device, sharded), "GradScaler": scaled_by_torch,
    "ZeroRedundancyOptimizer in backward": lambda device: stepped(device, zero_hooked),
    "PeriodicModelAverager": lambda device: averaged(device, fjoin.PeriodicModelAverager(2)),
    "HierarchicalModelAverager": lambda device: averaged(device, fjoin.HierarchicalModelAverager({2: 2})),
    "PostLocalSGDOptimizer": lambda device: averaged(device, fjoin.PeriodicModelAverager(2), True),
    "Join": lambda device: joined(device, lambda ddp: torch.optim.SGD(ddp.parameters(), 0.1)),
    "Join, sharded": lambda device: joined(device, lambda ddp: sharded(ddp, torch.optim.SGD, 0.1)),
    "generic Join": counted, "own loop": own_loop, "evaluate": evaluated, "sync_batch_norm": normalised,
}  # fmt: skip


def cases(kind: str, folder: str) -> dict[str, Callable[[str], Values]]:
    if kind == "hooks":
        return {name: functools.partial(registered, what=hook) for name, hook in hooks().items()}
    if kind == "interfaces":
        return INTERFACES
    return {
        "mean": lambda device: resumed(device, f"{folder}/mean", STEPS["mean"]),
        "zero": lambda device: resumed(device, f"{folder}/zero", STEPS["zero"]),
        "DiLoCo, late": lambda device: resumed(device, f"{folder}/late", STEPS["DiLoCo, late"]),
        "in the background": lambda device: resumed(device, f"{folder}/behind", STEPS["zero"], True),
        "objects": lambda device: objects(device, f"{folder}/objects"),
    }


def runs(kind: str, device: str, folder: str) -> dict[str, Values]:
    """A rank's results of all cases of a kind."""
    Path(folder).mkdir(exist_ok=True)
    return all_of(cases(kind, folder), lambda case: case(device))


def known() -> dict[str, dict[str, Any]]:
    """What some cases must give, from one process with torch alone."""
    both = [batches("cpu", n, rank) for rank, n in enumerate((3, 2))]
    x, first = torch.cat([*both[0], *both[1]]), torch.cat([own[0] for own in both])
    one, data = model(), [batches("cpu", n, rank) for rank, n in enumerate((4, 2))]
    whole_batch.train(one, torch.optim.SGD(one.parameters(), 0.1), data, "live", loss)
    var, mean = torch.var_mean(first, 0)
    return {
        "evaluate": {"mean": x.mean(), "columns": x.mean(0), "positive": (x > 0).sum(), "weight": float(len(x))},
        "generic Join": {"count": 4.0},
        "sync_batch_norm": {"mean": 0.1 * mean, "var": 0.9 + 0.1 * var},
        "Join": values(one),
        "Join, sharded": values(one),
    }


def close(name: str, got: Values, want: dict[str, Any], **room: float) -> None:
    for path, x in want.items():
        expected = torch.as_tensor(x, dtype=F64).expand_as(got[path])
        torch.testing.assert_close(
            got[path].to(F64), expected, **room, msg=lambda text, path=path: f"{name}: {path}: {text}"
        )


@pytest.mark.long
@pytest.mark.parametrize("kind", ["interfaces", "checkpoints", "hooks"])
def test_they_have_the_results_of_the_cpu(ranks: tuple[str, Pool], pool: Pool, kind: str, tmp_path: Path) -> None:
    device, workers = ranks
    got = workers.run(2, runs, kind, device, str(tmp_path / device))
    want = got if device == "cpu" else pool.run(2, runs, kind, "cpu", str(tmp_path / "cpu"))
    for own, expected in zip(got, want, strict=True):
        assert own.keys() == expected.keys()
        for name, result in expected.items():
            assert {path: x.dtype for path, x in own[name].items()} == {path: x.dtype for path, x in result.items()}
            close(name, own[name], result, rtol=1e-4, atol=1e-6)
        for name, result in known().items() if kind == "interfaces" else ():
            close(name, own[name], result, rtol=1e-6, atol=1e-9)
