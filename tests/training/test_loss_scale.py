"""Dynamic loss scaling: torch's scale, the same steps left out on all ranks, gradients that float16 would lose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fjoin
from fjoin import transforms as tx
from fjoin.ddp._module_params import ScaledLoss
from tests.helpers import judged, max_diff, raises_text, same_bits, seen_by, stepped
from tests.oracle import optim
from tests.training.small import product, step_of

INF, NAN = float("inf"), float("nan")
X = torch.ones(2)
OPTIONS: list[dict[str, Any]] = [
    {"init_scale": 16.0, "growth_interval": 3},
    {"init_scale": 1024.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 1},
    {"init_scale": 2.0**126, "growth_interval": 2},  # grows no more once it would be infinite
    {"init_scale": 10.0, "growth_factor": 1.5, "backoff_factor": 0.7, "growth_interval": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_scale_matches_torch_grad_scaler(options: dict[str, Any]) -> None:
    g = torch.Generator().manual_seed(0)
    grads = [torch.randn(4, generator=g) for _ in range(30)]
    for i, bad in ((3, INF), (4, NAN), (11, -INF), (20, NAN)):
        grads[i][i % 4] = bad
    pipeline = tx.dynamic_loss_scale(tx.fuse(tx.identity(), tx.sgd(0.1, momentum=0.9)), **options)
    p = {"p": torch.ones(4)}
    state, params, scales = pipeline.init(p), [], []
    for g_ in grads:
        p, state = pipeline.step(p, {"p": g_ * state.scale}, state)
        params.append(p["p"])
        scales.append(state.scale.item())
    want, want_scales = optim.run_scaled(torch.ones(4), grads, 0.1, **options)
    assert scales == want_scales and len(set(scales)) > 1 and state.skipped >= 4
    assert max_diff(params, want) <= 1e-6


def half_loss(params: Any, batch: Tensor) -> Tensor:
    """In float16 on the way: a gradient below 6e-8 is lost, one above 65504 is infinite."""
    return (params["w"].half() * batch.half()).sum().float() * 1e-9 + (params["v"] * batch).sum()


MEAN, CLIP = tx.mean("data"), tx.clip_by_value(1e6)
CLIPPED = tx.chain(CLIP, MEAN, tx.clip_by_global_norm(1e5))


def test_small_gradients_survive_in_float16() -> None:
    """The gradient of w is 1e-9 * batch: nothing in float16, unless it is scaled."""
    plain = tx.fuse(MEAN, tx.sgd(1.0))
    for pipeline, moved in ((plain, 0.0), (tx.dynamic_loss_scale(plain, init_scale=2.0**30), 3e-9)):
        step, state = step_of(half_loss, pipeline, {"w": torch.zeros(2), "v": torch.zeros(2)})
        state, metrics = step(state, torch.full((2,), 3.0))
        assert torch.allclose(-state.params["w"], torch.full((2,), moved), rtol=1e-3, atol=0)
        assert metrics.loss == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hook", [MEAN, CLIPPED], ids=["mean", "clipped"])
def test_windows_and_narrow_losses(hook: tx.Transform, dtype: torch.dtype) -> None:
    """The mean of equal gradients is their value, even if the loss dtype rounds weights and scales."""

    def one_rank(n: int) -> Any:
        scaled = tx.dynamic_loss_scale(
            tx.fuse(hook, tx.sgd(1.0)), init_scale=10.0, growth_factor=1.5, growth_interval=1
        )
        step, state = step_of(lambda p, b: product(p, b).to(dtype), scaled, weight=lambda b: n, accumulate=3)
        state = stepped(step, state, (X if n or i < 4 else X * 7 for i in range(6)))
        return state.params["w"].tolist(), state.pipeline.scale.item()

    for params, scale in tx.simulate(one_rank, {"data": 3}, [1001, 77, 0]):
        assert params == pytest.approx([-1.0, -1.0], abs=1e-5) and scale == 22.5


@pytest.mark.parametrize("on_device", [False, True])
def test_a_step_in_which_no_rank_has_weight_counts_as_none(on_device: bool) -> None:
    pipeline = tx.dynamic_loss_scale(tx.fuse(MEAN, tx.sgd(0.5)), growth_interval=2)
    step, state = step_of(pipeline=pipeline, weight=lambda b: b[0])
    state = stepped(judged(step, on_device), state, (X, X * 0, X))
    assert state.pipeline.scale == 2.0**17 and state.pipeline.skipped == 0 and state.pipeline.streak == 0


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize(
    "optimizer",
    [tx.lion(0.1), tx.rprop(0.1), tx.partition({"w": tx.frozen(), "*": tx.sgd(0.1)})],
    ids=["lion", "rprop", "frozen"],
)
def test_overflow_is_detected_with_sign_based_optimizers(optimizer: tx.Optimizer, bad: float) -> None:
    """sign(nan) is 0, so that parameters stay finite; a frozen leaf's gradient counts too, as in a step."""
    params, grads = {"w": torch.ones(2), "v": torch.ones(2)}, {"w": torch.tensor([bad, 1.0]), "v": torch.ones(2)}
    fused = tx.fuse(MEAN, optimizer)
    for pipeline in (tx.dynamic_loss_scale(fused, init_scale=4.0), tx.skip_if_nonfinite(fused)):
        step, state = step_of(loss=lambda p, b: (p["w"] * b).sum() + p["v"].sum(), pipeline=pipeline)
        state, _ = step(state, grads["w"])
        start = pipeline.init(params)
        ((pure, after),) = tx.simulate(lambda: pipeline.step(params, grads, start), {"data": 1})  # noqa: B023
        assert same_bits(pure, params) and same_bits(state.params, params)
        assert after.skipped == state.pipeline.skipped == 1
        assert same_bits(after.inner.optimizer, start.inner.optimizer)


