"""A timeline of all ranks: its messages are those of `explain`, and its spans leave little time without a name."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fjoin
from fjoin import transforms as tx
from fjoin.groups import TIMELINES
from tests.helpers import raises_text, stepped
from tests.pool import Pool
from tests.training.small import step_of

MODEL = torch.nn.Sequential(*[torch.nn.Linear(500, 500) for _ in range(4)])
APPLY, PARAMS, _ = fjoin.functional(MODEL)
STEPS = 5
BUCKET_BYTES = 1 << 20
TABLE = (Path(__file__).parents[2] / "docs" / "watching.md").read_text().partition("| name in a trace |")[2]
LISTED = set(re.findall(r"^\| `(.*?)` \|", TABLE, re.MULTILINE))


def loss_fn(params: Any, x: Any) -> Any:
    return APPLY(params, {}, x).square().mean()


HOOK = tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0))
PIPELINES: dict[str, Callable[[], tx.Pipeline]] = {
    "mean": lambda: tx.fuse(HOOK, tx.adamw(1e-3)),
    "zero": lambda: tx.zero(HOOK, tx.adamw(1e-3), "data"),
    "int8": lambda: tx.fuse(tx.compress(tx.int8(), tx.mean("data")), tx.sgd(0.1)),
    "average": lambda: tx.fuse(tx.identity(), tx.sgd(0.1), after=tx.average_parameters("data")),
}


def run(path: str, name: str, steps: int = STEPS) -> None:
    mesh = fjoin.mesh({"data": -1})
    step, state = step_of(loss_fn, PIPELINES[name](), PARAMS, mesh=mesh, bucket_bytes=BUCKET_BYTES)
    state, _ = step(state, torch.randn(150, 500))  # the first one prepares buffers
    with fjoin.trace(path):
        for _ in range(steps):
            state, metrics = step(state, torch.randn(150, 500))
        assert metrics.weight == mesh.size
    assert not TIMELINES
    step.close()


def in_table(names: Iterable[str]) -> set[str]:
    """As docs/watching.md lists them."""
    return {
        re.sub(r"^bucket .*", "bucket 0", re.sub(r"^\w+ of (?!parameters)", "<transform> of ", name)) for name in names
    }


def events_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def spans(events: list[dict[str, Any]], rank: int, row: int = 0) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["pid"] == rank and event["tid"] == row]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PIPELINES)
def test_messages_are_those_of_explain_and_little_time_has_no_name(pool: Pool, name: str, tmp_path: Path) -> None:
    pool.run(2, run, str(tmp_path / "run.json"), name)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    events = events_of(tmp_path / "run.json")
    table = tx.explain(PIPELINES[name](), PARAMS, {"data": 2}, bucket_bytes=BUCKET_BYTES)
    for rank in (0, 1):
        begun = [e for e in events if e["ph"] == "b" and e["pid"] == rank]
        ended = {e["id"]: e["ts"] for e in events if e["ph"] == "e" and e["pid"] == rank}
        sent = sum(e["args"]["sent_bytes"] for e in begun)
        assert abs(sent - STEPS * table.sent_bytes) <= 0.02 * STEPS * table.sent_bytes + 64 * STEPS
        assert len(begun) == STEPS * table.messages
        assert all(e["args"]["axis"] == "data" and e["args"]["stage"] for e in begun)
        assert all(ended[e["id"]] >= e["ts"] for e in begun)
        waits = spans(events, rank, row=1)
        assert len(waits) == len(begun) and all(w["args"]["launched_ns"] / 1e3 <= w["ts"] for w in waits)
    for rank in (0, 1):
        found = spans(events, rank)
        steps = [e for e in found if e["name"] == "step"]
        assert len(steps) == STEPS and sum(e["name"] == "between steps" for e in found) == STEPS - 1
        rest = []
        for one in steps:
            inside = [e for e in found if e["ts"] > one["ts"] and e["ts"] + e["dur"] < one["ts"] + one["dur"]]
            named = sum(e["dur"] for e in inside if not e["name"].startswith("bucket"))
            rest.append(1 - named / one["dur"])
            assert {"forward", "states"} <= {e["name"] for e in inside}
        assert in_table(e["name"] for e in found) <= LISTED
        assert min(rest) < 0.02, rest  # another process only adds to it


def one_after_the_other(path: str) -> None:
    mesh = fjoin.mesh({"data": -1})
    step, state = step_of(loss_fn, PIPELINES["mean"](), PARAMS, mesh=mesh)
    for _ in range(3):
        with fjoin.trace(path):
            state, _ = step(state, torch.randn(2, 500))
    step.close()


def test_several_traces_of_one_name(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, one_after_the_other, str(tmp_path / "run.json"))
    events = events_of(tmp_path / "run.json")
    assert events[-1]["args"] == {"found": 2, "of": 2}, "rank 0 has waited for no part in vain"
    assert [sum(e["name"] == "step" for e in spans(events, rank)) for rank in (0, 1)] == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_simulated_ranks_are_processes_of_one_file(tmp_path: Path) -> None:
    def one_rank(rank: int) -> None:
        step, state = step_of(loss_fn, PIPELINES["mean"](), PARAMS, weight=len)
        with fjoin.trace(tmp_path / "run.json"):
            state = stepped(step, state, step.join([torch.randn(3, 500)] * (rank + 1)))

    tx.simulate(one_rank, {"data": 3}, [0, 1, 2])
    events = events_of(tmp_path / "run.json")
    assert [sum(e["name"] == "step" for e in spans(events, rank)) for rank in range(3)] == [3, 3, 3]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {f"rank {i}" for i in range(3)}


def failing(path: str) -> str:
    mesh = fjoin.mesh({"data": -1}, timeout_s=20)
    step, state = step_of(loss_fn, PIPELINES["mean"](), PARAMS, mesh=mesh)
    try:
        with fjoin.trace(path):
            for i in range(3):
                if i == 2 and mesh.rank == 1:
                    raise KeyError("a bug of the user's")
                state, _ = step(state, torch.randn(4, 500))
    except (KeyError, fjoin.FjoinError) as error:
        return type(error).__name__
    finally:
        step.close()
    return ""


def test_a_run_that_fails_leaves_what_it_has_recorded(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, failing, str(tmp_path / "run.json"))
    found = list(tmp_path.iterdir())
    assert tmp_path / "run.json" in found and not any(path.suffix == ".new" for path in found)
    assert sum(e["name"] == "step" for e in spans(events_of(tmp_path / "run.json"), 0)) >= 2


def test_a_trace_within_a_trace_and_a_folder_that_is_not_there(tmp_path: Path) -> None:
    def nested() -> None:
        with fjoin.trace(tmp_path / "a.json"), fjoin.trace(tmp_path / "b.json"):
            pass

    def missing() -> None:
        with fjoin.trace(tmp_path / "none" / "a.json"):
            pass

    raises_text(RuntimeError, nested, "a trace is being recorded already")
    raises_text(OSError, missing, "none")
    assert not TIMELINES and {path.name for path in tmp_path.iterdir()} == {"a.json"}


def test_a_full_disk_costs_the_trace_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fjoin.training._watch._KEPT", 1)
    (tmp_path / "run.json.1.rank-0.new").symlink_to("/dev/full")
    step = fjoin.train_step(lambda p, x: (p["w"] * x).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    states = [step.init({"w": torch.zeros(3)})]

    def traced() -> None:
        with fjoin.trace(tmp_path / "run.json"):
            for _ in range(3):
                states.append(step(states[-1], torch.ones(3))[0])

    raises_text(OSError, traced, "No space left")
    assert states[-1].step == 3 and not TIMELINES


def test_torchs_profiler_shows_the_same_names() -> None:
    """And those that docs/watching.md lists, each of them."""
    after, on_state = tx.average_parameters("data"), tx.average_state("data")
    pipeline = tx.fuse(HOOK, tx.adamw(1e-3), after=after, on_state=on_state)
    step = fjoin.train_step(
        lambda p, b, x: (loss_fn(p, x), {}, b), pipeline, accumulate=2, on_buffers=tx.average_buffers("data")
    )
    state = step.init(PARAMS, {"mean": torch.zeros(2)})
    with profile(activities=[ProfilerActivity.CPU]) as found:
        stepped(step, state, [torch.randn(2, 500)] * 2)
    names = {event.key.removeprefix("fjoin/") for event in found.key_averages() if event.key.startswith("fjoin/")}
    assert in_table(names) == LISTED - {"between steps", "gather of parameters", "fjoin::psum"}


def registered(path: str) -> None:
    model = DistributedDataParallel(copy.deepcopy(MODEL), bucket_cap_mb=1)
    fjoin.ddp.register(model, tx.fuse(tx.mean("data", over="world"), tx.sgd(0.1)))
    for i in range(4):
        x = torch.randn(20, 500)
        if i < 2:
            model(x).square().mean().backward()
            continue
        with fjoin.trace(path):
            model(x).square().mean().backward()


def test_a_registered_module_is_in_it_too(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, registered, str(tmp_path / "run.json"))
    events = events_of(tmp_path / "run.json")
    for rank in (0, 1):
        stages = [e["args"]["stage"] for e in events if e["ph"] == "b" and e["pid"] == rank]
        assert [stage for stage in stages if stage.startswith("bucket")] == ["bucket 0", "bucket 1"]
        assert {"optimizer", "states"} <= {e["name"] for e in spans(events, rank)} <= LISTED | {"bucket 1"}
