"""The examples run as their text says, recipes on one, two and three processes."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib.util
import io
import os
import pathlib
import re
import runpy
import subprocess
import sys
from typing import Any

import pytest
import torch

import fjoin
from tests.ranks import reports, script

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
# The packages that an example needs in addition to fjoin.
NEEDS = {"with_accelerate.py": "accelerate", "with_lightning.py": "lightning"}
# Examples of one process; they assert their results.
ALONE = ["learn_the_rate.py", "papers.py", "sweep.py"]
RECIPES = sorted(
    path.name
    for path in EXAMPLES.glob("*.py")
    if not path.name.startswith("_") and path.name not in ("uneven_text.py", "elastic.py", *ALONE)
)
RESULT = "from one process on all data"  # from the line in which an example prints its comparison


def skip_without_what_it_needs(name: str) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}: run by `make test-frameworks`")


@pytest.mark.sample(10)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == "with_jax.py" else ()) for name in RECIPES]
)
def test_recipe(name: str, ranks: int) -> None:
    skip_without_what_it_needs(name)
    for code, text in reports(ranks, script, EXAMPLES / name):
        assert not code and text.count(RESULT) == 1, text


@pytest.mark.long
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]])
def test_commands(launcher: list[str]) -> None:
    command = [sys.executable, *launcher, str(EXAMPLES / "custom_loop.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)  # enough on a busy machine
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(RESULT) == 1 + bool(launcher)


def test_torchrun_trains_a_sharded_gpt() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(EXAMPLES / "sharded_model.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)  # enough on a busy machine
    assert done.returncode == 0 and done.stdout.count(RESULT) == 2, done.stdout + done.stderr


@pytest.mark.long
def test_a_rank_of_the_elastic_example_dies_and_comes_back() -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    command = ["sh", str(EXAMPLES / "elastic.sh")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(RESULT) == 3
    assert "rank 2 of 3 from step 0" in done.stdout and "of 2 from step 20" in done.stdout
    assert done.stdout.count("generation 3: rank") == 3


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ALONE)
def test_alone(name: str) -> None:
    ((code, text),) = reports(1, script, EXAMPLES / name)
    assert not code, text


def _run_checks(rank: int, report: Any) -> None:
    sys.path.insert(0, str(EXAMPLES))
    import _checks as checks

    make_pipeline = runpy.run_path(str(EXAMPLES / "uneven_text.py"))["make_pipeline"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        made = checks.Report(fjoin.mesh({"data": -1}))
        checks.equal_to_one_process(made, make_pipeline)
        checks.next_to_torch_join(made, make_pipeline)
    report((made.failed, out.getvalue()))


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 3))])
def test_the_checks_of_the_demo_hold(ranks: int) -> None:
    for failed, text in reports(ranks, _run_checks):
        assert not failed, text


def _resume(rank: int, report: Any, folder: str, forget: int) -> None:
    """The demo's check of a resumed run, on its small model; the last batches can be forgotten."""
    sys.path.insert(0, str(EXAMPLES))
    import _checks as checks
    import _resume as resume
    from _text_model import Decoder, cross_entropy

    make_pipeline = runpy.run_path(str(EXAMPLES / "uneven_text.py"))["make_pipeline"]
    mesh = fjoin.mesh({"data": -1})
    batches = checks.uneven_batches(seed=rank, count=6 if rank == 0 else 3)
    torch.manual_seed(1)
    apply, params, _ = fjoin.functional(Decoder(**checks.SMALL))

    def make_step() -> fjoin.TrainStep:
        return fjoin.train_step(
            lambda p, b: cross_entropy(apply(p, {}, b.inputs), b),
            make_pipeline(6, checks.PEAK), mesh=mesh, weight=lambda b: b.tokens,
        )  # fmt: skip

    with contextlib.redirect_stdout(io.StringIO()) as out:
        made, step = checks.Report(mesh), make_step()
        state = step.init(params)
        for batch in step.join(batches):
            state, _ = step(state, batch)
            if state.step == 4:  # some ranks are out of input
                fjoin.save(folder, step, state)
        resume.equal_to_uncut(made, make_step, params, folder, batches[: len(batches) - forget], state)
    report((made.failed, out.getvalue()))


