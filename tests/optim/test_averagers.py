"""PeriodicModelAverager and HierarchicalModelAverager: equal to torch's, and where they differ on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text
from tests.optim.averager_problem import displacements, made
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


# Number of ranks, the averager, and in which of 20 steps some ranks are averaged. The warm-up is not subtracted from the
# steps of levels, as in torch.
SCHEDULES: list[tuple[int, str, tuple[Any, ...], list[tuple[list[int], list[int]]]]] = [
    (2, "periodic", (4, 0), [([0, 1], [0, 4, 8, 12, 16])]), (2, "periodic", (4, 10), [([0, 1], [10, 14, 18])]),
    (3, "periodic", (3, 2), [([0, 1, 2], [2, 5, 8, 11, 14, 17])]), (4, "periodic", (7, 5), [([0, 1, 2, 3], [5, 12, 19])]),
    (3, "periodic", (1, 2), [([0, 1, 2], list(range(2, 20)))]),
    *((4, "hierarchical", ({2: 2, 4: 4}, warmup), [
        *((ranks, [s for s in range(warmup, 20) if s % 4 == 0]) for ranks in ([0, 1, 2, 3], [1, 2])),
        *((pair, [s for s in range(warmup, 20) if s % 2 == 0]) for pair in ([0, 1], [2, 3])),
    ]) for warmup in (0, 5, 9)),
    *((4, "hierarchical", (levels, 3), []) for levels in ({3: 4}, {2: 1, 4: 4}, {2: 4, 4: 4}, {1: 2, 3: 4})),
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize(("ranks", "kind", "args", "expected"), SCHEDULES, ids=[str(row[:3]) for row in SCHEDULES])
def test_averages_are_torchs(pool: Any, ranks: int, kind: str, args: Any, expected: Any) -> None:
    runs = same_runs(pool, ranks, kind, *args)
    for some, steps in expected:
        assert averaged(runs, some) == steps


def test_three_levels() -> None:
    """Simulated, on 8 ranks: the middle level is an average of averages."""

    def one_rank(value: float) -> list[float]:
        averager = made("ours", "hierarchical", {1: 2, 2: 4, 4: 8})
        p, seen = torch.tensor(value), []
        for step in (1, 2, 4):
            averager.step = step
            averager.average_parameters([p])
            seen.append(p.item())
        return seen

    seen = tx.simulate(one_rank, {"level2": 2, "level1": 2, "level0": 2}, [float(r) for r in range(8)])
    assert [run[0] for run in seen] == [0.5, 0.5, 2.5, 2.5, 4.5, 4.5, 6.5, 6.5]
    assert [run[1] for run in seen] == [1.5] * 4 + [5.5] * 4 and [run[2] for run in seen] == [3.5] * 8


# -- what one rank sees ------------------------------------------------------------------------------------


def averages(*params: Tensor, kind: str = "periodic", args: tuple[Any, ...] = (2,)) -> list[float]:
    """The first number of each parameter after an average."""
    made("ours", kind, *args).average_parameters(list(params))
    return [p.detach().reshape(-1)[0].item() for p in params]


def own(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, float(dist.get_rank())))


def in_parts(kind: str, args: list[Any]) -> Any:
    """On two halves of the ranks, made by torch's new_subgroups; then on some ranks, of which others average nothing."""
    half, _ = dist.new_subgroups(group_size=2)
    outside = dist.new_group([1, 2])
    averager = made("ours", kind, *args, outside)
    averager.average_parameters([p := own()])
    changed = fjoin.PeriodicModelAverager(2)
    changed.process_group, changed.period = half, 1
    changed.average_parameters([q := own()])
    return (*averages(own(), kind=kind, args=(*args, half)), p.item(), averager.process_group is None, q.item())


def used_elsewhere() -> Any:
    """Rank r uses only the parameter r; the parameters come from a generator."""
    params = [nn.Parameter(torch.full((2 + i,), float(dist.get_rank() + i))) for i in range(3)]
    params[dist.get_rank()].grad = torch.ones(2 + dist.get_rank())
    fjoin.PeriodicModelAverager(2).average_parameters(p for p in params)
    return [p.unique().tolist() for p in params]


def several() -> Any:
    """One message for each dtype, 16 bits with float32: three, then two for the integers and a weight."""
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
    params: list[Tensor] = [nn.Parameter(own(3).detach().to(dtype)) for dtype in dtypes]
    params += [nn.Parameter(own(4, 2).detach().t()), nn.Parameter(torch.tensor(dist.get_rank()), requires_grad=False)]
    versions = [p._version for p in params]
    with watched() as sent:
        fjoin.PeriodicModelAverager(2).average_parameters([*params, params[0]])
    assert [p._version for p in params] > versions
    assert [p.dtype for p in params[:5]] == list(dtypes) and params[-1].dtype is torch.int64
    with watched() as second:
        fjoin.PeriodicModelAverager(2).average_parameters(params[:2])
    return [p.detach().real.double().unique().tolist() for p in params], len(sent), len(second)


