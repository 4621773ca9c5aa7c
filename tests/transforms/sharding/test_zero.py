"""A sharded pipeline equals the unsharded one to the bit: all optimizers, any number of ranks; pieces of a sharded mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from fjoin.transforms.optimizers._sgd import SGDState
from tests.helpers import raises_text
from tests.optimizer_table import OPTIMIZERS
from tests.sharded_problem import PAIRS, STEPS, gradients, run, start


def same(got: list[Any], want: list[Any]) -> None:
    for (params, _), (expected, _) in zip(got, want, strict=True):
        for path, value in expected.items():
            assert torch.equal(params[path], value), path


@pytest.mark.sample(18)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name, i", [(name, i) for name, rows in OPTIMIZERS.items() for i in range(len(rows))])
def test_every_optimizer(name: str, i: int, ranks: int) -> None:
    optimizer, dtype = OPTIMIZERS[name][i](), torch.bfloat16 if name == "mixed_precision" else torch.float32
    want = run(tx.fuse(tx.mean("data"), optimizer), {"data": ranks}, dtype)
    got = run(tx.zero(tx.mean("data"), optimizer, "data"), {"data": ranks}, dtype)
    same(got, want)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PAIRS)
def test_every_pipeline(name: str) -> None:
    pair, dtype = PAIRS[name], PAIRS[name].options.get("dtype", torch.float32)
    for sizes in [pair.axes] if pair.axes else [{"data": 2}, {"data": 3}]:
        got, want = run(pair.sharded, sizes, dtype), run(pair.whole, sizes, dtype)
        for (params, _), (expected, _) in zip(got, want, strict=True):
            for path, value in expected.items():
                torch.testing.assert_close(params[path], value, rtol=pair.tolerance, atol=pair.tolerance, msg=path)


def poisoned(rank: int, step: int, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """One element of one rank is not finite in step 4."""
    if (rank, step) == (1, 4):
        grads["c.weight"][0, 0] = float("inf")
    return grads


@pytest.mark.parametrize("name", ["skip", "scale"])
def test_all_ranks_skip_a_step_if_one_shard_is_not_finite(name: str) -> None:
    pair = PAIRS[name]
    got, want = (run(p, {"data": 3}, change=poisoned) for p in (pair.sharded, pair.whole))
    same(got, want)
    assert [state.skipped.item() for _, state in got] == [1, 1, 1]


def test_each_rank_holds_the_state_of_its_slices() -> None:
    adam = tx.adamw(0.1)
    whole = run(tx.fuse(tx.mean("data"), adam), {"data": 3})[0][1].optimizer
    ranks = [state.optimizer for _, state in run(tx.zero(tx.mean("data"), adam, "data"), {"data": 3})]
    for path, state in whole.items():
        found = torch.cat([own[path].exp_avg for own in ranks])
        assert torch.equal(found, state.exp_avg.reshape(-1)), path
        assert [own[path].step.item() for own in ranks] == [state.step.item()] * 3
    sizes = [sum(own[path].exp_avg.numel() for path in own) for own in ranks]
    assert max(sizes) <= 96 and sum(sizes) == sum(p.numel() for p in start().values())


def test_muon_has_one_owner_per_matrix_balanced_by_cost() -> None:
    optimizer = tx.partition({"*.weight": tx.muon(0.1), "*": tx.sgd(0.1, momentum=0.9)})
    ranks = [state.optimizer for _, state in run(tx.zero(tx.mean("data"), optimizer, "data"), {"data": 2})]
    owned = [{path for path in own if own[path].momentum.numel()} for own in ranks]
    assert "a.weight" in owned[0] and {"b.weight", "c.weight"} <= owned[1]  # 441 against 297 + 64
    assert ranks[0]["b.weight"].momentum.shape == (0, 0)
    assert all(own[path].step.item() == STEPS - 1 for own in ranks for path in own)


def test_encoded_means_and_changes_leave_all_ranks_equal() -> None:
    """Both ways in int8: the parameters are equal to the bit, and near the exact values, which their owners keep."""
    hook = tx.error_feedback(tx.compress(tx.int8(), tx.scatter_mean("data")))
    adam = tx.adamw(0.01)
    exact = run(tx.fuse(tx.mean("data"), adam), {"data": 3}, steps=60)
    ranks = run(tx.fuse(hook, adam, gather_codec=tx.int8()), {"data": 3}, steps=60)
    start_ = start()
    for path, first in ranks[0][0].items():
        assert all(torch.equal(first, params[path]) for params, _ in ranks)
        moved = (exact[0][0][path] - start_[path]).norm()
        assert (first - exact[0][0][path]).norm() <= 0.1 * moved + 1e-6, path
        master = torch.cat([state.gather.master[path].reshape(-1) for _, state in ranks])
        assert torch.allclose(master, first.reshape(-1), atol=2e-4), path


@pytest.mark.parametrize("gather", [None, tx.int8()])
def test_a_node_without_input_gets_the_average_of_the_others(gather: tx.Codec | None) -> None:
    average = tx.average_parameters("node")
    pipeline = tx.fuse(tx.scatter_mean("local"), tx.adamw(0.1), average, gather_codec=gather)

    def one_rank(rank: int) -> Any:
        params = start()
        state = pipeline.init(params)
        for step in range(3):
            params, state = pipeline.step(params, gradients(rank, step), state, weight=float(rank < 2))
        return params

    ranks = tx.simulate(one_rank, {"node": 2, "local": 2}, list(range(4)))
    assert not torch.equal(ranks[0]["a.weight"], start()["a.weight"])
    for path, value in ranks[0].items():
        assert all(torch.equal(params[path], value) for params in ranks), path


def test_encoded_changes_of_float64_parameters_keep_their_digits() -> None:
    params = {"w": torch.full((40,), 2.0**24 + 1, dtype=torch.float64)}
    pipeline = tx.fuse(tx.scatter_mean("data"), tx.sgd(1.0), gather_codec=tx.int8())

    def one_rank(grad: float) -> Any:
        return pipeline.step(params, {"w": torch.full_like(params["w"], grad)}, pipeline.init(params))[0]

    for grad in (0.0, 0.25):
        for new in tx.simulate(one_rank, {"data": 2}, [grad, grad]):
            assert (new["w"] - params["w"] + grad).abs().max() <= grad / 127


def test_a_state_of_another_pipeline_is_refused() -> None:
    pipeline = tx.zero(tx.mean("data"), tx.sgd(0.1), "data")
    params, coded = {"w": torch.ones(40)}, tx.fuse(tx.scatter_mean("data"), tx.sgd(0.1), gather_codec=tx.int8())

    def one_rank(other: tx.Pipeline, of: tx.Pipeline) -> Any:
        return other.step(params, params, of.init(params))

    def run_with_state_of(other: tx.Pipeline, of: tx.Pipeline) -> Any:
        return tx.simulate(one_rank, {"data": 2}, [other] * 2, [of] * 2)

    raises_text(ValueError, lambda: run_with_state_of(pipeline, coded), "another pipeline's state")
    raises_text(ValueError, lambda: run_with_state_of(coded, pipeline), "another pipeline's state")


def by_norm(**settings: Any) -> tx.Optimizer:
    """An optimizer of one's own, whose step needs the whole parameter."""

    def step_param(param: Tensor, grad: Tensor, state: SGDState) -> tuple[Tensor, SGDState]:
        return param - 0.1 * grad / (grad.norm() + 1e-8), state

    def step_param_(param: Tensor, grad: Tensor, state: SGDState, **guards: Any) -> None:
        param.copy_(step_param(param, grad, state)[0])

    return tx.Optimizer(tx.sgd(0.1).init_param, step_param, step_param_, **settings)


