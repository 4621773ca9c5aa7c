"""Modules, torch's interfaces, loops and checkpoints on two ranks, for runs on several devices.

Each case takes a device and returns tensors by name, which depend on no device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.sync import BatchNormState
from tests.devices.step_cases import AFTER, LEFT_OUT, ON_BUFFERS
from tests.transform_table import TRANSFORMS

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


# -- fjoin.ddp.register -------------------------------------------------------------------------------------------------


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


ADAM = tx.adamw(0.05)
PIPELINES: dict[str, tuple[Callable[[], tx.Pipeline], dict[str, Any]]] = {
    "mean": (lambda: tx.fuse(tx.mean("data"), ADAM), {}),
    "one bucket": (lambda: tx.fuse(tx.mean("data"), ADAM), {"bucket_cap_mb": 25}),
    "views": (lambda: tx.fuse(tx.mean("data"), ADAM), {"gradient_as_bucket_view": True}),
    "static graph": (lambda: tx.fuse(tx.mean("data"), ADAM), {"static_graph": True}),
    "windows": (lambda: tx.fuse(tx.mean("data"), ADAM), {"window": 2}),
    "zero": (lambda: tx.zero(tx.mean("data"), ADAM, "data"), {}),
    "zero, clip": (lambda: tx.zero(tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.1)), ADAM, "data"), {}),
    "clip": (lambda: tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.1)), ADAM), {}),
    "left out": (lambda: tx.skip_if_nonfinite(tx.fuse(tx.mean("data"), ADAM)), {}),
    "loss scale": (lambda: tx.dynamic_loss_scale(tx.fuse(tx.mean("data"), ADAM), 8.0, growth_interval=2), {"scaled": True}),
    "local SGD": (lambda: tx.local_sgd(ADAM, tx.mean("data"), 2), {}),
    "DiLoCo, late": (lambda: tx.diloco(ADAM, tx.mean("data"), every=2, delay=1), {}),
}  # fmt: skip


def hooks() -> dict[str, tx.Transform]:
    """The rows of the table that are hooks over one axis."""
    found = {
        f"{name} {i}": make()
        for name, rows in TRANSFORMS.items() if name not in AFTER | ON_BUFFERS | LEFT_OUT for i, make in enumerate(rows)
    }  # fmt: skip
    return {name: hook for name, hook in found.items() if "'local'" not in repr(hook)}


# -- torch's interfaces -------------------------------------------------------------------------------------------------


def stepped(device: str, make: Callable[[DistributedDataParallel], Any], n: int = 3) -> Values:
    ddp = ddp_of(device)
    optimizer = make(ddp)
    for batch in batches(device, n):
        optimizer.zero_grad()
        loss(ddp, batch).backward()
        optimizer.step()
    if isinstance(optimizer, fjoin.ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
    return values(ddp.module)


def zero_hooked(ddp: DistributedDataParallel) -> Any:
    """The optimizer steps in the backward passes."""
    zero = fjoin.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.05)
    ddp.register_comm_hook(None, fjoin.ddp.hook_with_zero_step(allreduce_hook, ddp, zero))
    return zero


def scaled_by_torch(device: str) -> Values:
    """A GradScaler, with an overflow on rank 1 in the second step."""
    ddp = ddp_of(device)
    optimizer = fjoin.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.05)
    scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)  # type: ignore[attr-defined]
    for i, batch in enumerate(batches(device)):
        optimizer.zero_grad()
        scaler.scale(loss(ddp, batch) * (torch.inf if i == dist.get_rank() == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return values(ddp.module) | {"scale": torch.tensor(scaler.get_scale())}


def averaged(device: str, make: Callable[[], Any], post: bool = False) -> Values:
    """Rank r moves its own parameters; with `post` through PostLocalSGDOptimizer."""
    net = model(norm=True).to(device)
    inner = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    optimizer: Any = fjoin.PostLocalSGDOptimizer(inner, make()) if post else inner
    averager = None if post else make()
    for batch in batches(device, 5):
        optimizer.zero_grad()
        loss(net, batch).backward()
        optimizer.step()
        if averager is not None:
            averager.average_parameters(net.parameters())
    return values(net)


def joined(device: str, sharded: bool = False) -> Values:
    """Uneven inputs of a DistributedDataParallel and an optimizer in our Join."""
    ddp = ddp_of(device)
    optimizer: Any = (
        fjoin.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
        if sharded
        else torch.optim.SGD(ddp.parameters(), 0.1)
    )
    with fjoin.Join([ddp, optimizer], divide_by_initial_world_size=False):
        for batch in batches(device, 4 - 2 * dist.get_rank()):
            optimizer.zero_grad()
            loss(ddp, batch).backward()
            optimizer.step()
    return values(ddp.module)


class Counter(fjoin.Joinable):
    """The example of torch's documentation: the number of inputs of all ranks."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.count = torch.device(device), torch.zeros(1, device=device)

    def __call__(self) -> None:
        fjoin.Join.notify_join_context(self)
        ones = torch.ones(1, device=self.device)
        dist.all_reduce(ones)
        self.count += ones

    def join_hook(self, **kwargs: Any) -> Any:
        counter = self

        class Hook(fjoin.JoinHook):
            def main_hook(self) -> None:
                dist.all_reduce(torch.zeros(1, device=counter.device))

            def post_hook(self, is_last_joiner: bool) -> None:
                last = torch.tensor([dist.get_rank() if is_last_joiner else -1], device=counter.device)
                dist.all_reduce(last, op=dist.ReduceOp.MAX)
                dist.broadcast(counter.count, src=int(last))

        return Hook()

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


