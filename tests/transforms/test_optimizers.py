"""Optimizers against torch.optim over 100 steps of identical gradients, for every combination of options."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import max_diff, params_like, raises_text, same_bits
from oracle import optim
from torch import Tensor

from fjoin import transforms as tx

STEPS = 100
SGD = [
    dict(lr=0.1, momentum=m, dampening=d, weight_decay=wd, nesterov=n, maximize=mx)
    for m, d, wd, n, mx in itertools.product([0.0, 0.9], [0.0, 0.5], [0.0, 0.1], [False, True], [False, True])
    if not (n and (m == 0 or d != 0))
]
ADAM = [
    dict(lr=0.01, betas=b, eps=e, weight_decay=wd, amsgrad=a, maximize=mx)
    for b, e, wd, a, mx in itertools.product(
        [(0.9, 0.999), (0.5, 0.9)], [1e-8, 1e-3], [0.0, 0.1], [False, True], [False, True]
    )
]
KINDS: dict[str, tuple[Any, Any, list[dict[str, Any]]]] = {
    "sgd": (tx.sgd, torch.optim.SGD, SGD),
    "adam": (tx.adam, torch.optim.Adam, ADAM),
    "adamw": (tx.adamw, torch.optim.AdamW, ADAM),
}
CASES = [
    pytest.param(kind, options, id=f"{kind}-" + "-".join(f"{k}={v}" for k, v in options.items() if v))
    for kind, (_, _, rows) in KINDS.items() for options in rows
]  # fmt: skip


def _problem(dtype: torch.dtype, even: bool = False) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Parameters and gradients. even: of sizes that fill whole vector registers, also one after the other."""
    params = {k: v for k, v in params_like(0, dtype).items() if v.numel()}
    g = torch.Generator().manual_seed(1)
    if even:
        params = {
            k: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
            for k, shape in {"a": (16, 16), "b": (64,)}.items()
        }
    grads = [
        {k: torch.randn(p.shape, generator=g, dtype=torch.float64).to(dtype) for k, p in params.items()}
        for _ in range(STEPS)
    ]
    return params, grads


def _expected(kind: str, options: dict[str, Any], dtype: torch.dtype, fused: bool) -> list[Tensor]:
    params, grads = _problem(dtype, even=fused)
    return optim.run(
        lambda ps: KINDS[kind][1](ps, fused=fused, foreach=False if not fused else None, **options),
        list(params.values()), [list(g.values()) for g in grads],
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_kernel_is_torchs_own(kind: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """step, on a tree: equal to the bit to torch.optim with fused=True.

    At equal alignment: the kernel's vector loop and its scalar tail round differently, and which of them
    serves an element depends on where it lies in the buffer.
    """
    params, grads = _problem(dtype, even=True)
    start, opt = params, KINDS[kind][0](**options)
    state = opt.init(params)
    for g in grads:
        params, state = opt.step(params, g, state)
    moved = [params[k] - start[k] for k in start]
    assert all(torch.equal(a, b) for a, b in zip(moved, _expected(kind, options, dtype, fused=True), strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-7), (torch.float64, 1e-14)])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_pure_formula(kind: str, options: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    """step_param: torch.optim with fused=False, to the tolerance per unit of displacement."""
    params, grads = _problem(dtype)
    opt = KINDS[kind][0](**options)
    own = {k: (p, opt.init_param(p)) for k, p in params.items()}
    for g in grads:
        own = {k: opt.step_param(p, g[k], s) for k, (p, s) in own.items()}
    expected = dict(zip(params, _expected(kind, options, dtype, fused=False), strict=True))
    for k, (p, _) in own.items():
        moved, want = (p - params[k]).double(), expected[k].double()
        # Rounding of the parameter itself, once per step, is not the formula's.
        room = tolerance * (want.abs().max() + params[k].abs().max() + 1) * STEPS / 2
        assert (moved - want).abs().max() <= room


def test_a_schedule_is_torchs_scheduler() -> None:
    params, grads = _problem(torch.float64)
    for schedule, scheduler in [
        (tx.cosine(0.1, 50, end=0.01), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 50, eta_min=0.01)),
        (tx.linear(0.1, 0.02, 30), lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.2, 30)),
    ]:
        expected = optim.run(
            lambda ps: torch.optim.AdamW(ps, 0.1),
            list(params.values()),
            [list(g.values()) for g in grads[:45]],
            scheduler,
        )
        p, opt = params, tx.adamw(schedule)
        state = opt.init(p)
        for g in grads[:45]:
            p, state = opt.step(p, g, state)
        assert max_diff([p[k] - params[k] for k in p], expected) < 1e-12


