"""The examples run as their text says, recipes on one, two and three processes."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import pathlib
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
    if not path.name.startswith("_") and path.name not in ("uneven_text.py", *ALONE)
)
RESULT = "from one process on all data"  # from the line in which an example prints its comparison


def skip_without_what_it_needs(name: str) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}: run by `make test-frameworks`")


@pytest.mark.sample(10)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str, ranks: int) -> None:
    skip_without_what_it_needs(name)
    for code, text in reports(ranks, script, EXAMPLES / name):
        assert not code and text.count(RESULT) == 1, text


@pytest.mark.long
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]])
def test_commands(launcher: list[str]) -> None:
    command = [sys.executable, *launcher, str(EXAMPLES / "custom_loop.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(RESULT) == 1 + bool(launcher)


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
    assert RECIPES and all(f"`{name}`" in text for name in (*RECIPES, *ALONE))
