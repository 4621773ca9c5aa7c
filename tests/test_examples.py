"""The examples run as their text says: recipes on two processes, on three, and with plain python."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
# What an example needs besides fjoin.
NEEDS = {"with_accelerate.py": "accelerate", "with_lightning.py": "lightning"}
# One process each; they assert what they show.
ALONE = ["learn_the_rate.py", "sweep.py"]
RECIPES = sorted(
    path.name
    for path in EXAMPLES.glob("*.py")
    if not path.name.startswith("_") and path.name not in ("uneven_text.py", *ALONE)
)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str, ranks: int) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}: run by `make test-frameworks`")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("from one process on all data") == ranks


@pytest.mark.parametrize("name", ALONE)
def test_alone(name: str) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_is_in_the_table() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert RECIPES and all(f"`{name}`" in text for name in (*RECIPES, *ALONE))
