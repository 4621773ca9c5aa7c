"""Ports of known scripts run as their text says, and train what their references train."""

from __future__ import annotations

import ast
import difflib
import pathlib
import re
from typing import Any

import pytest

from tests.ranks import reports, script

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
