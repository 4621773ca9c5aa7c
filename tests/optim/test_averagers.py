"""PeriodicModelAverager and HierarchicalModelAverager: equal to torch's, and where they differ on purpose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text, same_bits
from tests.optim.averager_problem import displacements, gradients, made, quiet, torchs_averages_raise
from tests.oracle.whole_batch import make_model
from tests.pool import Pool
from tests.traffic import watched


def same_runs(pool: Any, ranks: int, kind: str, *args: Any, steps: int = 20) -> list[Any]:
    ours, theirs = (pool.run(ranks, displacements, whose, kind, args, steps) for whose in ("ours", "torch's"))
    for mine, torchs in zip(ours, theirs, strict=True):
        for step, (a, b) in enumerate(zip(mine, torchs, strict=True)):
            assert max_diff(a, b) < 1e-12, f"step {step}"
    assert any(max_diff(a, b) > 1e-2 for a, b in zip(theirs[0], theirs[-1], strict=True))
    return ours


def averaged(runs: list[Any], ranks: list[int]) -> list[int]:
    """The steps after which the parameters are equal on some ranks."""
    return [s for s in range(len(runs[0])) if all(max_diff(runs[r][s], runs[ranks[0]][s]) < 1e-12 for r in ranks)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("ranks", "period", "warmup"), [(2, 4, 0), (2, 4, 10), (3, 3, 2), (4, 7, 5)])
def test_periodic_averages_are_torchs(pool: Any, ranks: int, period: int, warmup: int) -> None:
    runs = same_runs(pool, ranks, "periodic", period, warmup)
    assert averaged(runs, list(range(ranks))) == list(range(warmup, 20, period))


def test_period_of_one_matches_torch(pool: Any) -> None:
    assert averaged(same_runs(pool, 3, "periodic", 1, 2), [0, 1, 2]) == list(range(2, 20))


@pytest.mark.parametrize("warmup", [0, 5, 9])
def test_hierarchical_averages_match_torch(pool: Any, warmup: int) -> None:
    """The warm-up is no multiple of the periods: it is not subtracted, as in torch."""
    runs = same_runs(pool, 4, "hierarchical", {2: 2, 4: 4}, warmup)
    due = [s for s in range(20) if s >= warmup]
    assert averaged(runs, [0, 1, 2, 3]) == [s for s in due if s % 4 == 0]
    for pair in ([0, 1], [2, 3]):
        assert averaged(runs, pair) == [s for s in due if s % 2 == 0]
    assert averaged(runs, [1, 2]) == [s for s in due if s % 4 == 0]


@pytest.mark.sample(2)
@pytest.mark.parametrize("levels", [{3: 4}, {2: 1, 4: 4}, {2: 4, 4: 4}, {1: 2, 3: 4}])
def test_other_hierarchies_are_torchs(pool: Any, levels: dict[int, int]) -> None:
    same_runs(pool, 4, "hierarchical", levels, 3)


def in_parts(kind: str, args: list[Any]) -> Any:
    """On two halves of the ranks: each its own process group, made by torch's new_subgroups."""
    own, _ = dist.new_subgroups(group_size=2)
    runs = displacements("ours", kind, (*args, own), 6)
    outside = dist.new_group([1, 2])
    averager = made("ours", kind, *args, outside)
    p = nn.Parameter(torch.tensor(float(dist.get_rank())))
    averager.average_parameters([p])
    return runs, p.item(), averager.process_group is None


@pytest.mark.parametrize(("kind", "args"), [("periodic", [2, 0]), ("hierarchical", [{2: 2}, 0])])
def test_other_process_groups(pool: Any, kind: str, args: list[Any]) -> None:
    """Ranks outside of the group average nothing, as in torch."""
    runs, values, alone = zip(*pool.run(4, in_parts, kind, args), strict=True)
    assert averaged(list(runs), [0, 1]) == averaged(list(runs), [2, 3]) == [0, 2, 4] and not averaged(
        list(runs), [1, 2]
    )
    assert values == (0.0, 1.5, 1.5, 3.0) and alone == (True, False, False, True)