def registered() -> Any:
    """The scale is saved and loaded, and a window in which one loss is not scaled is refused; the steps are rows of the places."""
    ddp = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    pipeline = tx.dynamic_loss_scale(tx.fuse(tx.chain(MEAN, CLIP), tx.sgd(0.5)), init_scale=64.0, growth_interval=2)
    handle, weight = fjoin.ddp.register(ddp, pipeline), ddp.module.weight

    def window(first: Any, second: Any, x: float = 1.0) -> None:
        ddp.zero_grad()
        with ddp.no_sync():
            first(ddp(torch.ones(1, 2)).sum()).backward()
        second(ddp(torch.full((1, 2), x)).sum()).backward()

    window(handle.scale, handle.scale, INF if dist.get_rank() else 1.0)
    saved = handle.state_dict()
    saved["outer"]["scale"] += 1.0
    handle.load_state_dict(saved)
    scale = handle.run.body.outer.scale.item()
    before, plain = weight.detach().clone(), lambda loss: loss
    for passes in ((plain, plain), (plain, handle.scale), (handle.scale, plain)):
        raises_text(RuntimeError, lambda: window(*passes), "handle.scale(loss)", "no_sync")  # noqa: B023
        assert torch.equal(weight, before)
    window(handle.scale, handle.scale)
    assert torch.allclose(weight, before - 1.0)
    return scale, handle.skipped


def test_in_distributed_data_parallel(pool: Any) -> None:
    assert pool.run(2, registered) == [(33.0, 4)] * 2


def test_raises_on_bad_input() -> None:
    fused = tx.fuse(MEAN, tx.sgd(0.1))

    raises_text(TypeError, lambda: tx.dynamic_loss_scale(MEAN), "mean('data')", "fuse(hook, optimizer)")  # type: ignore[arg-type]
    scaled = tx.dynamic_loss_scale(fused)
    for twice in (tx.skip_if_nonfinite, tx.dynamic_loss_scale):
        raises_text(ValueError, lambda: twice(scaled), "dynamic_loss_scale(fuse", "already")  # noqa: B023
        raises_text(ValueError, lambda: twice(tx.skip_if_nonfinite(fused)), "already")  # noqa: B023
    narrow = {"w": torch.ones(2, dtype=torch.float16)}
    for init in (scaled.init, fjoin.train_step(product, scaled).init):
        raises_text(TypeError, lambda: init(narrow), "params['w']", "float16", *["autocast"] * (init == scaled.init))  # noqa: B023


def test_a_pass_that_failed_is_over() -> None:
    """A later pass without a scale is detected; a checkpoint's passes belong to the pass around them."""
    w = torch.nn.Parameter(torch.ones(3))
    scaled, scale = ScaledLoss([w]), torch.tensor(4.0)

    def fails(grad: torch.Tensor) -> None:
        raise ValueError("in backward")

    doubled = w * 2
    doubled.register_hook(fails)
    raises_text(ValueError, lambda: scaled(doubled.sum(), scale).backward(), "in backward")
    assert not scaled.missed
    (w * 3).sum().backward()
    assert scaled.missed
    scaled.missed = False
    x = torch.ones(3, requires_grad=True)
    scaled(checkpoint(lambda v: v * w, x, use_reentrant=True).sum(), scale).backward()
    assert not scaled.missed


# -- float16 parameters whose batches weigh thousands, as tokens do: messages stay within its range --

WIDE = tx.clip_by_value(1e4)
# The first reduce first; the others apply the weights themselves, or behind other stages.
HOOKS = {"mean": MEAN, "clip": tx.chain(MEAN, tx.clip_by_global_norm(1e4)), "rest": tx.chain(MEAN, WIDE)}
BEHIND = {
    "clip, mean": tx.chain(WIDE, MEAN), "leaf, mean": tx.chain(tx.stateless(torch.clone), MEAN),
    "by path": tx.partition({"w": MEAN, "*": MEAN}), "whole tree, mean": tx.chain(tx.clip_by_global_norm(1e4), MEAN),
    "twice": tx.chain(MEAN, tx.mean("data", over="live")), "late": tx.switch_after(2, tx.chain(WIDE, MEAN), MEAN),
    "live": tx.chain(WIDE, tx.mean("data", over="live")),
}  # fmt: skip
ALL = HOOKS | BEHIND


