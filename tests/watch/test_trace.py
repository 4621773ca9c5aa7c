"""A timeline of all ranks: its messages are those of `explain`, and its spans leave little time without a name. Metrics as a dict."""

from __future__ import annotations

import copy
import json
import re
import time
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


# -- metrics as a flat dict, and what shows them --

SMALL = {"w": torch.linspace(-1, 1, 3000).view(60, 50), "bias": torch.ones(50)}


def with_rows(params: Any, x: Any) -> Any:
    return (x @ params["w"] + params["bias"]).square().mean(), {"sum": {"rows": len(x)}}


def batches(rank: int, count: int) -> list[Any]:
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(4 + rank, 60, generator=draw) for _ in range(count)]


CLIPPED = tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.5))
MEASURED: dict[str, Callable[[], tx.Pipeline]] = {
    "mean": lambda: tx.fuse(tx.mean("data"), tx.adamw(0.01)),
    "clipped": lambda: tx.fuse(CLIPPED, tx.adamw(0.01)),
    "zero": lambda: tx.zero(CLIPPED, tx.adamw(0.01), "data"),
    "int8": lambda: tx.fuse(tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), tx.sgd(0.1)),
    "power_sgd": lambda: tx.fuse(tx.power_sgd("data", 2, min_compression_rate=1.0), tx.sgd(0.1)),
    "average": lambda: tx.fuse(tx.identity(), tx.sgd(0.1), after=tx.average_parameters("data")),
}


def numbers_of(name: str, transport: str) -> Any:
    mesh = fjoin.mesh({"data": -1}, transport=transport)
    step = fjoin.train_step(with_rows, MEASURED[name](), mesh=mesh, weight=len)
    state, found = step.init(SMALL), []
    for i, batch in enumerate(step.join(batches(mesh.rank, 3))):
        state, metrics = step(state, batch)
        read = mesh.traffic.messages
        if i:
            found.append(metrics.as_dict())
        fjoin.show(1, [lambda numbers, number: None])(metrics)
        assert mesh.traffic.messages == read, "a look at the numbers sends nothing"
    step.close()
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("transport", ["gloo", "shared"])
@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("ranks", [2, 3])
def test_sent_bytes_are_those_of_explain(pool: Pool, ranks: int, name: str, transport: str) -> None:
    want = tx.explain(MEASURED[name](), SMALL, {"data": ranks}).sent_bytes
    for found in pool.run(ranks, numbers_of, name, transport):
        for numbers in found:
            assert abs(numbers["rank/sent_bytes"] - want) <= 0.02 * want + 64, "pieces are not equal on all ranks"
            assert 0 <= numbers["rank/waited_s"] <= numbers["rank/step_s"] < 60
            assert numbers["ranks"] == ranks and numbers["rows"] == numbers["weight"] == sum(
                4 + r for r in range(ranks)
            )


