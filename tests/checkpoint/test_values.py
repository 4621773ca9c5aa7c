"""What a save keeps of a run, and a load gives back once: values under names, a user's own, and objects' states."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint._folder import Folder
from fjoin.checkpoint._leaves import SavedLeaves
from fjoin.checkpoint._manifest import read_step
from tests.helpers import raises_text, same_bits

START = {"layer": {"w": torch.linspace(-1, 1, 12).reshape(3, 4)}, "b": torch.zeros(3)}
FEEDBACK = tx.error_feedback(tx.compress(tx.int8(block=4), tx.mean("data")))
ADAM = tx.adam(0.1)
X = torch.linspace(0.3, 1.7, 12).reshape(3, 4)


def step_of(hook: tx.Transform, optimizer: tx.Optimizer = ADAM, after: tx.Transform | None = None) -> fjoin.TrainStep:
    return fjoin.train_step(
        lambda p, x: (p["layer"]["w"] * x).square().sum() + p["b"].sum(), tx.fuse(hook, optimizer, after=after)
    )


def saved(folder: Path, step: fjoin.TrainStep) -> fjoin.TrainState:
    state, _ = step(step.init(START), X)
    fjoin.save(folder, step, state)
    return state


def test_stages_and_what_is_inside_them(tmp_path: Path) -> None:
    hook = tx.chain(FEEDBACK, tx.skip_if_nonfinite(tx.clip_by_global_norm(1.0)), FEEDBACK)
    saved(tmp_path, step_of(hook, after=tx.chain(tx.ema(0.5), tx.ema(0.9))))
    _, manifest = Folder(tmp_path).read(1)
    names = {*manifest.leaves, *manifest.numbers}
    assert {name for name in names if name.endswith(".b") or "." not in name[9:]} == {
        "params.b",
        "run.batches",
        "pipeline.step",
        "pipeline.window",
        "pipeline.hook.error_feedback#0.error.b",
        "pipeline.hook.error_feedback#1.error.b",
        "pipeline.after.ema#0.average.b",
        "pipeline.after.ema#1.average.b",
    }


def test_a_stage_more_renames_no_other_and_arguments_that_differ_are_told(tmp_path: Path) -> None:
    state = saved(tmp_path, step_of(FEEDBACK))
    more = step_of(tx.chain(tx.clip_by_value(5.0), FEEDBACK, tx.clip_by_global_norm(9.0)), tx.adam(0.2))
    with pytest.warns(UserWarning, match=r"the checkpoint is of.*lr=0.1.*lr=0.2") as found:
        again = fjoin.load(tmp_path, more, START)
    assert len(found) == 1
    assert torch.equal(again.pipeline.hook[1].error["b"], state.pipeline.hook.error["b"])
    assert torch.equal(again.params["layer"]["w"], state.params["layer"]["w"])


@pytest.mark.parametrize(
    ("fresh", "anew"),
    [
        (("pipeline.hook",), {"error"}),
        (("pipeline.hook.error_feedback#0.error.*",), {"error"}),
        (("*.exp_avg", "pipeline.hook.error_feedback#0.error"), {"error", "exp_avg"}),
    ],
)
def test_names_that_start_anew(fresh: tuple[str, ...], anew: set[str], tmp_path: Path) -> None:
    def one_rank() -> Any:
        state = saved(tmp_path, step_of(FEEDBACK)).clone()
        return state, fjoin.load(tmp_path, step_of(FEEDBACK), START, fresh=fresh)

    for state, again in tx.simulate(one_rank, {"data": 2}):
        found = {
            "error": (again.pipeline.hook.error["layer.w"], state.pipeline.hook.error["layer.w"]),
            "exp_avg": (again.pipeline.optimizer["layer"]["w"].exp_avg, state.pipeline.optimizer["layer"]["w"].exp_avg),
        }
        for name, (value, before) in found.items():
            assert before.any() and torch.equal(value, torch.zeros_like(value) if name in anew else before)
    assert not fjoin.load(tmp_path, step_of(FEEDBACK), START, fresh=("params.b",)).params["b"].any()


ANEW = {
    "masters": (tx.fuse(tx.mean("data"), tx.mixed_precision(ADAM)), "pipeline.optimizer", torch.bfloat16),
    "the anchor of an outer step": (tx.diloco(ADAM, tx.mean("data"), 2), "pipeline.after", torch.float32),
    "exact values of slices": (
        tx.zero(tx.mean("data"), ADAM, "data", gather_codec=tx.int8()), "pipeline.gather", torch.float32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ANEW)
def test_what_starts_anew_starts_from_the_parameters_of_the_checkpoint(what: str, tmp_path: Path) -> None:
    pipeline, fresh, dtype = ANEW[what]
    start = {path: p.to(dtype) for path, p in {"w": torch.linspace(-1, 1, 600), "b": torch.zeros(3)}.items()}
    far = {path: p + 5 for path, p in start.items()}  # as after long training

    def made() -> fjoin.TrainStep:
        return fjoin.train_step(lambda p, x: ((p["w"] * x).sum() + p["b"].sum()).float(), pipeline)

    def one_rank() -> float:
        step, again = made(), made()
        fjoin.save(tmp_path, step, step.init(far))
        state = fjoin.load(tmp_path, again, start, fresh=(fresh,))
        for _ in range(2):
            state, _ = again(state, torch.ones((), dtype=dtype))
        return max(float((state.params[path].float() - far[path].float()).abs().max()) for path in start)

    assert max(tx.simulate(one_rank, {"data": 2})) < 0.5


def drift(folder: Path) -> tuple[str, Tensor, Tensor]:
    """A parameter of rank 1 differs. Returns the warning that is raised, and the parameters before a load and after it."""
    step = step_of(tx.mean("data"))
    state = step.init(START)
    state.params["b"].add_(tx.axis_index("data"))
    own, text = state.params["b"].clone(), "saved"
    try:
        fjoin.save(folder, step, state)
    except UserWarning as warning:
        text = str(warning)
    return text, own, fjoin.load(folder, step_of(tx.mean("data")), START).params["b"]


def test_a_drift_is_noted_and_healed_and_a_warning_that_is_an_error_parts_no_ranks(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (told, first, _), *others = found = tx.simulate(lambda: drift(tmp_path), {"data": 3})
    assert "params.b of rank 1 differs from that of rank 0" in told and [text for text, *_ in others] == ["saved"] * 2
    assert all(torch.equal(after, first) for *_, after in found)
    assert "params.b of rank 1" in (tmp_path / "step-00000000" / "manifest.json").read_text()


def test_what_ranks_have_in_common_is_written_once_by_turns(tmp_path: Path) -> None:
    params = {f"w{i}": torch.ones(1000) for i in range(12)}

    def run() -> None:
        pipeline = tx.fuse(tx.mean("data"), tx.sgd(0.1, momentum=0.9))
        step = fjoin.train_step(lambda p, x: sum(v.sum() for v in p.values()), pipeline)
        fjoin.save(tmp_path, step, step.init(params))

    tx.simulate(run, {"data": 3})
    sizes = [path.stat().st_size for path in (tmp_path / "step-00000000").glob("*.safetensors")]
    assert 96_000 < sum(sizes) < 102_000  # parameters and momenta, and headers
    assert len(sizes) == 3 and max(sizes) < 1.2 * min(sizes)


EXTRA = {
    "best": float("inf"),
    "history": [1, 2.5, None, "text", {"a.b": [True]}],
    "mean": torch.arange(6.0).reshape(2, 3),
    "seen": [torch.tensor(3), torch.zeros(0, 2, dtype=torch.bfloat16), torch.tensor([1 + 2j])],
    # small ones of one dtype are copied together
    "views": [torch.arange(12.0).view(3, 4).T, torch.arange(70_000.0)[::7], torch.ones(3).expand(2, 3)],
    "odd": [torch.tensor([1 + 2j]).conj(), torch.ones(70_000, dtype=torch.int8)],
    "half": [torch.ones(5, dtype=torch.bfloat16), torch.ones(3, dtype=torch.float8_e4m3fn)],
}
ODD = {"numbers": [float("nan"), np.float64("-inf")]}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_extra_is_read_back_on_any_number_of_ranks(ranks: int, background: bool, tmp_path: Path) -> None:
    def runs() -> fjoin.Checkpoints:
        return fjoin.Checkpoints(tmp_path, {"model": torch.nn.Linear(1, 1)}, background=background)

    def save() -> None:
        run, log = runs(), [1]
        for step, extra in enumerate(({"a": torch.ones(1)}, None, EXTRA | ODD | {"log": log, "pair": (1, (log,))})):
            run.save(step, extra=extra)
            log.append(2)
        run.wait()

    def load() -> Any:
        run = runs()
        run.restore()
        return run.extra

    tx.simulate(save, {"data": 2})
    want = EXTRA | {"log": [1, 2, 2], "pair": [1, [[1, 2, 2]]]}
    for extra in tx.simulate(load, {"data": ranks}):
        assert repr(extra.pop("numbers")) == "[nan, -inf]"
        assert same_bits(extra, want)


def without_gathering(folder: str) -> None:
    """The whole state of a ZeroRedundancyOptimizer is never on one rank."""

    def made() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        return {
            "model": model,
            "optimizer": fjoin.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1),
        }

    of = made()
    of["model"](torch.ones(3)).sum().backward()
    of["optimizer"].step()
    with mock.patch.object(
        fjoin.ZeroRedundancyOptimizer, "consolidate_state_dict", side_effect=AssertionError("it gathers")
    ):
        path = fjoin.save(folder, {"optimizer": of["optimizer"]}, 1)
        fjoin.load(folder, {"optimizer": made()["optimizer"]})
    (own,) = path.glob(f"rank-{dist.get_rank():05d}-*")
    whole = sum(2 * 4 * p.numel() for p in of["model"].parameters())
    with contextlib.closing(SavedLeaves(path, read_step(path))) as leaves:
        file = leaves.file([entry.name for entry in read_step(path).files].index(own.name))
        held = sum(4 * file.read(name).numel() for name in file.names if ".state." in name and file.span(name).shape)
    assert 0 < held < 0.8 * whole


def test_a_zero_redundancy_optimizer_is_saved_by_slices(pool: Any, tmp_path: Path) -> None:
    pool.run(2, without_gathering, str(tmp_path))


class Dict(dict[str, Any]):
    """An object whose state is itself."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clear()
        self.update(state)