def test_three_levels(pool: Any) -> None:
    """Simulated, on 8 ranks: the middle level is an average of averages."""

    def one_rank(value: float) -> list[float]:
        with quiet():
            averager = fjoin.HierarchicalModelAverager({1: 2, 2: 4, 4: 8})
        p, seen = torch.tensor(value), []
        for step in (1, 2, 4):
            averager.step = step
            averager.average_parameters([p])
            seen.append(p.item())
        return seen

    seen = tx.simulate(one_rank, {"level2": 2, "level1": 2, "level0": 2}, [float(r) for r in range(8)])
    assert [run[0] for run in seen] == [0.5, 0.5, 2.5, 2.5, 4.5, 4.5, 6.5, 6.5]
    assert [run[1] for run in seen] == [1.5] * 4 + [5.5] * 4 and [run[2] for run in seen] == [3.5] * 8


# -- where ours differ on purpose ----------------------------------------------------------------------


def storages() -> Any:
    model = make_model()
    params = [*model.parameters()]
    before = [p.data_ptr() for p in params]
    fjoin.PeriodicModelAverager(2).average_parameters(params)  # none has a gradient
    return before == [p.data_ptr() for p in params], len({p.untyped_storage().data_ptr() for p in params})


def test_every_parameter_keeps_its_memory(pool: Any) -> None:
    assert pool.run(2, storages) == [(True, 4)] * 2


def unused() -> Any:
    """Rank r uses only the parameter r."""
    rank = dist.get_rank()
    params = [nn.Parameter(torch.full((2 + i,), float(rank + i))) for i in range(3)]
    params[rank].grad = torch.ones(2 + rank)
    fjoin.PeriodicModelAverager(2).average_parameters(p for p in params)
    return [p.detach() for p in params]


def test_parameters_without_gradients_are_averaged(pool: Any) -> None:
    """Ranks may use different parameters; the parameters come from a generator."""
    for params in pool.run(3, unused):
        for i, p in enumerate(params):
            assert torch.equal(p, torch.full((2 + i,), 1.0 + i))


def several() -> Any:
    rank = dist.get_rank()
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
    params = [nn.Parameter(torch.full((3,), float(rank), dtype=dtype)) for dtype in dtypes]
    params += [nn.Parameter(torch.full((4, 2), float(rank)).t()), nn.Parameter(torch.tensor(rank), requires_grad=False)]
    versions = [p._version for p in params]
    with watched() as sent:
        fjoin.PeriodicModelAverager(2).average_parameters([*params, params[0]])
    assert [p._version for p in params] > versions
    with watched() as second:
        fjoin.PeriodicModelAverager(2).average_parameters(params[:2])
    return [(str(p.dtype), p.detach().real.double().unique().tolist()) for p in params], len(sent), len(second)


def test_parameters_of_several_dtypes(pool: Any) -> None:
    """One message for each dtype, 16 bits with float32: three, then two for the integers and a weight."""
    for params, messages, of_two in pool.run(2, several):
        assert [value for _, value in params] == [[0.5]] * 6 + [[1.0]]
        assert [dtype.removeprefix("torch.") for dtype, _ in params] == [
            "float32", "float64", "bfloat16", "float16", "complex64", "float32", "int64",
        ]  # fmt: skip
        assert messages == 5 and of_two == 2


def with_buffers(kind: str, levels: Any) -> Any:
    rank = dist.get_rank()
    model = nn.BatchNorm1d(2)
    model.running_mean.fill_(rank)  # type: ignore[union-attr, operator]
    model.num_batches_tracked.fill_(rank)  # type: ignore[union-attr, operator]
    make = fjoin.PeriodicModelAverager if kind == "periodic" else fjoin.HierarchicalModelAverager
    averager: Any = make(levels, 1)
    seen = []
    for _ in range(5):
        averager.average_parameters([*model.parameters(), *model.buffers()])
        seen.append((model.running_mean[0].item(), model.num_batches_tracked.item()))  # type: ignore[index, operator, union-attr]
    return seen