def with_buffers(kind: str, levels: Any) -> Any:
    """Integer buffers become the maximum."""
    model, averager, seen = nn.BatchNorm1d(2), made("ours", kind, levels, 1), []
    model.running_mean.fill_(dist.get_rank())  # type: ignore[union-attr, operator]
    model.num_batches_tracked.fill_(dist.get_rank())  # type: ignore[union-attr, operator]
    for _ in range(5):
        averager.average_parameters([*model.parameters(), *model.buffers()])
        seen.append((model.running_mean[0].item(), model.num_batches_tracked.item()))  # type: ignore[index, operator, union-attr]
    return seen


def large() -> Any:
    """The sum does not overflow, and values are not divided before it, as torch does."""
    p = nn.Parameter(torch.tensor([6e4, 6e-8], dtype=torch.float16))
    fjoin.PeriodicModelAverager(2).average_parameters([p])
    return p.tolist() == torch.tensor([6e4, 6e-8], dtype=torch.float16).tolist()


def alone() -> Any:
    p = nn.Parameter(torch.ones(2))
    with watched() as sent:
        for averager in (fjoin.PeriodicModelAverager(2), fjoin.HierarchicalModelAverager({2: 1})):
            averager.average_parameters([p])
    return p._version, len(sent)


PARTS = [(0.5, 0.0, True, 0.5), (0.5, 1.5, False, 0.5), (2.5, 1.5, False, 2.5), (2.5, 3.0, True, 2.5)]
# Function, its arguments, and what each rank sees.
SEEN: list[tuple[Callable[..., Any], tuple[Any, ...], list[Any]]] = [
    (in_parts, ("periodic", [2, 0]), PARTS), (in_parts, ("hierarchical", [{2: 2}, 0]), PARTS),
    (used_elsewhere, (), [[[1.0], [2.0], [3.0]]] * 3),
    (several, (), [([[0.5]] * 6 + [[1.0]], 5, 2)] * 2), (large, (), [True] * 2), (alone, (), [(0, 0)]),
    (with_buffers, ("periodic", 3), [[(rank, rank)] + [(0.5, 1)] * 4 for rank in range(2)]),
    (with_buffers, ("hierarchical", {2: 2, 4: 4}), [
        [(rank, rank)] * 2 + [(rank // 2 * 2 + 0.5, rank // 2 * 2 + 1)] * 2 + [(1.5, 3)] for rank in range(4)]),
]  # fmt: skip


@pytest.mark.parametrize(("function", "args", "expected"), SEEN, ids=[f"{row[0].__name__} {row[1]}" for row in SEEN])
def test_what_a_rank_sees(pool: Any, function: Any, args: tuple[Any, ...], expected: list[Any]) -> None:
    assert pool.run(len(expected), function, *args) == expected


def test_without_other_ranks_or_on_simulated_ones() -> None:
    assert alone() == (0, 0)
    assert tx.simulate(lambda v: averages(torch.tensor(v)), {"data": 3}, [0.0, 1.0, 5.0]) == [[2.0]] * 3


# -- ranks that differ, or fail ----------------------------------------------------------------------------


def differing(what: str) -> str:
    rank = dist.get_rank()
    averager = fjoin.PeriodicModelAverager(2 + rank if what == "period" else 2)
    averager.step = rank if what == "step" else 0
    params = [nn.Parameter(torch.ones(3))] * (0 if what == "params" and rank else 1)
    return raises_text(fjoin.DesyncError, lambda: averager.average_parameters(params))


def abandoned(_: str) -> str:
    averager, p = fjoin.PeriodicModelAverager(2), nn.Parameter(torch.ones(3))
    averager.average_parameters([p])
    averager.average_parameters([p])
    if dist.get_rank() == 1:
        averager.mesh.report_failure(ValueError("rank 1 has failed"), 2)
        return "rank 1 has failed"
    return raises_text(fjoin.PeerLost, lambda: averager.average_parameters([p]))


ON_ALL = [
    (differing, "period", "period=3"), (differing, "step", "at step 1"), (differing, "params", "in its parameters"),
    (abandoned, "", "rank 1 has failed"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "what", "words"), ON_ALL, ids=[row[2] for row in ON_ALL])
def test_all_ranks_are_told(pool: Any, function: Any, what: str, words: str) -> None:
    for text in pool.run(2 if what else 3, function, what):
        assert words in text and (not what or "rank 1 differs from rank 0" in text)


def test_a_period_of_one_warns() -> None:
    with pytest.warns(UserWarning, match="period is 1"):
        fjoin.PeriodicModelAverager(1)
    with pytest.warns(UserWarning, match="largest period is 1"):
        fjoin.HierarchicalModelAverager({1: 1})
    fjoin.HierarchicalModelAverager({1: 1, 2: 1})
