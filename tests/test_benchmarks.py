"""The studies of benchmarks/ run, with few ranks and steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.helpers import loaded

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def ran(name: str, *options: object) -> str:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{name}.py", *map(str, options)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_studies(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    ran("local_sgd_quality", "--quick", "--runs", tmp_path / "runs.json", "--out", page)
    assert page.read_text().startswith("# ") and "|---|" in page.read_text() and "nan" not in page.read_text()
    ran("checkpoints", "--quick", "--folder", tmp_path / "folder", "--out", page)
    assert "| fjoin | a bit flipped | 8 | 0 | 0 |" in page.read_text() and "nan" not in page.read_text()
    assert not list((tmp_path / "folder").iterdir())
    text = ran("jax_loss", "--quick")
    assert text.count("| loss of jax |") == 2 and "torch, again" in text and "nan" not in text
    ran("trace_picture", "--keep", tmp_path / "run.json", "--out", tmp_path / "trace.png")
    assert (tmp_path / "trace.png").stat().st_size > 20_000 and (tmp_path / "run.json").exists()


def test_a_part_of_the_gpu_report_is_replaced_by_its_next_run(tmp_path: Path) -> None:
    page, gpu_report = tmp_path / "page.md", loaded(BENCHMARKS / "gpu_report.py", "gpu_report")
    for name, text in (("basics", "first"), ("speed", "fast"), ("basics", "second")):
        gpu_report.write(page, name, text)
    text = page.read_text()
    assert "first" not in text and text.index("second") < text.index("fast") and text.count("<!-- basics -->") == 1


def test_a_check_that_fails_or_takes_too_long_is_told() -> None:
    gpu_report = loaded(BENCHMARKS / "gpu_report.py", "gpu_report")
    Check = gpu_report.Check
    assert gpu_report.run(Check("python -c 'print(5)'", "", 60), "cpu")[::2] == ("passed", "5")
    assert gpu_report.run(Check("python -c 'raise SystemExit(3)'", "", 60), "cpu")[0] == "**failed**, exit 3"
    # What it has started holds its output open.
    ended, seconds, text = gpu_report.run(Check("echo begun; sleep 60 & sleep 60", "", 1.0), "cpu")
    assert "stopped" in ended and seconds < 20 and text == "begun"


ROWS = ["--rows", "ddp,fjoin 25 MiB,registered,donate"]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "command", [["alive"], ["race"], ["sync"], ["two"], ["bench", *ROWS], ["launches", *ROWS]], ids=lambda command: command[0]
)  # fmt: skip
def test_the_code_of_a_gpu_check_runs_on_one_rank_without_a_gpu(command: list[str]) -> None:
    script = [sys.executable, str(BENCHMARKS / "gpu.py"), *command, "--device", "cpu", "--steps", "1", "--limit", "110"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{command[0]}: rank 0 ended with 0" in done.stdout
    if len(command) > 1:
        assert all(row in done.stdout for row in ("mlp   registered", "mlp   donate"))


def test_the_short_run_on_a_gpu_takes_eight_minutes_and_writes_after_each_check(tmp_path: Path) -> None:
    gpu_report = loaded(BENCHMARKS / "gpu_report.py", "gpu_report")
    assert sum(check.limit_s for check in gpu_report.SHORT) <= 480
    Check, page = gpu_report.Check, tmp_path / "page.md"
    seen = Check(f"python -c \"print(open('{page}').read().count('passed'))\"", "a page", 60)
    with mock.patch.dict(gpu_report.PARTS, {"short": ("Short", [Check("python -c 'print(5)'", "", 60), seen])}):
        assert gpu_report.section("short", "cpu", page)
    assert "```text\n1\n```" in page.read_text() and page.read_text().count("| passed |") == 2


@pytest.mark.long
def test_the_gpu_report_runs_without_a_gpu(tmp_path: Path) -> None:
    ran("gpu_report", "--parts", "example", "--device", "cpu", "--page", tmp_path / "page.md")
    assert "| all checks | passed |" in (tmp_path / "page.md").read_text()