def test_schedules_take_numbers_and_tensors() -> None:
    for schedule in (tx.constant(0.3), tx.linear(1, 0, 4), tx.cosine(1, 4), tx.warmup_cosine(1, 2, 6)):
        for step in range(8):
            assert schedule(step) == schedule(torch.tensor(float(step))) and schedule(step).dtype == torch.float64
        steps = torch.arange(8.0)
        assert torch.equal(torch.func.vmap(schedule)(steps), torch.stack([schedule(s) for s in steps]))


def test_training_can_be_differentiated() -> None:
    """d(loss after 3 steps)/d(lr), against finite differences, for each optimizer."""
    target = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def loss(p: Tensor) -> Tensor:
        return ((p - target) ** 2).sum()

    for make in (
        lambda lr: tx.sgd(lr, momentum=0.9),
        lambda lr: tx.adam(lr),
        lambda lr: tx.adamw(lr, weight_decay=0.1),
    ):

        def after(lr: Tensor, make: Any = make) -> Tensor:
            opt, p = make(lr), torch.zeros(3, dtype=torch.float64)
            state = opt.init_param(p)
            for _ in range(3):
                p, state = opt.step_param(p, torch.func.grad(loss)(p), state)
            return loss(p)

        lr, h = torch.tensor(0.05, dtype=torch.float64), 1e-6
        got = torch.func.grad(after)(lr)
        assert got != 0 and abs(got - (after(lr + h) - after(lr - h)) / (2 * h)) < 1e-6
        # opt.step sees that something differentiates through it, and does not step in place.
        opt = make(lr.clone().requires_grad_())
        params = {"p": torch.zeros(3, dtype=torch.float64)}
        out, _ = opt.step(params, {"p": torch.ones(3, dtype=torch.float64)}, opt.init(params))
        assert out["p"].requires_grad


def test_an_ensemble_and_many_learning_rates_at_once() -> None:
    params = torch.randn(4, 3, dtype=torch.float64)
    grads = torch.randn(4, 3, dtype=torch.float64)
    rates = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)

    def one(p: Tensor, g: Tensor, lr: Tensor) -> Tensor:
        opt = tx.adamw(lr)
        tree, state = {"p": p}, opt.init({"p": p})
        for _ in range(2):
            tree, state = opt.step(tree, {"p": g}, state)
        return tree["p"]

    out = torch.func.vmap(one)(params, grads, rates)
    assert max_diff(out, torch.stack([one(p, g, lr) for p, g, lr in zip(params, grads, rates, strict=True)])) < 1e-14


def test_partition_and_frozen() -> None:
    params, grads = _problem(torch.float64)
    opt = tx.partition({"*.bias": tx.sgd(0.5), "scale": tx.frozen(), "*": tx.adam(0.1)})
    state = opt.init(params)
    new, state = opt.step(params, grads[0], state)
    assert torch.equal(new["scale"], params["scale"])
    assert torch.equal(new["layer.bias"], params["layer.bias"] - 0.5 * grads[0]["layer.bias"])
    assert max_diff(new["layer.weight"], tx.adam(0.1).step_param(params["layer.weight"], grads[0]["layer.weight"],
                    tx.adam(0.1).init_param(params["layer.weight"]))[0]) < 1e-14  # fmt: skip
    several = tx.partition({("*.bias", "scale"): tx.sgd(0.5), "*": tx.frozen()})
    out, _ = several.step(params, grads[0], several.init(params))
    assert torch.equal(out["scale"], params["scale"] - 0.5 * grads[0]["scale"])
    assert tx.from_json(tx.to_json(several)) == several


def test_bfloat16_parameters() -> None:
    p = torch.randn(64).bfloat16()
    for opt in (tx.sgd(0.1, momentum=0.9), tx.adamw(0.1)):
        new, state = opt.step({"p": p}, {"p": torch.ones_like(p)}, opt.init({"p": p}))
        assert new["p"].dtype == torch.bfloat16 and not torch.equal(new["p"], p)
        pure, _ = opt.step_param(p, torch.ones_like(p), opt.init_param(p))
        assert (pure.float() - new["p"].float()).abs().max() <= 2**-6 * p.float().abs().max()