@pytest.mark.parametrize(
    ("ranks", "forget"), [*(pytest.param(n, 0, marks=pytest.mark.long) for n in (1, 2)), (3, 0), (2, 1)]
)
def test_the_demo_goes_on_from_its_checkpoint_to_the_bit(ranks: int, forget: int, tmp_path: pathlib.Path) -> None:
    for failed, text in reports(ranks, _resume, str(tmp_path), forget):
        assert failed == bool(forget), text


def test_each_is_in_the_table() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert RECIPES and all(f"`{name}`" in text for name in (*RECIPES, *ALONE, "elastic.py"))


# -- ports of known scripts run as their text says, and train what their references train --

ROOT = pathlib.Path(__file__).parent.parent
PORTED = ROOT / "examples" / "ported"
PORTS = sorted(
    path.relative_to(PORTED).as_posix()
    for path in PORTED.glob("*/*.py")
    if path.name not in ("model.py", "reference.py")
)
REFERENCES = sorted(path.relative_to(PORTED).as_posix() for path in PORTED.glob("*/reference.py"))
RUNS = [  # script and arguments, ranks
    ("nanogpt/train_step.py", 2), ("nanogpt/register.py", 2), ("nanogpt/register_hook.py", 2), ("mnist/train_step.py", 1),
    ("mnist/train_step.py", 2), ("classification/train_step.py", 2), ("classification/train_step.py --sync-bn", 2),
    ("gpt2/train_step.py", 1), ("gpt2/train_step.py", 2),
]  # fmt: skip


def trained(ranks: int, command: str, change: str = "") -> list[tuple[Any, str]]:
    name, *arguments = command.split()
    return reports(ranks, script, PORTED / name, arguments, change)


@pytest.mark.parametrize(
    ("command", "ranks"),
    [pytest.param(*run, marks=[pytest.mark.long] * (run[1] == 1 or i % 2)) for i, run in enumerate(RUNS)],
)
def test_a_port_trains_what_its_reference_trains(command: str, ranks: int) -> None:
    for rank, (code, text) in enumerate(trained(ranks, command)):
        assert code == 0 and text.count(f"RESULT rank {rank}: as the reference") == 1, text
        assert text.count("\n") >= 5 or rank, "it prints its progress"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("command", "change"),
    [
        ("nanogpt/train_step.py", "learning_rate"), ("mnist/train_step.py", "gamma"),
        ("classification/train_step.py", "model_ema_decay"), ("gpt2/train_step.py", "weight_decay"),
    ],
)  # fmt: skip
def test_a_comparison_sees_a_number_changed_by_a_hundredth(command: str, change: str) -> None:
    ((code, text),) = trained(1, command, change)
    assert code == 1 and text.count("RESULT rank 0: DIFFERS from the reference") == 1, text


@pytest.mark.long
@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_runs_alone(name: str) -> None:
    ((code, text),) = trained(1, name)
    assert not code and text.count("\n") >= 4, text


def _code(name: str) -> list[str]:
    """The lines of a script between its docstring and the part that runs it, without empty ones."""
    text = (PORTED / name).read_text()
    first, *_ = ast.parse(text).body
    lines = text.split("\nif __name__")[0].splitlines()[first.end_lineno :]
    return [line for line in lines if line.strip()]


def changed_lines(port: str) -> tuple[int, int]:
    """The lines of the reference that have gone, and those of the port that have come."""
    diff = difflib.ndiff(_code(f"{pathlib.PurePath(port).parent}/reference.py"), _code(port))
    marks = [line[0] for line in diff]
    return marks.count("-"), marks.count("+")


@pytest.mark.parametrize("port", PORTS)
def test_each_is_in_the_table_with_the_lines_that_have_changed(port: str) -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    gone, come = changed_lines(port)
    assert any(command.split()[0] == port for command, _ in RUNS)
    assert re.search(rf"^\| `ported/{re.escape(port)}` .*\| -{gone} / \+{come} \|$", text, re.MULTILINE), (gone, come)


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_is_plain_torch(name: str) -> None:
    folder = (PORTED / name).parent
    for file in (folder / "reference.py", folder / "model.py"):
        assert "fjoin" not in file.read_text()
