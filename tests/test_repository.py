"""Properties of the repository as a whole: imports, names, documents."""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fjoin
import fjoin.checkpoint
import fjoin.ddp
import fjoin.jax
import fjoin.testing
from fjoin import transforms as tx

ROOT = Path(__file__).parent.parent


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _imports(file: Path) -> list[str]:
    found = []
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@functools.cache
def _sources() -> list[Path]:
    """The files of the package; the link fjoin/transforms is not followed."""
    shell = (file for file in (ROOT / "fjoin").rglob("*.py") if "transforms" not in file.relative_to(ROOT).parts)
    return sorted([*(ROOT / "transforms").rglob("*.py"), *shell])


def _module(file: Path) -> str:
    return ".".join(("fjoin", *file.relative_to(ROOT).with_suffix("").parts)).replace("fjoin.fjoin", "fjoin")


def test_the_package_holds_every_room() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["tool"]["setuptools"]["packages"]
    assert sorted(packages) == sorted({_module(file).rpartition(".")[0] for file in _sources()})


def none(wrong: list[str]) -> None:
    assert not wrong, "\n".join(["", *wrong])


def test_pure_part_does_not_import_distributed_or_fjoin() -> None:
    wrong = []
    for file in (file for file in _sources() if "fjoin" not in file.relative_to(ROOT).parts):
        names = [name for name in _imports(file) if name.startswith(("torch.distributed", "fjoin"))]
        names += [n.attr for n in ast.walk(_tree(file)) if isinstance(n, ast.Attribute) and n.attr == "distributed"]
        code = "\n".join(line.split("#")[0] for line in file.read_text().splitlines() if ">>>" not in line)
        wrong += [f"{file}: {name}" for name in [*names, *re.findall("importlib", code)]]
    none(wrong)


def test_faces_only_pass_names_on() -> None:
    bodies = {file: _tree(file).body for file in _sources() if file.name == "__init__.py"}
    none([
        f"{file}:{node.lineno}"
        for file, body in bodies.items() for node in body if not isinstance(node, (ast.ImportFrom, ast.Expr, ast.If))
    ])  # fmt: skip


def _public() -> dict[str, Any]:
    names = {f"fjoin.{k}": v for k, v in vars(fjoin).items() if not k.startswith("_") and not inspect.ismodule(v)}
    return names | {f"tx.{k}": v for k, v in vars(tx).items() if not k.startswith("_") and not inspect.ismodule(v)}


def test_public_names_are_documented() -> None:
    docs = {name: inspect.getdoc(value) or "" for name, value in _public().items()}
    wrong = [f"{name} has no docstring" for name, doc in docs.items() if not doc]
    functions = [name for name, value in _public().items() if inspect.isfunction(value)]
    examples = doctest.DocTestParser().get_examples
    none([*wrong, *(f"{name} has no example" for name in functions if not examples(docs[name]))])


def _arguments() -> dict[str, set[str]]:
    """The name of each public function, class and method -> its arguments."""
    made, found = [("step", tx.fuse(tx.identity(), tx.sgd(0.1)).step)], dict[str, set[str]]()
    for face in (fjoin, tx, fjoin.ddp, fjoin.checkpoint, fjoin.testing, fjoin.jax):
        for name, value in vars(face).items():
            if isinstance(value, type):
                made += [(name, value), *inspect.getmembers(value, inspect.isroutine)]
            elif inspect.isroutine(value):
                made.append((name, value))
    for name, value in made:
        with contextlib.suppress(TypeError, ValueError):  # without a signature
            found.setdefault(name, set()).update(inspect.signature(value).parameters)
    return found


OF_TORCH = {
    "async_op", "group_size", "mesh_dim_names", "non_blocking", "optimize_ddp", "sparse", "static_graph", "use_reentrant",
}  # fmt: skip


def test_texts_name_arguments_that_exist() -> None:
    """As `name=`, of any public function, and in `function(..., name=...)` of that one."""
    known, wrong = _arguments(), list[str]()
    every = OF_TORCH.union(*known.values())
    for file in _sources():
        tree = [*ast.walk(_tree(file))]
        shown = [node for node in tree if isinstance(node, ast.FunctionDef) and node.name == "__repr__"]
        for node in {*tree}.difference(*map(ast.walk, shown)):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts)
            if "\n" not in text:  # no docstring
                called = re.findall(r"(\w+)\(([^()]*)\)", text)
                given = [(every, text), *((known.get(name, every) | OF_TORCH, inside) for name, inside in called)]
                wrong += [
                    f"{file.name}: {text}" for names, part in given if set(re.findall(r"\b([a-z_]+)=", part)) - names
                ]
    none(wrong)


def test_the_folder_transforms_cannot_be_imported_by_its_own_name() -> None:
    out = subprocess.run([sys.executable, "-c", "import transforms"], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode and "from fjoin import transforms as tx" in out.stderr


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_the_code_in_the_documents_runs(document: Path) -> None:
    """Blocks marked ```python run in order in one namespace, as one rank; asserts in them are checked."""
    namespace: dict[str, Any] = {"torch": torch}
    for block in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL):
        exec(compile(block, document.name, "exec"), namespace)


def test_links_between_documents_lead_somewhere() -> None:
    links = [(doc, target) for doc in DOCUMENTS for target in re.findall(r"\]\((?!http|#)([^)#]+)", doc.read_text())]
    none([f"{doc.name} links to {target}" for doc, target in links if not (doc.parent / target).exists()])


