"""A loss that communicates, on batches of other sizes: the gradient of one process, whatever reduces it, or a refusal.

The backward pass of a collective adds up the ranks' losses, so each must have its weight before.
"""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.sync import BatchNormState
from tests.helpers import max_diff, or_text, raises_text, same_bits, seen_by, stepped
from tests.oracle import whole_batch as oracle
from tests.training.small import product, step_of
from tests.transform_table import TRANSFORMS

SIZES = {2: [6, 2], 4: [6, 2, 3, 5]}
TWO, FOUR = {"data": 2}, {"node": 2, "local": 2}


def _reduces(make: Any) -> bool:
    hook = make()
    return hook.is_reducing and not hook.facts.pauses and "accumulate" not in repr(hook) and hook.spec.name not in OUTER


OUTER = ("average_parameters", "outer_step", "average_buffers", "broadcast_buffers", "ema", "from_optax")
EXTRA = [
    lambda: tx.chain(tx.mean("local"), tx.mean("node")),
    lambda: tx.chain(tx.tap(len), tx.record_norm(), tx.identity(), tx.mean("data")),
    lambda: tx.masked(tx.mean("data"), "*"),
    lambda: tx.switch_after(9, tx.mean("data"), tx.sum_over("data")),
    lambda: tx.partition({"layer.*": tx.mean("data"), "*": tx.mean("data", over="live")}),
    lambda: tx.chain(tx.clip_by_global_norm(0.5), tx.mean("data")),
    lambda: tx.chain(tx.masked(tx.mean("data"), "scale"), tx.clip_by_value(0.5), tx.masked(tx.mean("data"), "l*")),
    lambda: tx.chain(tx.mean("local"), tx.clip_by_value(0.5), tx.mean("node")),
]
# By repr: those that reduce in their first step.
HOOKS = {repr(make()): make for rows in TRANSFORMS.values() for make in rows if _reduces(make)}
HOOKS |= {repr(make()): make for make in EXTRA}
LATER = ("every(2", "switch_after(2", "masked(every")
HOOKS = {name: make for name, make in HOOKS.items() if not name.startswith(LATER) and "from_optax" not in name}
# Gradients that are changed before they are reduced, or counted in two ways: where weights differ there is no right answer.
REFUSED = (
    {
        name: "put it behind the reduction"
        for name in HOOKS
        if re.search(r"chain\((clip|stateless)", name) and "over='live'" not in name
    }
    | {repr(EXTRA[4]()): "take over='weight'"}
    | {repr(EXTRA[i]()): "put it behind" for i in (6, 7)}
)


def axes_of(name: str) -> dict[str, int]:
    return FOUR if "local" in name else TWO


def factors_of(name: str) -> list[float]:
    """By which the ranks' losses count."""
    first = re.search(r"(mean|sum_over|power_sgd)\([^()]*(\{[^}]*\})?[^()]*\)", name)
    assert first is not None
    counts_ranks = "over='live'" in first[0] or "over='world'" in first[0]
    sizes = SIZES[math.prod(axes_of(name).values())]
    return [1.0] * len(sizes) if counts_ranks else [float(n) for n in sizes]


