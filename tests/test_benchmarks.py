"""The studies of benchmarks/ run, with few ranks and steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.long
@pytest.mark.parametrize("script", ["adam_states.py", "local_sgd_quality.py"])
def test_study(script: str, tmp_path: Path) -> None:
    files = ["--runs", str(tmp_path / "runs.json"), "--out", str(tmp_path / "page.md")]
    command = [sys.executable, str(BENCHMARKS / script), "--quick", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# ") and "|---|" in page and "nan" not in page


@pytest.mark.long
def test_checkpoints(tmp_path: Path) -> None:
    files = ["--folder", str(tmp_path), "--out", str(tmp_path / "page.md")]
    command = [sys.executable, str(BENCHMARKS / "checkpoints.py"), "--quick", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "page.md").read_text()
    assert "| fjoin | a bit flipped | 8 | 0 | 0 |" in page and "nan" not in page
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


@pytest.mark.long
def test_trace_picture(tmp_path: Path) -> None:
    files = ["--keep", str(tmp_path / "run.json"), "--out", str(tmp_path / "trace.png")]
    command = [sys.executable, str(BENCHMARKS / "trace_picture.py"), *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "trace.png").stat().st_size > 20_000 and (tmp_path / "run.json").exists()