def test_states_of_different_ages_are_stepped_apart() -> None:
    """A tree put together from two trainings: one flat kernel would give both the same step count."""
    opt, p = tx.adam(0.1), torch.ones(2, dtype=torch.float64)
    old = opt.init({"a": p})
    for _ in range(5):
        _, old = opt.step({"a": p}, {"a": p}, old)
    both = {"a": old["a"], "b": opt.init({"b": p})["b"]}
    new, state = opt.step({"a": p, "b": p}, {"a": p, "b": p}, both)
    assert state["a"].step == 6 and state["b"].step == 1
    alone, _ = opt.step({"a": p}, {"a": p}, {"a": old["a"]})
    assert same_bits(new["a"], alone["a"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_is_torchs(dtype: torch.dtype) -> None:
    params, grads = _problem(dtype)
    for g in grads[:5]:
        for max_norm in (0.1, 1.0, 100.0):
            got, _ = tx.clip_by_global_norm(max_norm).update(g, ())
            assert max_diff(list(got.values()), optim.clip(list(g.values()), max_norm)) <= (
                1e-7 if dtype == torch.float32 else 1e-15
            )
    assert tx.clip_by_global_norm(1.0).update({}, ()) == ({}, ())
    bad, _ = tx.clip_by_global_norm(1.0).update({"a": torch.tensor([1.0, float("nan")]), "b": torch.ones(1)}, ())
    assert bad["b"].isnan().all()


def test_clipping_across_shards() -> None:
    """A tree that is sharded over an axis: the norm is that of all shards together."""
    whole = torch.arange(1.0, 7.0)
    clip = tx.clip_by_global_norm(1.0)
    out = tx.simulate(
        lambda x: clip.update({"w": x}, (), sharded_over="shard")[0]["w"], {"shard": 3}, list(whole.view(3, 2))
    )
    assert torch.allclose(torch.cat(out), clip.update({"w": whole}, ())[0]["w"])


def test_torchs_fused_sgd_still_forgets_half_precision_on_cpus() -> None:
    """The reason for going through float32: where this fails, torch has been mended."""
    for dtype in (torch.bfloat16, torch.float16):
        p = torch.ones(64, dtype=dtype, requires_grad=True)
        p.grad = torch.ones_like(p)
        torch.optim.SGD([p], 0.5, fused=True).step()
        assert torch.equal(p.detach(), torch.ones(64, dtype=dtype)), "torch steps now"
        own, _ = tx.sgd(0.5).step(
            {"p": torch.ones(64, dtype=dtype)}, {"p": torch.ones(64, dtype=dtype)}, tx.sgd(0.5).init({"p": p.detach()})
        )
        assert torch.equal(own["p"], torch.full((64,), 0.5, dtype=dtype))


@pytest.mark.parametrize(
    "make", [lambda: tx.sgd(0.1, momentum=0.9), lambda: tx.adamw(0.1), lambda: tx.adam(0.1, amsgrad=True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_that_lie_otherwise_in_memory(make: Any, dtype: torch.dtype) -> None:
    """Kernels go through memory: what is transposed, expanded or channels-last must be laid out first."""
    opt, start = make(), torch.randn(4, 3, 5, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.randn(8, 3, 5, 2, generator=torch.Generator().manual_seed(1)).to(dtype)
    params = {
        "plain": start, "last": start.to(memory_format=torch.channels_last), "turned": start.transpose(0, 1),
        "gaps": wide[::2],
    }  # fmt: skip
    grads = {
        "expanded": lambda p: torch.ones((), dtype=dtype).expand(p.shape),
        "turned": lambda p: (
            torch.randn(*p.shape[::-1], generator=torch.Generator().manual_seed(2)).to(dtype).permute(3, 2, 1, 0)
        ),
        "last": lambda p: (p * 0.5).contiguous(memory_format=torch.channels_last),
    }
    for p in params.values():
        for grad in grads.values():
            g = grad(p)
            tree = {"w": p}
            state = opt.init(tree)
            want, want_state = {"w": p.contiguous()}, opt.init({"w": p.contiguous()})
            for _ in range(2):
                tree, state = opt.step(tree, {"w": g}, state)
                want, want_state = opt.step(want, {"w": g.contiguous()}, want_state)
            assert max_diff(tree, want) == 0 and max_diff(state, want_state) == 0


def test_an_in_place_step_needs_a_dense_parameter() -> None:
    opt, p = tx.sgd(0.1), torch.ones(4, 4)[:, :2]
    raises_text(
        ValueError, lambda: opt.step_param_(p, torch.ones(4, 2), opt.init_param(p)), "strides (4, 1)", "contiguous()"
    )
    turned = torch.ones(2, 3).t()
    opt.step_param_(turned, torch.arange(6.0).view(3, 2), opt.init_param(turned))
    assert torch.allclose(turned, 1 - 0.1 * torch.arange(6.0).view(3, 2))