def of_rank(rank: int) -> dict[str, Any]:
    """Values of other forms, of one rank, in another order, and of all."""
    own = {"b": torch.ones(2 + rank), "d": torch.zeros(2, 3).reshape(2 + rank, 3 - rank), f"only {rank}": torch.ones(1)}
    return dict(sorted((own | {"a": torch.ones(5), "c": torch.ones(7)}).items(), reverse=bool(rank)))


def save_and_load(folder: Path, rank: int) -> None:
    state = of_rank(rank)
    for step, mine in enumerate((state, state if rank else {}), 1):  # at last one rank has nothing
        fjoin.save(folder, {"it": Dict(mine)}, step)
        assert fjoin.load(folder, again := {"it": Dict()}) == step
        assert again["it"].keys() == mine.keys() and all(torch.equal(again["it"][name], mine[name]) for name in mine)


def test_ranks_may_have_values_of_other_forms(tmp_path: Path) -> None:
    tx.simulate(lambda rank: save_and_load(tmp_path, rank), {"data": 2}, [0, 1])
    assert fjoin.checkpoint.verify(tmp_path) == fjoin.checkpoint.verify(tmp_path / "step-00000001") == []
    one = {"it": Dict()}
    raises_text(
        fjoin.CheckpointError, lambda: fjoin.load(tmp_path, one), "objects.it.", "values of their own", "fresh="
    )


def test_a_module_keeps_its_version(tmp_path: Path) -> None:
    seen: list[Any] = []
    module = nn.BatchNorm1d(2)
    module.register_load_state_dict_pre_hook(
        lambda module, state, prefix, local, *rest: seen.append(local.get("version"))
    )
    fjoin.save(tmp_path, {"model": nn.BatchNorm1d(2)}, 1)
    fjoin.load(tmp_path, {"model": module})
    assert seen == [nn.BatchNorm1d._version]


def test_names_that_would_be_one_in_the_file_are_refused(tmp_path: Path) -> None:
    def one_rank(rank: int) -> None:
        fjoin.save(tmp_path, {"m": Dict({"w": torch.full((2,), float(rank)), "w@rank-0": torch.zeros(2)})}, 1)

    with pytest.raises((ValueError, fjoin.CheckpointError), match="both called 'objects.m.w@rank-0'"):
        tx.simulate(one_rank, {"data": 2}, [0, 1])
    assert not list(tmp_path.glob("step*"))