def test_an_optimizer_of_ones_own_gets_whole_parameters() -> None:
    params = {"a": torch.linspace(-1, 1, 40), "b": torch.linspace(0, 2, 30).view(5, 6)}

    def pure(optimizer: tx.Optimizer, sharded: bool) -> Any:
        hook = tx.scatter_mean("data") if sharded else tx.mean("data")
        pipeline = tx.fuse(hook, optimizer)
        return pipeline.step(params, params, pipeline.init(params))[0]

    whole = by_norm()
    want, got = (tx.simulate(pure, {"data": 2}, [whole] * 2, [sharded] * 2) for sharded in (False, True))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_the_ranks_have_about_the_same_work_in_matrices() -> None:
    """The model is a GPT with four kinds of matrices per block on 8 ranks."""
    shapes = {"qkv": (96, 32), "out": (32, 32), "up": (128, 32), "down": (32, 128)}
    params = {f"{i}.{name}.weight": torch.zeros(shape) for i in range(6) for name, shape in shapes.items()}
    pipeline = tx.zero(tx.mean("data"), tx.muon(0.1), "data")

    def load() -> float:
        assert pipeline.sharding is not None
        pieces = pipeline.sharding.pieces(params)
        return sum(pipeline.optimizer.at(path).cost(params[path].shape) for path in pieces.own(params))

    loads = tx.simulate(load, {"data": 8})
    assert 1.0 <= max(loads) * 8 / sum(loads) <= 1.15


def test_a_state_of_another_number_of_ranks_is_refused_on_all_ranks() -> None:
    pipeline = tx.zero(tx.mean("data"), tx.adamw(0.1), "data")
    states = tx.simulate(lambda: pipeline.init(start()), {"data": 3})

    def one_rank(rank: int) -> None:
        text = "cut into pieces for 3 ranks", "'data' has 2", "reshard"
        raises_text(ValueError, lambda: pipeline.step(start(), gradients(rank, 0), states[rank]), *text)

    tx.simulate(one_rank, {"data": 2}, [0, 1])


def test_a_state_of_another_rank_or_of_other_pieces_is_refused() -> None:
    pipeline = tx.zero(tx.mean("data"), tx.adamw(0.1), "data")
    states = tx.simulate(lambda: pipeline.init(start()), {"data": 2})
    other = {path: torch.ones(5) for path in start()}

    def one_rank(rank: int) -> None:
        text = f"of rank {1 - rank}", f"this is rank {rank}", "its own"
        raises_text(ValueError, lambda: pipeline.step(start(), gradients(rank, 0), states[1 - rank]), *text)
        raises_text(ValueError, lambda: pipeline.step(other, other, states[rank]), "other pieces")

    tx.simulate(one_rank, {"data": 2}, [0, 1])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_values_that_persist_stay_where_no_rank_has_weight(ranks: int) -> None:
    """Each rank gets its shard, as of a mean."""

    def one_rank(weight: float) -> Any:
        hook, given = tx.scatter_mean("data"), {"w": torch.arange(40.0), "b": torch.tensor(7.0)}
        return hook.update(given, hook.init(given), given, weight=weight, persistent=True)[0]

    kept, meant = (tx.simulate(one_rank, {"data": ranks}, [weight] * ranks) for weight in (0.0, 2.0))
    for one, other in zip(kept, meant, strict=True):
        assert all(torch.equal(one[path], other[path]) for path in ("w", "b"))
    assert torch.cat([one["w"] for one in kept]).tolist() == list(range(40))