def test_tests_that_documents_name_exist() -> None:
    wrong = []
    for doc in DOCUMENTS:
        text = doc.read_text()
        paths = [path for path in re.findall(r"`(tests/[\w/]+\.py)`", text) if not (ROOT / path).exists()]
        wrong += [f"{doc.name} names {path}" for path in paths]
        for name, path in re.findall(r"`(test_\w+)`(?:,? in)?\s+(?:in\s+)?`(tests/[\w/]+\.py)`", text):
            if path not in paths and f"def {name}(" not in (ROOT / path).read_text():
                wrong.append(f"{doc.name} names {name} in {path}")
    none(wrong)


def test_one_file_knows_the_kinds_of_devices() -> None:
    """All others ask it, so that one code serves CUDA, ROCm and XPU."""
    known = re.compile(r"\bis_cuda\b|\btorch\.(cuda|xpu|accelerator|Event|Stream)\b|[!=]= .cuda\b")
    found = {file.relative_to(ROOT).as_posix() for file in _sources() if known.search(file.read_text())}
    assert found == {"transforms/base/devices.py"}


def test_each_make_command_that_is_named_exists() -> None:
    """In documents and in docstrings."""
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    listed = subprocess.run(["git", "ls-files", "*.md", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    texts = {name: (ROOT / name).read_text() for name in listed.stdout.split()}
    named = {(found, name) for name, text in texts.items() for found in re.findall(r"`make ([a-z-]+)", text)}
    assert len({found for found, _ in named}) > 6
    none([f"{name} names `make {found}`" for found, name in named if found not in made])


# -- every public name of 0.2.0 is still there, or docs/moving.md says what to write instead --

NAMES: dict[str, str] = json.loads(Path(__file__).with_name("names_0_2_0.json").read_text())
MOVING = Path(__file__).parents[1] / "docs" / "moving.md"


def lost(face: str, names: list[str], page: str) -> list[str]:
    """The names that the face has no more, and that stand in no code of the page."""
    told = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`|```.*?```", page, re.DOTALL))))
    module = importlib.import_module(face)
    return [name for name in names if not hasattr(module, name) and name not in told]


@pytest.mark.parametrize("face", NAMES)
def test_names_of_0_2_0_are_there_or_on_the_page(face: str) -> None:
    assert lost(face, NAMES[face].split(), MOVING.read_text()) == []


def test_a_name_that_the_page_forgets_is_noticed() -> None:
    assert lost("fjoin", ["Join", "gone", "told"], "use `told` and not gone") == ["gone"]


# -- the host waits for a device in one file of the shell, which hears of failed ranks meanwhile --

METHODS = {"item", "tolist", "cpu", "numpy", "synchronize"}
# What reads values elsewhere, how often, and why that is no wait for a message.
ALLOWED = {
    "records/_device_reads.py": 4,  # the file
    "records/_record.py": 2,  # a number of the host, and a loss on it
    "records/_compare.py": 2,  # before the first step, and in a save
    "checkpoint": 4,  # copies for files
    "groups": 4,  # numbers of ranks, on the host; and a mesh without other ranks
    "jax/_optax.py": 1,  # arrays of the host
    "loading": 4,  # random numbers of the host
    "optim/_optimizer.py": 1,  # torch's own GradScaler reads it too
    "optim/_param_groups.py": 1,  # counts of states that are loaded
    "optim/_zero_state.py": 1,  # sizes and flags are copied to a device
    "shared_memory": 1,  # memory of the host
    "step/_records.py": 1,  # of DeviceReads
    "step/_verdict.py": 6,  # values of the host, and the error of a step on which the host has decided; of DeviceReads
    "testing": 1,
    "training/_metrics.py": 1,  # a number of steps, on the host
    "training/_passes.py": 1,  # the scale of a 16-bit loss in an accumulation window
}


def waits(tree: ast.AST) -> Iterator[int]:
    """The lines of calls that read a tensor's values, or copy one to a device where the host waits."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        to_device = node.func.attr == "tensor" and any(keyword.arg == "device" for keyword in node.keywords)
        if (node.func.attr in METHODS and not node.args) or to_device:
            yield node.lineno


def test_files_wait_only_where_they_may() -> None:
    found: dict[str, dict[str, list[int]]] = {}  # by the key of ALLOWED
    for path in sorted((ROOT / "fjoin").rglob("*.py")):
        name = path.relative_to(ROOT / "fjoin").as_posix()
        if not name.startswith("transforms") and (lines := list(waits(ast.parse(path.read_text())))):
            room = next((key for key in ALLOWED if name == key or name.startswith(f"{key}/")), None)
            assert room is not None, (
                f"{name} reads values of tensors in the lines {lines}; see fjoin/records/_device_reads.py"
            )
            found.setdefault(room, {})[name] = lines
    for room, files in found.items():
        assert sum(len(set(lines)) for lines in files.values()) == ALLOWED[room], files


def test_a_wait_is_seen() -> None:
    text = (
        "a.item()\nb.sum().tolist()\nc.cpu()\ntorch.tensor([1.0], device=d)\nd.items()\ntorch.tensor(1.0)\ne.item(3)\n"
    )
    assert list(waits(ast.parse(text))) == [1, 2, 3, 4]