def test_buffers_among_the_parameters_are_averaged(pool: Any) -> None:
    """Integer buffers become the maximum."""
    for rank, seen in enumerate(pool.run(2, with_buffers, "periodic", 3)):
        assert seen == [(rank, rank)] + [(0.5, 1)] * 4
    for rank, seen in enumerate(pool.run(4, with_buffers, "hierarchical", {2: 2, 4: 4})):
        pair = (rank // 2 * 2 + 0.5, rank // 2 * 2 + 1)
        assert seen == [(rank, rank)] * 2 + [pair] * 2 + [(1.5, 3)]


def large() -> Any:
    p = nn.Parameter(torch.tensor([6e4, 6e-8], dtype=torch.float16))
    fjoin.PeriodicModelAverager(2).average_parameters([p])
    return p.tolist() == torch.tensor([6e4, 6e-8], dtype=torch.float16).tolist()


def test_large_and_small_numbers_in_float16(pool: Any) -> None:
    """The sum does not overflow, and values are not divided before it, as torch does."""
    assert pool.run(2, large) == [True] * 2


def in_the_middle() -> Any:
    group = dist.new_group([1, 2, 3, 4])
    if dist.get_rank() == 7:
        dist.new_group([7], use_local_synchronization=True)  # other ranks may have made other groups
    averager = made("ours", "hierarchical", {1: 2, 2: 4}, 1, group)
    p, seen = nn.Parameter(torch.tensor(float(dist.get_rank()))), []
    for _ in range(3):
        averager.average_parameters([p])
        seen.append(p.item())
    return seen


def test_three_levels_and_a_part_of_eight_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consecutive ranks of a process group form the smaller groups."""
    monkeypatch.setattr("tests.pool.WORKERS", 8)
    ranks = Pool()
    try:
        levels: Any = {1: 2, 2: 4, 6: 8}
        runs = same_runs(ranks, 8, "hierarchical", levels, 1, steps=13)
        assert averaged(runs, [1, 2]) == [2, 4, 6, 8, 10, 12] and averaged(runs, [3, 4]) == [6, 12]
        seen = ranks.run(8, in_the_middle)
    finally:
        ranks.close()
    assert [run[0] for run in seen] == [float(r) for r in range(8)]
    assert [run[1] for run in seen] == [0.0, 1.5, 1.5, 3.5, 3.5, 5.0, 6.0, 7.0]
    assert [run[2] for run in seen] == [0.0, 2.5, 2.5, 2.5, 2.5, 5.0, 6.0, 7.0]


def empty() -> Any:
    with watched() as sent:
        averager = fjoin.PeriodicModelAverager(2)
        averager.average_parameters([])
        averager.average_parameters([{"params": []}])
    return averager.step, len(sent)


def test_no_parameters(pool: Any) -> None:
    assert pool.run(2, empty) == [(2, 0)] * 2


def alone() -> Any:
    p = nn.Parameter(torch.ones(2))
    with watched() as sent:
        for averager in (fjoin.PeriodicModelAverager(2), fjoin.HierarchicalModelAverager({2: 1})):
            averager.average_parameters([p])
    return p._version, len(sent)


def test_one_rank_does_nothing(pool: Any) -> None:
    assert pool.run(1, alone) == [(0, 0)] and alone() == (0, 0)


def test_simulated_ranks() -> None:
    def one_rank(value: float) -> float:
        p = torch.tensor(value)
        fjoin.PeriodicModelAverager(2).average_parameters([p])
        return p.item()

    assert tx.simulate(one_rank, {"data": 3}, [0.0, 1.0, 5.0]) == [2.0] * 3


def long_run(steps: int) -> Any:
    with quiet():
        averager = fjoin.HierarchicalModelAverager({1: 2, 2: 4})
    params = [nn.Parameter(torch.zeros(n)) for n in (3, 1000)]
    optimizer = torch.optim.SGD(params, 0.1)
    for step in range(steps):
        gradients(params, step)
        optimizer.step()
        averager.average_parameters(params)
    return [p.detach() for p in params]


@pytest.mark.parametrize("steps", [100, pytest.param(500, marks=pytest.mark.long)])
def test_interleaved_periods_do_not_hang(pool: Any, steps: int) -> None:
    """Many steps with a message in each, now over pairs and now over all, without any other synchronisation."""
    first, second, *_ = pool.run(4, long_run, steps)
    assert same_bits(first, second)


# -- attributes, errors ------------------------------------------------------------------------------------


def another_group() -> Any:
    averager = fjoin.PeriodicModelAverager(2)
    averager.process_group = dist.new_subgroups(group_size=2)[0]
    averager.period = 1
    p = nn.Parameter(torch.tensor(float(dist.get_rank())))
    averager.average_parameters([p])
    return p.item(), averager.process_group.size()


def test_attributes_can_be_set(pool: Any) -> None:
    assert pool.run(4, another_group) == [(0.5, 2), (0.5, 2), (2.5, 2), (2.5, 2)]


def differing(what: str) -> str:
    rank = dist.get_rank()
    averager = fjoin.PeriodicModelAverager(2 + rank if what == "period" else 2)
    averager.step = rank if what == "step" else 0
    params = [nn.Parameter(torch.ones(3))] * (0 if what == "params" and rank else 1)
    return raises_text(fjoin.DesyncError, lambda: averager.average_parameters(params))


@pytest.mark.parametrize("what", ["period", "step", "params"])
def test_ranks_that_differ_are_reported(pool: Any, what: str) -> None:
    text = {"period": "period=3", "step": "at step 1", "params": "in its parameters"}[what]
    for reported in pool.run(2, differing, what):
        assert text in reported and "rank 1 differs from rank 0" in reported


def abandoned() -> str:
    averager, p = fjoin.PeriodicModelAverager(2), nn.Parameter(torch.ones(3))
    averager.average_parameters([p])
    averager.average_parameters([p])
    if dist.get_rank() == 1:
        averager.mesh.report_failure(ValueError("rank 1 has failed"), 2)
        return "rank 1 has failed"
    return raises_text(fjoin.PeerLost, lambda: averager.average_parameters([p]))


def test_a_rank_that_fails_is_reported(pool: Any) -> None:
    for reported in pool.run(3, abandoned):
        assert "rank 1 has failed" in reported


ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "period 0": (lambda: fjoin.PeriodicModelAverager(0), ValueError, "period must be a whole number, at least 1, got 0"),
    "period 1.5": (lambda: fjoin.PeriodicModelAverager(1.5), ValueError, "got 1.5"),  # type: ignore[arg-type]
    "warmup": (lambda: fjoin.PeriodicModelAverager(2, -1), ValueError, "warmup_steps must be a whole number, at least 0"),
    "no levels": (lambda: fjoin.HierarchicalModelAverager(), ValueError, "at least one period"),
    "empty": (lambda: fjoin.HierarchicalModelAverager({}), ValueError, "at least one period"),
    "level 0": (lambda: fjoin.HierarchicalModelAverager({0: 1}), ValueError, "a period must be"),
    "size 0": (lambda: fjoin.HierarchicalModelAverager({2: 0}), ValueError, "a size must be"),
    "no multiple": (lambda: fjoin.HierarchicalModelAverager({2: 1, 3: 1}), ValueError, "got 3 after 2"),
    "order": (lambda: fjoin.HierarchicalModelAverager({4: 1, 2: 1}), ValueError, "got 2 after 4"),
    "sizes": (lambda: fjoin.HierarchicalModelAverager({2: 2, 4: 3}), ValueError, "got 3 after 2"),
    "last size": (lambda: fjoin.HierarchicalModelAverager({2: 2, 4: 4}), ValueError, "process_group, 1, got 4"),
    "warmup of levels": (lambda: fjoin.HierarchicalModelAverager({2: 1}, -1), ValueError, "warmup_steps must be"),
    "a tensor": (lambda: fjoin.PeriodicModelAverager(2).average_parameters(torch.ones(2)), TypeError, "got Tensor"),
    "a number": (lambda: fjoin.PeriodicModelAverager(2).average_parameters([3]), TypeError, "got int"),  # type: ignore[list-item]
    "names": (
        lambda: fjoin.PeriodicModelAverager(2).average_parameters(make_model().named_parameters()),  # type: ignore[arg-type]
        TypeError,
        "got tuple",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, kind, text = ERRORS[name]
    raises_text(kind, call, text)


def test_a_period_of_one_warns() -> None:
    with pytest.warns(UserWarning, match="period is 1"):
        fjoin.PeriodicModelAverager(1)
    with pytest.warns(UserWarning, match="largest period is 1"):
        fjoin.HierarchicalModelAverager({1: 1})
    fjoin.HierarchicalModelAverager({1: 1, 2: 1})


def uses(whose: str) -> Any:
    with torchs_averages_raise():
        averager = made(whose, "periodic", 2)
        p: Tensor = nn.Parameter(torch.ones(2))
        p.grad = torch.ones(2)
        if whose == "ours":
            return averager.average_parameters([p])
        return raises_text(AssertionError, lambda: averager.average_parameters([p]))


def test_torchs_averages_are_not_used(pool: Any) -> None:
    """The replacement in `torchs_averages_raise` takes effect: torch's averager raises in it."""
    assert pool.run(2, uses, "ours") == [None, None]
    assert all("was called" in text for text in pool.run(2, uses, "torch's"))