def counted(device: str) -> Values:
    counter = Counter(device)
    with fjoin.Join([counter]):
        for _ in range(3 - 2 * dist.get_rank()):
            counter()
    return {"count": counter.count.cpu()}


# -- loops --------------------------------------------------------------------------------------------------------------


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


# -- checkpoints --------------------------------------------------------------------------------------------------------


def resumed(device: str, folder: str, pipeline: Callable[[], tx.Pipeline], background: bool = False) -> Values:
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
    assert all(torch.equal(ends[0][path], p) for path, p in ends[1].items())
    return ends[0]


def objects(device: str, folder: str) -> Values:
    """A module and the state of its pipeline."""
    data, ends = batches(device, 4), []
    for restores in (False, True):
        ddp = ddp_of(device)
        parts: dict[str, Any] = {
            "model": ddp,
            "handle": fjoin.ddp.register(ddp, tx.zero(tx.mean("data"), ADAM, "data")),
        }
        done = fjoin.load(folder, parts) if restores else 0
        for i, batch in enumerate(data[done:], done):
            if not restores and i == 2:
                fjoin.save(folder, parts, 2)
            loss(ddp, batch).backward()
        ends.append(values(ddp.module))
    assert all(torch.equal(ends[0][path], p) for path, p in ends[1].items())
    return ends[0]


PERIODIC, LEVELS = lambda: fjoin.PeriodicModelAverager(2), lambda: fjoin.HierarchicalModelAverager({2: 2})
INTERFACES: dict[str, Callable[[str], Values]] = {
    **{f"registered: {name}": lambda device, row=row: registered(device, row[0](), **row[1]) for name, row in PIPELINES.items()},  # type: ignore[misc]
    "Optimizer": lambda device: stepped(device, lambda ddp: fjoin.Optimizer(ddp.parameters(), ADAM)),
    "ZeroRedundancyOptimizer": lambda device: stepped(
        device, lambda ddp: fjoin.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.05)
    ),
    "ZeroRedundancyOptimizer in backward": lambda device: stepped(device, zero_hooked),
    "GradScaler": scaled_by_torch,
    "PeriodicModelAverager": lambda device: averaged(device, PERIODIC),
    "HierarchicalModelAverager": lambda device: averaged(device, LEVELS),
    "PostLocalSGDOptimizer": lambda device: averaged(device, PERIODIC, True),
    "Join": joined,
    "Join, sharded": lambda device: joined(device, True),
    "generic Join": counted,
    "own loop": own_loop,
    "evaluate": evaluated,
    "sync_batch_norm": normalised,
}  # fmt: skip


def runs(kind: str, device: str, folder: str) -> dict[str, Values]:
    """A rank's results of all cases of a kind."""
    cases: dict[str, Callable[[str], Values]] = {
        "interfaces": INTERFACES,
        "checkpoints": {
            "mean": lambda device: resumed(device, f"{folder}/mean", PIPELINES["mean"][0]),
            "zero": lambda device: resumed(device, f"{folder}/zero", PIPELINES["zero"][0]),
            "DiLoCo, late": lambda device: resumed(device, f"{folder}/late", PIPELINES["DiLoCo, late"][0]),
            "in the background": lambda device: resumed(device, f"{folder}/behind", PIPELINES["zero"][0], True),
            "objects": lambda device: objects(device, f"{folder}/objects"),
        },
        "hooks": {name: lambda device, hook=hook: registered(device, hook) for name, hook in hooks().items()},  # type: ignore[misc]
    }[kind]
    Path(folder).mkdir(exist_ok=True)
    out = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, case in cases.items():
            try:
                out[name] = case(device)
            except BaseException as error:
                error.add_note(f"in the case {name!r}")
                raise
    return out