NORMS = {
    "clipped": CLIPPED, "recorded": tx.chain(tx.mean("data"), tx.record_norm()),
    "before a clip": tx.chain(tx.mean("data"), tx.record_norm(), tx.clip_by_value(0.01)),
    "behind a codec": tx.chain(tx.compress(tx.float32(), tx.mean("data")), tx.record_norm()),
    "of pieces": tx.chain(tx.scatter_mean("data"), tx.record_norm()),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_the_norm_and_the_rates_are_those_of_one_process(name: str) -> None:
    rate, steps = tx.cosine(0.1, 10), 4
    optimizer = tx.partition({("bias", "b"): tx.adamw(0.03), "*": tx.sgd(rate)})

    def one_rank(rank: int) -> Any:
        step = fjoin.train_step(with_rows, tx.fuse(NORMS[name], optimizer), weight=len)
        state, found = step.init(SMALL), []
        for batch in step.join(batches(rank, steps)):
            before = {path: p.clone() for path, p in state.params.items()}
            state, metrics = step(state, batch)
            found.append((before, metrics.as_dict("train/")))
        return found

    for i, ((params, numbers), (_, second)) in enumerate(zip(*tx.simulate(one_rank, {"data": 2}, [0, 1]), strict=True)):
        x = torch.cat([batches(rank, steps)[i] for rank in (0, 1)])
        grads = torch.func.grad(lambda p, x: with_rows(p, x)[0])(params, x)
        norm = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in grads.values()]))
        assert numbers["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert numbers["train/lr/bias+1"] == 0.03
        assert numbers["train/lr/*"] == pytest.approx(float(rate(torch.tensor(float(i)))))
        assert {k: v for k, v in numbers.items() if "rank/" not in k} == {
            k: v for k, v in second.items() if "rank/" not in k
        }


def test_calls_within_a_window_have_no_numbers() -> None:
    def slow(params: Any, batch: Any) -> Any:
        time.sleep(0.02)
        return with_rows(params, batch)

    step = fjoin.train_step(slow, MEASURED["mean"](), accumulate=3)
    state, found = step.init(SMALL), []
    for batch in batches(0, 6):
        state, metrics = step(state, batch)
        found.append(metrics.as_dict())
    assert found[2]["rank/step_s"] > 0.06, "of all calls of the window"
    assert [bool(numbers) for numbers in found] == [False, False, True] * 2
    assert found[2]["rows"] == 12 and found[5]["lr"] == 0.01


def test_counters_of_steps_that_are_left_out() -> None:
    step, state = step_of(with_rows, tx.dynamic_loss_scale(MEASURED["clipped"](), init_scale=8.0), SMALL)
    state, first = step(state, batches(0, 1)[0])
    state, second = step(state, torch.full((4, 60), torch.inf))
    state, third = step(state, batches(0, 1)[0])
    counted = [(one.as_dict()["skipped"], one.as_dict()["loss_scale"]) for one in (first, second, third)]
    assert counted == [(0, 8), (1, 4), (1, 4)] and "grad_norm" not in second.as_dict()
    assert first.as_dict()["grad_norm"] == third.as_dict()["grad_norm"] or third.as_dict()["grad_norm"] > 0


@pytest.mark.parametrize(
    ("optimizer", "want"),
    [
        (tx.inject_hyperparameters(tx.partition({"w": tx.sgd(0.1), "*": tx.adam(0.2)})), {"lr/w": 0.1, "lr/*": 0.2}),
        (tx.partition({"w": tx.partition({"w": tx.sgd(0.1)}), "*": tx.mixed_precision(tx.sgd(0.3))}), {"lr/w/w": 0.1, "lr/*": 0.3}),
        (tx.mixed_precision(tx.partition({"w": tx.frozen(), "*": tx.lion(lambda step: 0.4)})), {"lr/*": 0.4, "lr": 0.4}),
        (tx.partition({("w", "b", "c"): tx.sgd(0.1), "*": tx.adam(0.1)}), {"lr/w+2": 0.1, "lr/*": 0.1, "lr": 0.1}),
    ],
    ids=str,
)  # fmt: skip
def test_rates_inside_wrappers_and_partitions(optimizer: tx.Optimizer, want: dict[str, float]) -> None:
    """And those that are set while training."""
    step = fjoin.train_step(with_rows, tx.fuse(tx.mean("data"), optimizer))
    state, metrics = step(step.init(SMALL), batches(0, 1)[0])
    assert {name: value for name, value in metrics.as_dict().items() if name.startswith("lr")} == want
    if "inject" in repr(optimizer):
        _, metrics = step(state.with_hyperparameters(lr=0.025), batches(0, 1)[0])
        assert {value for name, value in metrics.as_dict().items() if name.startswith("lr")} == {0.025}


def test_sums_with_the_names_of_other_numbers() -> None:
    def loss(params: Any, x: Any) -> Any:
        return (params["w"] * x).sum(), {"sum": {"loss": 9, "lr": 8, "own": 7}}

    step = fjoin.train_step(loss, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    _, metrics = step(step.init({"w": torch.ones(2)}), torch.ones(2))
    numbers = metrics.as_dict()
    assert [numbers[name] for name in ("loss", "sum/loss", "lr", "sum/lr", "own")] == [2.0, 9.0, 0.1, 8.0, 7.0]


class Bar:
    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def set_postfix(self, numbers: dict[str, str]) -> None:
        self.shown.append(numbers)


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


def test_show_gives_them_to_lines_bars_writers_and_functions(capsys: pytest.CaptureFixture[str]) -> None:
    bar, writer, calls = Bar(), Writer(), list[Any]()

    def one_rank(rank: int) -> None:
        show = fjoin.show(2, [print, bar, writer, lambda numbers, step: calls.append((numbers, step))], prefix="train/")
        step, state = step_of(with_rows, MEASURED["mean"](), SMALL, weight=len)
        for batch in step.join(batches(rank, 5)):
            state, metrics = step(state, batch)
            show(metrics, {"temperature": 2})

    tx.simulate(one_rank, {"data": 2}, [0, 1])
    assert [step for _, step in calls] == [1, 3]  # on rank 0 only
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("step 1: train/loss ") and "train/temperature 2" in lines[1]
    assert bar.shown[0]["train/weight"] == "9" and ("train/rows", 9.0, 3) in writer.scalars
    assert "train/steps_per_s" not in calls[0][0] and calls[1][0]["train/steps_per_s"] > 0