def right_gradients(name: str, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """By rank: what its weight times it adds to the gradient of all; plain torch has computed them over all ranks at once."""
    factors = factors_of(name)
    own = oracle.own_gradients(oracle.batches(SIZES[len(factors)]), factors, dtype)
    return [{k: g / f for k, g in of.items()} for of, f in zip(own, factors, strict=True)]


def expected(name: str, dtype: torch.dtype, scaled: bool = False) -> dict[str, Tensor]:
    """What the hook makes of the right gradients.

    Args:
        scaled: Whether the loss has been multiplied by weight * ranks / sum of the weights, and all ranks count alike.
    """
    axes, hook = axes_of(name), HOOKS[name]()
    sizes = SIZES[math.prod(axes.values())]
    scales = [n * len(sizes) / sum(sizes) for n in sizes]
    own = oracle.own_gradients(oracle.batches(sizes), scales, dtype) if scaled else right_gradients(name, dtype)

    def one_rank(grads: Any, n: int) -> Any:
        return hook.update(grads, hook.init(oracle.start(dtype)), oracle.start(dtype), weight=None if scaled else n)[0]

    found: dict[str, Tensor] = tx.simulate(one_rank, axes, own, sizes)[0]
    return found


def loss_fn(axes: Any, dtype: torch.dtype) -> Any:
    def normalize(hidden: Tensor) -> Tensor:
        nothing = torch.zeros(4).to(hidden), torch.ones(4).to(hidden)
        return tx.sync_batch_norm(hidden, nothing, axis=tuple(axes))[0]

    return lambda params, batch: oracle.loss_of(params, batch, normalize)


def displaced(
    loss: Any, pipeline: tx.Pipeline, batches: Any, dtype: torch.dtype = torch.float64, mesh: Any = None, accumulate: int = 1,
    replays: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """What the steps of a train_step have moved the parameters by, backwards."""
    start = oracle.start(dtype)
    step = fjoin.train_step(loss, pipeline, mesh=mesh, weight=lambda b: len(b[0]), accumulate=accumulate)
    more = step.join(batches, when_exhausted="replay", empty=oracle.batches([1])[0]) if replays else batches
    state = stepped(step, step.init(start), more)
    found = {path: start[path] - p.detach() for path, p in state.params.items()}
    step.close()
    return found


def moved(name: str, rank: int, dtype: torch.dtype, grads: Any = None) -> dict[str, Tensor]:
    """The gradient that a train_step has used: its displacement with a learning rate of 1.

    Args:
        grads: The gradients of a loss that does not communicate; None: of one that does.
    """
    axes = axes_of(name)
    loss = loss_fn(axes, dtype) if grads is None else lambda p, b: sum((p[k] * g).sum() for k, g in grads.items())
    mesh = fjoin.mesh(axes, timeout_s=30)
    return displaced(loss, tx.fuse(HOOKS[name](), tx.sgd(1.0)), [oracle.batches(SIZES[mesh.size])[rank]], dtype, mesh)


def in_own_loop(name: str, rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    axes = axes_of(name)
    pipeline, mesh, params = tx.fuse(HOOKS[name](), tx.sgd(1.0)), fjoin.mesh(axes), oracle.start(dtype)
    state, loss = pipeline.init(params), loss_fn(axes, dtype)
    with fjoin.bind(mesh):
        loop = fjoin.join([oracle.batches(SIZES[mesh.size])[rank]], mesh=mesh, weight=lambda b: len(b[0]))
        for batch in loop:
            _, grads = fjoin.value_and_grad(lambda p, b: loss(p, b) * loop.scale)(params, batch)
            params, state = pipeline.step(params, grads, state)
    return {path: oracle.start(dtype)[path] - p for path, p in params.items()}


def is_near(got: dict[str, Tensor], want: dict[str, Tensor], name: str, dtype: torch.dtype) -> bool:
    """To the precision of the parameters, or of a codec that is given other last bits."""
    loose = 2e-2 if dtype.itemsize < 4 else 1e-5 if dtype is torch.float32 or "compress" in name else 1e-12
    size = max(float(w.abs().max()) for w in want.values())
    return all(float((got[path].double() - w.double()).abs().max()) <= loose * size for path, w in want.items())


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", HOOKS)
def test_a_step_is_that_of_the_right_gradients(name: str, dtype: torch.dtype) -> None:
    axes, right = axes_of(name), right_gradients(name, dtype)

    def run(grads: Any) -> Any:
        return tx.simulate(lambda rank, own: moved(name, rank, dtype, own), axes, range(len(right)), grads)[0]

    if name in REFUSED:
        words = "has communicated", "the ranks' weights differ", REFUSED[name]
        raises_text(ValueError, lambda: run([None] * len(right)), *words)
    else:
        # In a step too, since a codec may depend on the layout of the buckets.
        assert is_near(run([None] * len(right)), run(right), name, dtype)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", HOOKS)
def test_a_loop_of_ones_own_scales_its_loss(name: str) -> None:
    axes, dtype = axes_of(name), torch.float64
    got = tx.simulate(lambda rank: in_own_loop(name, rank, dtype), axes, range(math.prod(axes.values())))[0]
    assert is_near(got, expected(name, dtype, scaled=True), name, dtype)


LOSSLESS = ["mean('data')", "hierarchical_mean('local', 'node')", "masked(mean('data'), '*')"]


@pytest.mark.parametrize("name", LOSSLESS)
def test_the_right_gradients_have_the_mean_of_one_process(name: str) -> None:
    of_all = oracle.gradient_of_all(oracle.batches(SIZES[math.prod(axes_of(name).values())]), torch.float64)
    assert is_near(expected(name, torch.float64), of_all, "", torch.float64)


# -- other programs ----------------------------------------------------------------------------------

STAGED = tx.masked(tx.mean("data"), "*")  # it runs as any hook that is no plain mean
PROGRAMS: dict[str, Any] = {
    "ZeRO": lambda: tx.zero(tx.mean("data"), tx.sgd(1.0), "data"),
    "loss scale": lambda: tx.dynamic_loss_scale(tx.fuse(STAGED, tx.sgd(1.0)), init_scale=8.0),
    "loss scale, mean": lambda: tx.dynamic_loss_scale(tx.fuse(tx.mean("data"), tx.sgd(1.0)), init_scale=8.0),
}
WRAPPED: dict[str, Any] = {
    "as it is": lambda f: f,
    "remat": lambda f: tx.remat(f),
    "checkpoint": lambda f: lambda p, b: torch.utils.checkpoint.checkpoint(f, p, b, use_reentrant=False),
    "with metrics": lambda f: lambda p, b: (f(p, b), {"seen": tx.psum(torch.tensor(len(b[0])), "data")}),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("program", ["masked", *PROGRAMS])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_other_programs(program: str, wrapped: str, accumulate: int) -> None:
    """With a third rank that has no input, and windows of several calls."""
    sizes, dtype = [[6, 2, 0], [3, 4, 0]][:accumulate], torch.float64
    make = PROGRAMS.get(program, lambda: tx.fuse(STAGED, tx.sgd(1.0)))

    def one_rank(rank: int) -> Any:
        own = [oracle.batches(some)[rank] for some in sizes if some[rank]]
        return displaced(WRAPPED[wrapped](loss_fn(TWO, dtype)), make(), own, accumulate=accumulate, replays=True)

    calls = [(oracle.batches(some[:2]), [n / sum(map(sum, sizes)) for n in some[:2]]) for some in sizes]
    parts = [g for of_ranks, shares in calls for g in oracle.own_gradients(of_ranks, shares, dtype)]
    want = {path: sum(part[path] for part in parts) for path in parts[0]}
    for got in tx.simulate(one_rank, {"data": 3}, [0, 1, 2]):
        assert is_near(got, want, "", dtype)  # type: ignore[arg-type]


def test_a_loss_of_16_bits_carries_powers_of_two_alone() -> None:
    def run(rank: int, sizes: list[int], name: str) -> Any:
        of_32, pipeline = loss_fn(TWO, torch.bfloat16), tx.fuse(HOOKS[name](), tx.sgd(1.0))
        return displaced(lambda p, b: of_32(p, b).bfloat16(), pipeline, [oracle.batches(sizes)[rank]], torch.bfloat16)

    for name in ("mean('data')", "masked(mean('data'), '*')"):
        raises_text(
            ValueError,
            lambda name=name: tx.simulate(lambda r: run(r, [6, 2], name), TWO, [0, 1]),  # type: ignore[misc]
            "this rank's weight, 6.0", "return the loss as float32",
        )  # fmt: skip
        got = tx.simulate(lambda r, name=name: run(r, [8, 2], name), TWO, [0, 1])[0]  # type: ignore[misc]
        assert is_near(got, oracle.gradient_of_all(oracle.batches([8, 2]), torch.bfloat16), "", torch.bfloat16)


def test_a_weight_that_comes_behind_the_gradient_is_refused() -> None:
    dtype = torch.float64

    def one_rank(rank: int, weight: Any, by_hook: bool, detached: bool) -> None:
        loss, params, hook = loss_fn(TWO, dtype), oracle.start(dtype), tx.mean("data")
        batch = oracle.batches([6, 2])[rank]
        normalized = (
            loss if not detached else lambda p, b: oracle.loss_of(p, b, lambda h: h - tx.pmean(h[0].detach(), "data"))
        )
        _, grads = fjoin.value_and_grad(normalized)(params, batch)
        if by_hook:
            hook.update(grads, hook.init(params), weight=weight and weight[rank])
        else:
            pipeline = tx.fuse(hook, tx.sgd(1.0))
            params, state = pipeline.step(params, grads, pipeline.init(params), weight=weight and weight[rank])
            pipeline.step(params, grads, state, weight=3.0)  # of gradients that have been looked at

    def run(weight: Any, by_hook: bool, detached: bool = False) -> None:
        tx.simulate(lambda rank: one_rank(rank, weight, by_hook, detached), TWO, [0, 1])

    for by_hook in (False, True):
        for weight in ([6, 2], [1, 0], [torch.tensor(6.0), 2]):
            raises_text(ValueError, lambda: run(weight, by_hook), "comes too late", "['data']", "loop.scale")  # noqa: B023
        for allowed, detached in ((None, False), ([1, 1], False), ([6, 2], True)):
            run(allowed, by_hook, detached)


def test_steps_that_are_differentiated_through_have_their_weights() -> None:
    """They are a part of an outer loss, whose own gradients have communicated."""
    pipeline = tx.fuse(tx.mean("data"), tx.sgd(0.5))

    def one_rank(x: Tensor, weight: float) -> Any:
        def outer(params: Any) -> Tensor:
            state = pipeline.init(params)
            for _ in range(2):
                params, state = pipeline.step(params, {"w": params["w"] * x}, state, weight=weight)
            return params["w"].square()

        start = {"w": torch.tensor(1.0)}
        by_func = torch.func.grad(outer)(start)
        _, by_autograd = fjoin.value_and_grad(outer)(start)
        raises_text(
            ValueError, lambda: pipeline.step(start, by_autograd, pipeline.init(start), weight=weight), "too late"
        )
        return by_func["w"].item(), by_autograd["w"].item()

    own = torch.ones(2, requires_grad=True)  # both ranks' parameters
    new = own
    for _ in range(2):
        new = new - 0.5 * (new * torch.tensor([0.25 * 1.0, 0.75 * 3.0])).sum()
    (want,) = torch.autograd.grad(new.square().sum(), own)
    found = tx.simulate(one_rank, TWO, torch.tensor([1.0, 3.0]), [2.0, 6.0])
    assert found == [pytest.approx((w, w)) for w in want.tolist()]


def on_processes(name: str, transport: str, sizes: list[int], compiles: bool = False) -> Any:
    mesh = fjoin.mesh({"data": -1}, timeout_s=30, transport=transport)  # type: ignore[arg-type]
    loss: Any = loss_fn(TWO, torch.float64)
    loss = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiles else loss
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.compile itself
        own = [oracle.batches(sizes)[mesh.rank]]
        return or_text(lambda: displaced(loss, tx.fuse(HOOKS[name](), tx.sgd(1.0)), own, mesh=mesh))


@pytest.mark.parametrize(("transport", "name", "compiles"), [
    ("gloo", "masked(mean('data'), '*')", True), ("gloo", "mean('data')", False), ("shared", "masked(mean('data'), '*')", False),
])  # fmt: skip
def test_on_processes(pool: Any, transport: str, name: str, compiles: bool) -> None:
    sizes = [1, 2, 3]
    want = oracle.gradient_of_all(oracle.batches(sizes), torch.float64)
    got = pool.run(3, on_processes, name, transport, sizes, compiles)
    assert all(is_near(one, want, "", torch.float64) for one in got)
    for got in pool.run(3, on_processes, repr(EXTRA[5]()), transport, sizes) if not compiles else ():
        assert "the ranks' weights differ" in got  # the rank with the mean of the weights learns it from the others


# -- a registered module -------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4).to(dtype)
        self.scale, self.head = (torch.nn.Parameter(oracle.start(dtype)[path]) for path in ("scale", "head"))
        with torch.no_grad():
            for path, p in self.layer.named_parameters():
                p.copy_(oracle.start(dtype)[f"layer.{path}"])

    def forward(self, axes: Any, batch: Any) -> Tensor:
        found: Tensor = loss_fn(axes, self.scale.dtype)(dict(self.named_parameters()), batch)
        return found


def in_module(name: str, dtype: torch.dtype, how: str, fused: bool) -> Any:
    axes, rank = axes_of(name), dist.get_rank()
    model = DistributedDataParallel(Net(dtype))
    mesh = fjoin.mesh(axes)
    hook = HOOKS[name]()
    what = tx.fuse(hook, tx.sgd(1.0)) if fused else hook
    handle = fjoin.ddp.register(model, what, mesh if len(axes) > 1 else None)
    batch = oracle.batches(SIZES[mesh.size])[rank]
    x, y = (part.split(len(part) // 2) for part in batch)

    def run() -> Any:
        if how == "weight":
            handle.weight(len(batch[0]))
            model(axes, batch).backward()
        elif how == "scale":
            handle.scale(model(axes, batch), len(batch[0])).backward()
        else:
            with model.no_sync():
                handle.scale(model(axes, (x[0], y[0])), len(x[0])).backward()
            handle.scale(model(axes, (x[1], y[1])), len(x[1])).backward()
        start = oracle.start(dtype)
        return {path: start[path] - p.detach() if fused else p.grad for path, p in model.module.named_parameters()}

    with fjoin.bind(mesh):
        return or_text(run)


# A hook, and whether a pipeline steps with it.
IN_MODULE = [
    ("mean('data')", True), ("mean('data')", False), ("mean('data', over='live')", True), ("sum_over('data')", False),
    ("compress(int8(block=4), mean('data'))", True), ("power_sgd('data', min_compression_rate=1.0)", True),
    ("error_feedback(compress(torch.bfloat16, mean('data', over='world')))", False), ("masked(mean('data'), '*')", False),
    ("partition({'layer.*': mean('data'), '*': sum_over('data')})", True), ("hierarchical_mean('local', 'node')", True),
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "fused"), IN_MODULE)
def test_a_module_takes_losses_that_carry_their_weight(pool: Any, name: str, fused: bool) -> None:
    ranks = math.prod(axes_of(name).values())
    dtype = torch.bfloat16 if name == "mean('data')" and fused else torch.float64
    want = expected(name, dtype)
    assert all(is_near(got, want, name, dtype) for got in pool.run(ranks, in_module, name, dtype, "scale", fused))
    for got in pool.run(ranks, in_module, name, dtype, "weight", fused):
        if "over=" in name:  # which counts ranks
            assert is_near(got, want, name, dtype)
        else:
            assert got.startswith("DesyncError") and "write handle.scale(loss, weight).backward()" in got


def test_a_module_refuses_stages_that_change_gradients_first(pool: Any) -> None:
    name = "chain(clip_by_value(0.5), sum_over('data'))"
    for got in pool.run(2, in_module, name, torch.float64, "scale", True):
        assert got.startswith("DesyncError") and "put it behind the reduction" in got


def test_the_losses_of_a_window_carry_their_own_weights(pool: Any) -> None:
    halves = [[(x.split(len(x) // 2)[i], y.split(len(y) // 2)[i]) for x, y in oracle.batches([6, 2])] for i in (0, 1)]
    parts = [g for of_ranks in halves for g in oracle.own_gradients(of_ranks, [3 / 8, 1 / 8], torch.float64)]
    want = {path: sum(part[path] for part in parts) for path in parts[0]}
    for name in ("mean('data')", "masked(mean('data'), '*')"):
        for got in pool.run(2, in_module, name, torch.float64, "window", True):
            assert is_near(got, want, name, torch.float64)  # type: ignore[arg-type]


def given_twice() -> None:
    handle = fjoin.ddp.register(DistributedDataParallel(Net(torch.float64)), tx.mean("data"))
    raises_text(ValueError, lambda: handle.scale(torch.tensor(1.0), -1.0), "weight")
    handle.weight(2.0)
    loss = torch.tensor(1.0, requires_grad=True)
    raises_text(ValueError, handle.scale(loss, 2.0).backward, "has the weight 2.0 already")
    raises_text(TypeError, lambda: handle.scale(torch.tensor(1.0)), "handle.scale(loss, weight)")


def test_a_pass_has_one_weight(pool: Any) -> None:
    pool.run(1, given_twice)


def of_torch(how: str) -> Any:
    """A module with torch's own layer, which runs on GPUs alone; its collectives are not fjoin's."""
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 1)))
    model.module.unused = torch.nn.SyncBatchNorm(2, affine=False)  # which torch refuses earlier on CPUs
    model.module.forward = model.module[0].forward
    handle = fjoin.ddp.register(model, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    weight, loss = 2.0 + (dist.get_rank() if how != "equal" else 0), model(torch.ones(1, 2)).sum()
    if how != "scale":
        handle.weight(weight)
    return or_text((handle.scale(loss, weight) if how == "scale" else loss).backward)


def test_weights_beside_a_layer_of_torch_that_communicates_are_refused(pool: Any) -> None:
    assert all("write handle.scale(loss, weight)" in text for text in pool.run(2, of_torch, "weight"))
    for how in ("equal", "scale"):
        assert pool.run(2, of_torch, how) == [None] * 2


def in_two_ways() -> Any:
    """One rank's loss carries its weight, and the other's does not."""
    model, mesh = DistributedDataParallel(Net(torch.float64)), fjoin.mesh(TWO, timeout_s=20)
    handle = fjoin.ddp.register(model, tx.fuse(tx.mean("data"), tx.sgd(1.0)))
    with fjoin.bind(mesh):
        loss = model(TWO, oracle.batches([6, 2])[mesh.rank])
        if mesh.rank:
            handle.weight(2.0)
        else:
            handle.scale(loss, 9.0)  # not used: it does not count
            loss = handle.scale(loss, 6.0)
        return or_text(loss.backward)


def test_one_loss_with_its_weight_beside_one_without_is_refused(pool: Any) -> None:
    assert all("weight=" in text and "mixed the ranks' losses" in text for text in pool.run(2, in_two_ways))


def test_a_window_communicates_from_its_first_call_on() -> None:
    def one_rank(rank: int) -> None:
        communicates = loss_fn(TWO, torch.float64)

        def loss(params: Any, batch: Any) -> Tensor:
            return communicates(params, batch) if tx.current_call() else oracle.loss_of(params, batch, lambda h: h)

        displaced(loss, tx.fuse(STAGED, tx.sgd(1.0)), [oracle.batches([6, 2])[rank]] * 2, accumulate=2)

    raises_text(ValueError, lambda: tx.simulate(one_rank, TWO, [0, 1]), "not in the first one")


# -- batch normalization over all ranks, in a loop that replays --

F64 = torch.float64


def inputs(sizes: list[int], seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 4, generator=g, dtype=F64) * 3 + 100 for n in sizes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batch_norm_of_16_bits_is_computed_in_32(dtype: torch.dtype) -> None:
    x = (torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) + 100.2).to(dtype)
    want = nn.functional.batch_norm(x.double(), None, None, training=True)
    state = BatchNormState(torch.zeros(4), torch.ones(4))
    with fjoin.bind(fjoin.mesh({"data": -1})):
        y, new = tx.sync_batch_norm(x, state, torch.ones(4), torch.zeros(4), axis="data")
    assert y.dtype == dtype and new.mean.dtype == torch.float32
    assert (y.double() - want).abs().max() < 8 * torch.finfo(dtype).eps


# -- in a step ---------------------------------------------------------------------------------------


def normed_loss(params: Any, buffers: Any, batch: Tensor) -> Any:
    state = BatchNormState(buffers["mean"], buffers["var"])
    y, new = tx.sync_batch_norm(batch @ params["w"], state, params["scale"], params["bias"], axis="data")
    return (torch.tanh(y) @ params["v"]).square().mean(), None, {"mean": new.mean, "var": new.var}


def train(batches: list[Tensor], window: int = 1) -> Any:
    g = torch.Generator().manual_seed(3)
    shapes = {"w": (4, 4), "scale": (4,), "bias": (4,), "v": (4,)}
    params = {path: torch.randn(s, generator=g, dtype=F64) for path, s in shapes.items()}
    buffers, mesh = {"mean": torch.zeros(4, dtype=F64), "var": torch.ones(4, dtype=F64)}, fjoin.mesh({"data": -1})
    pipeline = tx.fuse(tx.mean("data"), tx.adamw(0.05))
    step, state = step_of(
        normed_loss, pipeline, params, buffers, weight=len, mesh=mesh, accumulate=window, bucket_bytes=100
    )
    for batch in step.join(batches, when_exhausted="replay", empty=torch.ones(2, 4, dtype=F64)):
        state, metrics = step(state, batch)
    return {k: p.clone() for k, p in state.params.items()}, dict(state.buffers or {}), metrics.loss


@pytest.mark.parametrize(("sizes", "window"), [([[3, 2, 4], [5]], 1), ([[], [2, 3], [4, 1]], 2)], ids=str)
def test_training_with_batch_norm_on_uneven_inputs(pool: Any, sizes: list[list[int]], window: int) -> None:
    """One process on the ranks' batches together computes the same, running statistics included."""
    given = [inputs(own, seed=7 + rank) for rank, own in enumerate(sizes)]
    most = max(map(len, sizes))
    whole = [torch.cat([own[i] for own in given if i < len(own)]) for i in range(most)]
    ((params, buffers, loss),) = tx.simulate(lambda b: train(b, window), {"data": 1}, [whole])
    simulated = tx.simulate(lambda b: train(b, window), {"data": len(sizes)}, given)
    real = pool.each(train, given, window)
    for own, stats, own_loss in simulated + real:
        assert max_diff(own, params) < 1e-12 and max_diff(stats, buffers) < 1e-11
        assert abs(own_loss - loss) < 1e-12 or own_loss != own_loss
    assert all(same_bits(one[:2], simulated[0][:2]) for one in simulated)
    assert all(same_bits(one[:2], real[0][:2]) for one in real)


def test_replayed_batches_do_not_count() -> None:
    """Loss, gradients and sums of a replayed batch are ignored, even if they are NaN."""

    def one_rank(batches: list[float]) -> Any:
        weights = []

        def loss(params: Any, batch: float) -> Any:
            weights.append(tx.current_weight())
            total = tx.psum(torch.tensor(1.0), "data")  # every rank is here
            return product(params, batch) * total / total, {"sum": {"calls": 1}}

        def look(state: Any, metrics: Any) -> Any:
            return metrics.sums["calls"], metrics.weight, metrics.aux is None, float(state.params["w"][0])

        step, state = step_of(loss)
        return seen_by(look, step, state, step.join(batches, when_exhausted="replay", empty=float("nan"))), weights

    (a, wa), (b, wb), (c, wc) = tx.simulate(one_rank, {"data": 3}, [[1.0, 2.0], [3.0], []])
    assert a[-1][3] == b[-1][3] == c[-1][3] == pytest.approx(1 - 0.1 * (2 + 2))
    assert [s[:2] for s in a] == [(2, 2), (1, 1)] and [s[2] for s in b] == [False, True]
    assert (wa, wb, wc) == ([1.0, 1.0], [1.0, 0.0], [0.0, 0.0])


def test_replay_raises_on_a_bad_mode_or_a_missing_batch() -> None:
    step, _ = step_of()
    raises_text(ValueError, lambda: next(iter(step.join([1.0], when_exhausted="repeat"))), "'shadow' or 'replay'")

    def one_rank(n: int) -> None:
        step, state = step_of()
        stepped(step, state, step.join([torch.ones(2)] * n, when_exhausted="replay"))

    raises_text(
        fjoin.NoBatch,
        lambda: tx.simulate(one_rank, {"data": 2}, [1, 0]),
        "runs the model on every rank",
        "empty=a_batch",
    )
