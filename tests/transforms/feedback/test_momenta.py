"""Hooks that send momenta: as their formulas, as torch's Adam at first, and unaffected by ranks without input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text, same_bits
from tests.oracle.momenta import deep_compression, one_bit

STEPS = 8
GRADS = [[torch.randn(40, generator=torch.Generator().manual_seed(10 * s + r)) for r in range(2)] for s in range(STEPS)]
PARAMS = [torch.randn(40, generator=torch.Generator().manual_seed(1000 + s)) for s in range(STEPS)]
SIGN = tx.sign(block=8)


def outs_of(hook: tx.Transform, grads: Any = GRADS) -> Any:
    def one_rank(rank: int) -> Any:
        state, outs = hook.init(grads[0][0]), []
        for step, params in zip(grads, PARAMS, strict=False):
            out, state = hook.update(step[rank], state, params)
            outs.append(out)
        return outs, state

    results = tx.simulate(one_rank, {"data": 2}, [0, 1])
    assert all(same_bits(outs, results[0][0]) for outs, _ in results)
    return results[0]


def read(x: Tensor) -> Tensor:
    return SIGN.decode(SIGN.encode(x.view(1, -1)), x.numel())[0]


@pytest.mark.parametrize(
    "settings", [{}, {"nesterov": True}, {"clip": 3.0}, {"momentum": 0.0}, {"warmup_steps": 5}], ids=str
)  # fmt: skip
def test_deep_gradient_compression(settings: dict[str, Any]) -> None:
    shares = [0.25 * 0.4 ** (i / 5) for i in range(5)] + [0.1] * 3 if "warmup_steps" in settings else [0.1] * STEPS
    given = {"momentum": 0.9, "nesterov": False, "clip": None} | {
        k: v for k, v in settings.items() if k != "warmup_steps"
    }
    outs, state = outs_of(tx.dgc("data", k=0.1, **settings))
    assert max_diff(outs, deep_compression(GRADS, shares, **given)) < 1e-5
    assert all((o != 0).sum() <= 2 * -int(-s * 40 // 1) for o, s in zip(outs, shares, strict=True))
    assert state.step == STEPS


def test_deep_gradient_compression_of_a_rank_without_input() -> None:
    """It keeps its momentum and error without effect on the others; or it sends the error."""
    for how in ("freeze", "flush"):
        hook = tx.dgc("data", k=0.1, without_input=how)

        def one_rank(rank: int) -> Any:
            state = hook.init(GRADS[0][0])  # noqa: B023
            _, state = hook.update(GRADS[0][rank], state)  # noqa: B023
            out, new = hook.update(GRADS[1][rank] * (float("nan") if rank else 1.0), state, weight=1.0 - rank)  # noqa: B023
            return state, new, out

        _, (before, after, out) = tx.simulate(one_rank, {"data": 2}, [0, 1])
        assert torch.isfinite(out).all() and same_bits(before.momentum, after.momentum)
        kept = {path: e / 2 for path, e in before.error.items()}  # of a sum that is divided by half as much
        assert same_bits(kept, after.error) == (how == "freeze")


def test_one_bit_adam_warm_up_matches_adam() -> None:
    """Four steps of torch.optim.Adam on the mean of the gradients."""
    pipeline = tx.fuse(tx.one_bit_adam("data", warmup_steps=4, betas=(0.8, 0.95), eps=1e-6), tx.sgd(0.01))

    def one_rank(rank: int) -> Any:
        params, state = PARAMS[0], pipeline.init(PARAMS[0])
        for step in GRADS[:4]:
            params, state = pipeline.step(params, step[rank], state)
        return params

    theirs = PARAMS[0].clone().requires_grad_()
    adam = torch.optim.Adam([theirs], lr=0.01, betas=(0.8, 0.95), eps=1e-6)
    for step in GRADS[:4]:
        theirs.grad = (step[0] + step[1]) / 2
        adam.step()
    for ours in tx.simulate(one_rank, {"data": 2}, [0, 1]):
        assert max_diff(ours - PARAMS[0], theirs.detach() - PARAMS[0]) < 1e-7


@pytest.mark.parametrize("warmup", [1, 3])
def test_one_bit_adam_matches_the_reference(warmup: int) -> None:
    outs, state = outs_of(tx.one_bit_adam("data", warmup, codec=SIGN))
    want = one_bit(GRADS, warmup, 0.9, 0.999, 1e-8, read)
    assert max_diff(outs, [u for u, _, _ in want]) < 1e-4
    assert max_diff(state.variance[""], want[-1][2]) < 1e-6


@pytest.mark.parametrize("over", ["weight", "live", "world"])
@pytest.mark.parametrize("make", [tx.one_bit_adam])
def test_a_call_without_input_on_any_rank_is_none(make: Any, over: Any) -> None:
    hook, x = make("data", 2, over=over), torch.tensor([1.0, -2.0, 3.0])

    def one_rank(pause: bool) -> Any:
        state = hook.init(x)
        for step in range(5):
            _, state = hook.update(x, state, x)
            if pause and step in (0, 3):  # in the warm-up, and behind it
                out, idle = hook.update(x, state, x, weight=0.0, lane={"said": 1.0})
                assert not out.any() and list(hook.sums(idle).lane) == ["said"]
                assert same_bits([idle.momentum, idle.variance], [state.momentum, state.variance])
        return state.momentum

    assert all(same_bits(a, b) for a, b in [tx.simulate(one_rank, {"data": 2}, [True] * 2)])


@pytest.mark.parametrize("make", [tx.one_bit_adam])
def test_weights_count_in_momenta_too(make: Any) -> None:
    """With a lossless codec three ranks, one of weight 0 with NaN, match one rank with their mean."""
    weights, grads = [2.0, 0.0, 1.0], [[g[0], g[1] * float("nan"), g[1]] for g in GRADS]
    hook = make("data", 3, codec=tx.float32())

    def one_rank(rank: int) -> Any:
        state, outs = hook.init(PARAMS[0]), []
        for step, params in zip(grads, PARAMS, strict=True):
            out, state = hook.update(step[rank], state, params, weight=weights[rank])
            outs.append(out)
        return outs

    alone = [[(2 * g[0] + g[1]) / 3] * 2 for g in GRADS]
    assert max_diff(tx.simulate(one_rank, {"data": 3}, [0, 1, 2])[1], outs_of(hook, alone)[0]) < 1e-4


def test_a_leaf_without_a_gradient_keeps_its_momentum() -> None:
    hook, params = tx.dgc("data", k=0.5), {"a": torch.zeros(4), "b": torch.zeros(4)}

    def one_rank() -> Any:
        grads = {path: torch.ones(4) for path in params}
        _, state = hook.update(grads, hook.init(params))
        _, state = hook.update({"a": None, "b": grads["b"]}, state)
        return hook.update(grads, state)[1].momentum

    # 1 of the first call and 1 of the last, from the unsent elements.
    assert abs(tx.simulate(one_rank, {"data": 2})[0]["a"].max() - (0.9 + 1)) < 1e-6


def test_raises_on_bad_input() -> None:
    for make in (tx.dgc, lambda axis: tx.one_bit_adam(axis, 1)):
        raises_text(ValueError, lambda make=make: make(("node", "local")), "one axis", "('node', 'local')")
    raises_text(TypeError, lambda: tx.dgc("data", nesterov="no"), "nesterov", "'no'")
    for k in (0.0, 1.5, 1):
        raises_text(ValueError, lambda: tx.dgc("data", k=k), "k must be", repr(k))  # noqa: B023
    raises_text(ValueError, lambda: tx.dgc("data", momentum=1.0), "momentum", "1.0")
    raises_text(ValueError, lambda: tx.dgc("data", clip=0.0), "clip", "0.0")
    raises_text(ValueError, lambda: tx.dgc("data", warmup_steps=-1), "warmup", "-1")
    raises_text(ValueError, lambda: tx.dgc("data", codec=tx.qsgd()), "stochastic", "qsgd()")
    raises_text(ValueError, lambda: tx.dgc("data", without_input="keep"), "'keep'")  # type: ignore[arg-type]
    for make in (tx.one_bit_adam,):
        raises_text(ValueError, lambda: make("data", 0), "warmup", "0")  # noqa: B023
        raises_text(ValueError, lambda: make("data", 1, betas=(1.0, 0.9)), "betas", "1.0")  # noqa: B023


def test_dgc_clears_the_momentum_of_sent_elements() -> None:
    """At k = 1.0 each call sends all: every result is the mean of that call's gradients and of the rounding errors."""
    x = torch.tensor([1.0, 0.76, -3.3])
    for values in (None, tx.bfloat16()):
        for ranks in (2, 3):
            hook = tx.dgc("data", 1.0, codec=values)

            def one_rank(hook: tx.Transform = hook) -> Any:
                state, outs = hook.init(x), []
                for _ in range(5):
                    out, state = hook.update(x, state)
                    outs.append(out)
                return outs

            for outs in tx.simulate(one_rank, {"data": ranks}):
                assert all((out - x).abs().max() < 0.05 for out in outs), outs