def trained(
    hook: tx.Transform, batches: list[tuple[float, float]], on_device: bool = False, loss_dtype: Any = None,
    **settings: Any,
) -> Any:  # fmt: skip
    """Each batch is (gradient of every element, weight)."""

    def loss(params: Any, batch: Any) -> Tensor:
        out = (params["w"] * batch[0]).sum() + (params["v"] * batch[0]).sum().half()
        return out if loss_dtype is None else out.to(loss_dtype)

    def look(state: Any, metrics: Any) -> Any:
        return metrics.stepped and (state.params["w"].tolist()[0], state.params["v"].tolist()[0], metrics.weight)

    params = {"w": torch.zeros(3, dtype=torch.float16), "v": torch.zeros(2)}
    step, state = step_of(loss, tx.fuse(hook, tx.sgd(1.0)), params, weight=lambda b: b[1], **settings)
    return [one for one in seen_by(look, judged(step, on_device), state, step.join(batches)) if one]


def of(ranks: int, hook: Any, weights: list[float], **settings: Any) -> Any:
    """Rank r has gradients of 16 (r + 1)."""
    per_rank = [[(16.0 * (r + 1), w) for w in weights] for r in range(ranks)]
    return tx.simulate(lambda b: trained(hook, b, **settings), {"data": ranks}, per_rank)


@pytest.mark.sample(3)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("loss_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("hook", ALL)
def test_weights_of_thousands(hook: str, loss_dtype: Any, on_device: bool) -> None:
    """The mean of 16 and 32 is 24; the parameters are exact."""
    for weight in (1.0, 5120.0, 2.0**19):  # which float16 holds, scaled
        for seen in of(2, ALL[hook], [weight] * 3, on_device=on_device, loss_dtype=loss_dtype):
            assert seen == [(-24.0 * n, -24.0 * n, 2 * weight) for n in (1, 2, 3)]


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("hook", [*HOOKS, "live"])
def test_weights_of_thousands_in_windows(hook: str, accumulate: int) -> None:
    """If the hook applies the weights itself, only the gradients accumulated before it are scaled."""
    for seen in of(2, ALL[hook], [4096.0] * 2 * accumulate, accumulate=accumulate):
        assert [(w, total) for w, _, total in seen] == [(w, 4096.0 * 2 * accumulate) for w in (-24.0, -48.0)]


# By name: the hook, the batches of each rank, its options, and the parameters after each step.
UNEVEN: dict[str, Any] = {
    # A sum without a division at the end must fit float16 itself.
    "a sum that is divided": (tx.chain(tx.sum_over("data"), tx.stateless(lambda g: g / 8.0)), [[(16.0, 4.0)] * 2, [(32.0, 4.0)] * 2],
                              {}, [-24.0, -48.0]),
    "a sum": (tx.sum_over("data"), [[(16.0, 2.0)] * 2, [(32.0, 1.0), (8.0, 5.0)], [(4.0, 0.0), (4.0, 3.0)]], {}, [-64.0, -148.0]),
    "a sum of windows": (tx.sum_over("data"), [[(16.0, 2.0)] * 2, [(32.0, 1.0), (8.0, 5.0)], [(4.0, 0.0), (4.0, 3.0)]],
                         {"accumulate": 2}, [-148.0]),
    **{f"a step without weight, {name}": (ALL[name], [[(g, w) for w in (1.0, 0.0, 3.0)] for g in (16.0, 32.0)], {}, [-24.0, -24.0, -48.0])
       for name in (*HOOKS, "clip, mean")},
    "weights that change": (MEAN, [[(16.0, 0.0), (16.0, 3000.0), (16.0, 30_000.0), (16.0, 800.0)], [(32.0, 0.0), (64.0, 1000.0)]], {},
                            [0.0, -28.0, -44.0, -60.0]),
}  # fmt: skip


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_weights(name: str) -> None:
    """Ranks without input, batches without weight, and a first step without any weight."""
    hook, batches, options, want = UNEVEN[name]
    for seen in tx.simulate(lambda b: trained(hook, b, **options), {"data": len(batches)}, batches):
        assert [(w, v) for w, v, _ in seen] == [(w, w) for w in want]


@pytest.mark.parametrize("weight", [1e-9, 1e9])
def test_weight_that_a_loss_of_float16_cannot_hold_in_a_window(weight: float) -> None:
    text = ("too small" if weight < 1 else "too large", "torch.float16", "float32")
    step, state = step_of(lambda p, b: (p["w"] * b).sum().half(), accumulate=2, weight=lambda b: weight)
    raises_text(ValueError, lambda: step(state, 16.0), *text)


def test_scaling_all_weights_by_a_power_of_two_changes_nothing() -> None:
    """Results are bitwise equal if float16 holds them in full precision, so a resumed run gives the same result."""
    gradients = [0.3, 1.7, 11.1, 130.0]

    def run(times: float) -> Any:
        per_rank = [[(g * (r + 1), times * (3 + r)) for g in gradients] for r in range(3)]
        ranks = tx.simulate(lambda b: trained(MEAN, b), {"data": 3}, per_rank)
        return [[seen[:2] for seen in rank] for rank in ranks]

    want = run(1.0)
    assert all(run(times) == want for times in (2.0**4, 2.0**10, 2.0**18))
