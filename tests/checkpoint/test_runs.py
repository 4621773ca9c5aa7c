"""Runs that are stopped and resumed: data, signals, the background, and what goes wrong."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint import _save, verify
from tests.helpers import raises_text

PIPELINE = tx.fuse(tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), tx.adamw(0.05))
START = {"w": torch.linspace(-1, 1, 6), "b": torch.zeros(())}


def loss_fn(params: Any, batch: Any) -> Tensor:
    x = torch.nn.functional.dropout(batch[0], 0.3)
    return ((x * params["w"]).sum(1) + params["b"]).square().mean()


def loader_of(rank: int, workers: int = 0) -> DataLoader[Any]:
    x = torch.randn(12 + 4 * rank, 6, generator=torch.Generator().manual_seed(rank))
    return DataLoader(TensorDataset(x), batch_size=4, shuffle=True, num_workers=workers)


def epochs(rank: int, folder: Path | str, saves: int | None, **options: Any) -> Any:
    """Two epochs; stops after the save at the step `saves`."""
    step = fjoin.train_step(loss_fn, PIPELINE, weight=lambda batch: len(batch[0]))
    batches = step.join(loader_of(rank))
    torch.manual_seed(rank)
    with fjoin.Checkpoints(folder, step, **options) as runs:
        state = runs.restore(START, data=batches)
        while batches.epoch < 2:
            for batch in batches:
                state, metrics = step(state, batch)
                if state.step == saves:
                    runs.save(state, data=batches)
                    batches.stop()
            if saves is not None:
                break
    last = state.clone()
    step.close()
    return dict(last.params), last.step, last.batches


def quietly(function: Any, *args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return function(*args, **options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("saves", [1, 3, 4, 6])
@pytest.mark.parametrize("background", [False, True])
def test_shuffled_data_and_dropout_resume_to_the_bit(saves: int, background: bool, pool: Any, tmp_path: Path) -> None:
    whole = pool.run(2, real_epochs, str(tmp_path / "whole"), None, False)
    pool.run(2, real_epochs, str(tmp_path / "cut"), saves, background)
    resumed = pool.run(2, real_epochs, str(tmp_path / "cut"), None, False)
    for (params, *counts), (want, *expected) in zip(resumed, whole, strict=True):
        assert counts == expected
        assert all(torch.equal(params[path], want[path]) for path in want)


def real_epochs(folder: str, saves: int | None, background: bool) -> Any:
    import torch.distributed as dist

    return quietly(epochs, dist.get_rank(), folder, saves, background=background)


def until_signalled(folder: str) -> Any:
    """Rank 1 gets a SIGTERM in step 5."""
    import torch.distributed as dist

    rank = dist.get_rank()
    step = fjoin.train_step(lambda p, x: (p["w"] * x).sum() + p["b"].sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    batches = step.join([torch.ones(6)] * 1000)
    with fjoin.Checkpoints(folder, step) as runs:
        state = runs.restore(START)
        for batch in batches:
            if rank == 1 and state.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            state, metrics = step(state, batch)
            runs.save(state, metrics, data=batches)
    return state.step, batches.stopped, signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None)


def test_a_signal_on_one_rank_saves_and_stops_all(pool: Any, tmp_path: Path) -> None:
    (a, *rest), (b, *other) = pool.run(2, until_signalled, str(tmp_path))
    assert 5 < a == b <= 8 and rest == other == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{a:08d}"] and not verify(tmp_path)


def by_the_clock(folder: str) -> Any:
    step = fjoin.train_step(lambda p, x: (p["w"] * x).sum() + p["b"].sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    saved = []
    with fjoin.Checkpoints(folder, step, every_s=0.05, keep_last=None) as runs:
        state = runs.restore(START)
        for batch in step.join([torch.ones(6)] * 20):
            state, metrics = step(state, batch)
            time.sleep(0.02)
            if runs.save(state, metrics) is not None:
                saved.append(state.step)
    return saved


def test_saves_by_the_clock_are_of_the_same_steps(pool: Any, tmp_path: Path) -> None:
    a, b = pool.run(2, by_the_clock, str(tmp_path))
    assert a == b and 2 <= len(a) <= 10


def trained(folder: Path, until: int, rank: int, **options: Any) -> Any:
    step = fjoin.train_step(lambda p, x: (p["w"] * x).sum() ** 2, PIPELINE)
    runs = fjoin.Checkpoints(folder, step, every=2, **options)
    state = runs.restore(START)
    begun = state.step
    while state.step < until:
        state, metrics = step(state, torch.full((6,), 0.1 * (rank + state.step)))
        runs.save(state, metrics)
    runs.wait()
    last = {path: p.clone() for path, p in state.params.items()}
    step.close()
    return begun, last


def simulated(folder: Path, until: int, **options: Any) -> Any:
    return tx.simulate(lambda rank: quietly(trained, folder, until, rank, **options), {"data": 2}, [0, 1])


def test_a_damaged_step_is_set_aside(tmp_path: Path) -> None:
    want = simulated(tmp_path / "whole", 8)
    simulated(tmp_path / "cut", 6)
    path = tmp_path / "cut" / "step-00000006" / "rank-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    found = simulated(tmp_path / "cut", 8)
    assert found[0][0] == 4 and all(torch.equal(found[0][1][name], want[0][1][name]) for name in START)
    names = sorted(one.name[:13] for one in (tmp_path / "cut").iterdir())
    assert names == ["step-00000004", "step-00000006", "step-00000006", "step-00000008"]


def test_a_step_of_ones_choice_and_other_settings(tmp_path: Path) -> None:
    simulated(tmp_path, 6)

    def run(rank: int) -> Any:
        step = fjoin.train_step(lambda p, x: (p["w"] * x).sum() ** 2, PIPELINE)
        runs = fjoin.Checkpoints(tmp_path, step, keep_last=None)
        state = runs.restore(START, step=2)
        names = [sorted(path.name[:22] for path in tmp_path.iterdir())]
        state, _ = step(state, torch.ones(6))
        runs.save(state)
        return state.step, [*names, sorted(path.name[:22] for path in tmp_path.iterdir())]

    step, (before, after) = quietly(tx.simulate, run, {"data": 2}, [0, 1])[0]
    assert step == 3 and before == ["step-00000002", "step-00000004", "step-00000006"]  # a look changes nothing
    assert after == ["step-00000002", "step-00000003", "step-00000004.rejected", "step-00000006.rejected"]
    shutil.rmtree(tmp_path)
    simulated(tmp_path, 4)
    other = {"w": torch.zeros(7), "b": torch.zeros(())}

    def of_another_model(rank: int) -> Any:
        step = fjoin.train_step(lambda p, x: (p["w"] * x).sum() ** 2, PIPELINE)
        return fjoin.Checkpoints(tmp_path, step).restore(other)

    raises_text(
        fjoin.CheckpointError,
        lambda: quietly(tx.simulate, of_another_model, {"data": 2}, [0, 1]),
        "'w'",
        "(6,)",
        "(7,)",
    )


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_cannot_write_is_an_error_on_all(
    background: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = _save.write_file

    def full(path: Path, *args: Any) -> Any:
        if "rank-00001" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, *args)

    monkeypatch.setattr(_save, "write_file", full)

    def run(rank: int) -> str:
        with pytest.raises(fjoin.CheckpointError) as found:
            quietly(trained, tmp_path, 4, rank, background=background)
        return str(found.value)

    for text in tx.simulate(run, {"data": 2}, [0, 1]):
        assert "No space left" in text and "step 2" in text
    assert not list(tmp_path.iterdir())


def test_a_state_within_a_window_and_bad_arguments(tmp_path: Path) -> None:
    step = fjoin.train_step(lambda p, x: (p["w"] * x).sum(), PIPELINE, accumulate=2)
    runs = fjoin.Checkpoints(tmp_path, step, every=1)
    state = quietly(runs.restore, START)
    state, metrics = step(state, torch.ones(6))
    assert runs.save(state, metrics) is None
    raises_text(ValueError, lambda: runs.save(state), "accumulation window", "metrics.stepped")
    state, metrics = step(state, torch.ones(6))
    raises_text(TypeError, lambda: runs.save(state, data=[1]), "batches = step.join(loader)")
    assert runs.save(state, metrics) is not None
    raises_text(ValueError, lambda: fjoin.Checkpoints(tmp_path, step, every=0), "every", "0")
    raises_text(ValueError, lambda: fjoin.Checkpoints(tmp_path, PIPELINE, every_s=1.0), "every_s", "train_step")
    step.close()


def with_buffers(params: Any, *rest: Any) -> Any:
    loss = (params["w"] * rest[-1]).sum()
    return (loss, None, {"n": rest[0]["n"] + 1}) if len(rest) == 2 else loss


def test_nothing_that_was_saved_is_ignored(tmp_path: Path) -> None:
    step = fjoin.train_step(with_buffers, PIPELINE)
    state = step.init(START, {"n": torch.zeros(())})
    state, _ = step(state, torch.ones(6))
    log = [1]
    runs = fjoin.Checkpoints(tmp_path, step, background=True)
    runs.save(state, extra=log)
    log.append(2)
    runs.wait()
    again = fjoin.Checkpoints(tmp_path, step)
    restored = again.restore(START, {"n": torch.zeros(())})
    assert restored.buffers is not None and restored.buffers["n"] == 1 and again.extra == [1]
    raises_text(fjoin.CheckpointError, lambda: again.restore(START), "['n']", "restore(params, buffers)")
    buffers = {"n": torch.zeros(())}
    batches = step.join([torch.ones(6)])
    raises_text(fjoin.CheckpointError, lambda: again.restore(START, buffers, data=batches), "no position", "data=")
    raises_text(
        fjoin.CheckpointError, lambda: again.restore(START, buffers, fresh=("pipelin.",)), "'pipelin.'", "no name"
    )
    wide = {path: p.double() for path, p in START.items()}
    raises_text(fjoin.CheckpointError, lambda: again.restore(wide, buffers), "float32", "float64")
    raises_text(fjoin.CheckpointError, lambda: fjoin.load(tmp_path, {"model": torch.nn.Linear(1, 1)}), "['model']")
    objects = {"model": torch.nn.Linear(1, 1)}
    raises_text(TypeError, lambda: fjoin.save(tmp_path, objects, 9, extra={1: 2}), "extra", "text as keys")
    step.close()


def test_objects_keep_their_versions_and_their_names_apart(tmp_path: Path) -> None:
    first, second = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    seen: list[Any] = []
    second.register_load_state_dict_pre_hook(
        lambda module, state, prefix, local, *rest: seen.append(local.get("version"))
    )
    fjoin.save(tmp_path / "a", {"model": first}, 1)
    fjoin.load(tmp_path / "a", {"model": second})
    assert seen == [torch.nn.BatchNorm1d._version]
    twice = {"a": torch.nn.ModuleDict({"b": torch.nn.Linear(1, 1)}), "a.b": torch.nn.Linear(1, 1)}
    raises_text(ValueError, lambda: fjoin.save(tmp_path / "b", twice, 1), "'a.b'", "other names")


def test_what_ranks_have_in_common_is_written_once_by_turns(tmp_path: Path) -> None:
    params = {f"w{i}": torch.ones(1000) for i in range(12)}

    def run(rank: int) -> None:
        step = fjoin.train_step(
            lambda p, x: sum(v.sum() for v in p.values()), tx.fuse(tx.mean("data"), tx.sgd(0.1, momentum=0.9))
        )
        fjoin.save(tmp_path, step, step.init(params))

    tx.simulate(run, {"data": 3}, [0, 1, 2])
    sizes = [path.stat().st_size for path in (tmp_path / "step-00000000").glob("*.safetensors")]
    assert 96_000 < sum(sizes) < 102_000  # parameters and momenta, and headers
    assert len(sizes) == 3 and max(sizes) < 1.2 * min(sizes)


def test_a_save_that_never_ends_is_given_up_after_an_error_of_the_loop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = _save.write_file

    def full(path: Path, *args: Any) -> Any:
        if "rank-00001" in path.name:  # rank 0 waits for it
            raise OSError(28, "No space left on device")
        return write(path, *args)

    def run(rank: int) -> None:
        step = fjoin.train_step(lambda p, x: (p["w"] * x).sum() ** 2, PIPELINE)
        with fjoin.Checkpoints(tmp_path, step, background=True) as runs:
            runs.save(step.init(START))
            raise RuntimeError("of the loop")

    monkeypatch.setattr(_save, "write_file", full)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="of the loop"):
        quietly(tx.simulate, run, {"data": 2}, [0, 1])
    assert time.monotonic() - began < 30 and not list(tmp_path.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name == "fjoin save"]