@pytest.mark.parametrize("make", [tx.one_bit_adam])
@pytest.mark.parametrize("over", ["weight", "live", "world"])
def test_momenta_where_not_all_ranks_have_input(make: Any, over: Any) -> None:
    """Momenta do not change if no rank has input; the input of one rank alone gives the momentum of the mean."""
    hook, x = make("data", 2, codec=tx.float32(), over=over), torch.tensor([1.0, -2.0])
    ranks = 3

    def one_rank(rank: int) -> Any:
        state, seen = hook.init(x), []
        for step in range(7):
            weight = 0.0 if step in (1, 4) and over != "world" else float(rank == 0)
            out, state = hook.update(x if rank == 0 else x * float("nan"), state, x, weight=weight)
            seen.append((weight, out, state.momentum[""]))
        return seen

    m, share = torch.zeros(2), 1 / ranks if over == "world" else 1.0
    for step, (_, out, momentum) in enumerate(tx.simulate(one_rank, {"data": ranks}, list(range(ranks)))[0]):
        if step in (1, 4) and over != "world":
            assert out.eq(0).all()
        else:
            m = 0.9 * m + 0.1 * share * x
        assert (momentum - m).abs().max() < 1e-6, step


@pytest.mark.parametrize("make", [tx.one_bit_adam])
def test_elements_without_gradient_in_the_warm_up_do_not_move(make: Any) -> None:
    """A sign code has no 0, and an element without variance would be divided by nearly 0."""
    hook, x = make("data", 2), torch.tensor([1.0, -2.0, 0.0, 3.0])

    def one_rank(rank: int) -> Any:
        state, outs = hook.init(x), []
        for _ in range(6):
            out, state = hook.update(x * (1 + rank), state, torch.ones(4))
            outs.append(out)
        return outs

    for out in tx.simulate(one_rank, {"data": 3}, [0, 1, 2])[0]:
        assert out[2] == 0 and (out * torch.tensor([1.0, -1.0, 0.0, 1.0]))[[0, 1, 3]].min() > 0 and out.abs().max() < 5


