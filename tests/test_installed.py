"""The archives that users install: built from a copy of the tree, and used where no checkout is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

import fjoin.checkpoint
import fjoin.ddp
import fjoin.testing
import fjoin.transforms

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__", "out")


class Archives(NamedTuple):
    wheel: Path
    sdist: Path
    python: Path  # of an environment that has the wheel, and sees torch and numpy


def run(*command: object, cwd: Path, succeeds: bool = True) -> str:
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 or not succeeds, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(folder: Path) -> Path:
    """The Python of a new environment that sees torch and numpy, and not this checkout."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")  # whose own .pth files are not read
    return python


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    folder = tmp_path_factory.mktemp("archives")
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=LEFT_OUT)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", cwd=folder / "tree")
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    python = environment(folder)
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    return Archives(wheel, sdist, python)


def test_they_hold_the_library_and_nothing_else(archives: Archives) -> None:
    with zipfile.ZipFile(archives.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fjoin").rglob("*.py") if path.is_file()}
    modules = {name for name in modules if not name.startswith("fjoin/transforms/")}
    pure = {f"fjoin/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "transforms").rglob("*.py")}
    assert names == modules | pure | {"fjoin/py.typed"}
    with tarfile.open(archives.sdist) as sdist:
        files = {name.partition("/")[2] for name in sdist.getnames()}
    assert modules <= files and {"README.md", "LICENSE", "pyproject.toml", "transforms/__init__.py"} <= files


def test_their_texts_can_be_shown(archives: Archives) -> None:
    shown = run(
        sys.executable, "-m", "twine", "check", "--strict", archives.wheel, archives.sdist, cwd=archives.wheel.parent
    )
    assert shown.count("PASSED") == 2


SCRIPT = """
import importlib.metadata, sys
import torch, fjoin
from fjoin import transforms as tx
assert sys.prefix in fjoin.__file__ and sys.prefix in tx.__file__, (fjoin.__file__, tx.__file__)
assert importlib.metadata.version("fjoin") == fjoin.__version__
step = fjoin.train_step(lambda p, x: (p["w"] * x).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.5)))
state = step.init({"w": torch.zeros(2)})
for batch in step.join(torch.ones(3, 2)):
    state, metrics = step(state, batch)
def one_rank(x):
    return tx.psum(x, "data")
print(fjoin.__version__, state.params["w"].tolist(), tx.simulate(one_rank, {"data": 2}, [torch.tensor(1), torch.tensor(2)])[0].item())
"""


def test_a_script_far_from_the_checkout_uses_the_wheel(archives: Archives, tmp_path: Path) -> None:
    (tmp_path / "transforms.py").write_text("raise ImportError('a module of the user')\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    assert run(archives.python, "train.py", cwd=tmp_path).split("\n")[0] == f"{fjoin.__version__} [-1.5, -1.5] 3"


TYPED = """
import fjoin
from fjoin import transforms as tx

step = fjoin.train_step(lambda p, x: (p["w"] * x).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.5)))
reveal_type(step)
reveal_type(tx.mean("data"))
"""


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with an editable install of a copy of the tree."""
    folder = tmp_path_factory.mktemp("editable")
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=LEFT_OUT)
    python = environment(folder)
    options = ("--no-deps", "--no-index", "--no-build-isolation")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, "-e", folder / "tree", cwd=folder)
    return python


@pytest.mark.long
@pytest.mark.parametrize("install", ["wheel", "editable"])
def test_its_types_are_seen_by_mypy(install: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    made = request.getfixturevalue("archives" if install == "wheel" else "editable")
    python = made.python if install == "wheel" else made
    (tmp_path / "train.py").write_text(TYPED)
    shown = run(
        sys.executable, "-m", "mypy", "--python-executable", python, "--no-incremental", "train.py", cwd=tmp_path
    )
    assert '"fjoin.training._train_step.TrainStep"' in shown and '"fjoin.transforms.base._transform.Transform"' in shown


@pytest.mark.long
def test_its_types_are_seen_by_pyright_and_complete(editable: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyright", reason="`make types` installs it")
    (tmp_path / "train.py").write_text(TYPED)
    pyright = (sys.executable, "-m", "pyright", "--pythonpath", editable)
    shown = run(*pyright, "train.py", cwd=tmp_path)
    assert 'Type of "step" is "TrainStep"' in shown and 'is "Transform"' in shown
    # It looks for the package in the environment that is active. The rooms of the shell look public to it, and their own
    # classes are nobody's concern: the names on the faces count, with their members.
    active = ("env", f"PATH={editable.parent}:{os.environ['PATH']}", f"VIRTUAL_ENV={editable.parents[1]}")
    verify = ("--verifytypes", "fjoin", "--ignoreexternal", "--outputjson")
    shown = run(*active, *pyright, *verify, cwd=tmp_path, succeeds=False)
    faces = (fjoin, fjoin.transforms, fjoin.checkpoint, fjoin.ddp, fjoin.testing)
    shows = {
        f"{value.__module__}.{value.__qualname__}"
        for face in faces
        for value in vars(face).values()
        if hasattr(value, "__qualname__")
    }
    symbols = json.loads(shown)["typeCompleteness"]["symbols"]
    ours = [one for one in symbols if one["name"] in shows or one["name"].rpartition(".")[0] in shows]
    assert len(ours) > 300
    assert [one["name"] for one in ours if not one["isTypeKnown"] or one["isTypeAmbiguous"]] == []