@pytest.mark.parametrize("make", [tx.one_bit_adam])
def test_skipped_step_has_no_effect(make: Any) -> None:
    """During warm-up and after: later results are as if the step had not happened, except for the codes' errors."""
    grads = [torch.tensor([1.0, -2.0, 0.5]) * (1 + 0.1 * i) for i in range(8)]

    def run(skipped: list[int], skips: bool) -> Any:
        hook = make("data", 5, codec=tx.float32())
        hook = tx.skip_if_nonfinite(hook) if skips else hook

        def one_rank(rank: int) -> Any:
            state, outs = hook.init(grads[0]), []
            for i, g in enumerate(grads):
                bad = i in skipped
                out, state = hook.update(g * float("nan") if bad and rank else g, state, torch.ones(3))
                outs += [] if bad else [out]
            return outs

        return tx.simulate(one_rank, {"data": 2}, [0, 1])[0]

    def written_out(used: list[int], warm: int) -> list[Tensor]:
        m, v, outs = torch.zeros(3), torch.zeros(3), []
        for t, i in enumerate(used, 1):
            m = 0.9 * m + 0.1 * grads[i]
            v = 0.999 * v + 0.001 * grads[i] ** 2 if t <= warm else v
            outs.append(m / (1 - 0.9**t) / ((v / (1 - 0.999 ** min(t, warm))).sqrt() + 1e-8))
        return outs

    for skips in (True, False):
        outs = run([1, 2, 6], skips)
        assert all(torch.isfinite(out).all() for out in outs)
        if make is tx.one_bit_adam:
            assert max_diff(outs, written_out([0, 3, 4, 5, 7], 3)) < 1e-5
