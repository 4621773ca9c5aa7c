"""Properties of the repository as a whole: imports, names, documents."""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import importlib
import importlib.util
import inspect
import json
import operator
import pydoc
import re
import subprocess
import sys
import tomllib
import types
import zlib
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
from tests.helpers import loaded

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
def test_the_code_in_the_documents_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks marked ```python run in order in one namespace, as one rank; asserts in them are checked."""
    monkeypatch.chdir(tmp_path)  # for what they save
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


# -- every public name of 0.2.0 and 0.3.0 is still there, or docs/moving.md says what to write instead --

NAMES: dict[str, dict[str, str]] = {
    path.stem: json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("names_*.json"))
}
MOVING = Path(__file__).parents[1] / "docs" / "moving.md"


def lost(face: str, names: list[str], page: str) -> list[str]:
    """The names, and attributes as `Class.name`, that the face has no more, and that stand in no code of the page."""
    told = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`|```.*?```", page, re.DOTALL))))
    module = importlib.import_module(face)
    return [name for name in names if not has(module, name) and name.split(".")[-1] not in told]


def has(value: Any, name: str) -> bool:
    try:
        operator.attrgetter(name)(value)
    except AttributeError:
        return False
    return True


@pytest.mark.parametrize(("version", "face"), [(version, face) for version, names in NAMES.items() for face in names])
def test_names_of_earlier_versions_are_there_or_on_the_page(version: str, face: str) -> None:
    assert lost(face, NAMES[version][face].split(), MOVING.read_text()) == []


def test_a_name_that_the_page_forgets_is_noticed() -> None:
    names = ["Join", "Mesh.close", "gone", "told", "Mesh.gone", "Mesh.told"]
    assert lost("fjoin", names, "use `told` and not gone") == ["gone", "Mesh.gone"]


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


# -- the pages of the site that are made from docstrings, and its files --


def held_modules() -> dict[str, types.ModuleType]:
    return {"fjoin": fjoin, "fjoin.transforms": tx, "fjoin.jax": fjoin.jax} | {
        f"fjoin.transforms.{name}": getattr(tx, name) for name in ("checkpoint_policies", "random")
    }


@pytest.fixture(scope="module")
def api() -> Any:
    return loaded(ROOT / "docs" / "api_pages.py", "api_pages")


def test_every_public_name_has_a_page_and_is_listed(api: Any) -> None:
    pages = api.all_pages()
    for module, held in held_modules().items():
        for name in api.public(held):
            assert f"{module}.{name}.rst" in pages, name
            assert pages["index.rst"].count(f".{name} <{module}.{name}>`\n     - ") == 1, name
    assert len(pages) > 150 and pages["index.rst"].count(":py:meth:`TrainStep.join <fjoin.TrainStep.join>`") == 1


def test_every_document_is_in_the_contents() -> None:
    listed = set(re.findall(r"^([\w./-]+)$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE))
    documents = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert documents <= listed, documents - listed


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.distributed.optim at its import
def test_inventories_are_those_of_their_script_and_their_names_exist() -> None:
    """`python docs/inventories/make.py` writes them."""
    make = loaded(ROOT / "docs" / "inventories" / "make.py", "make_inventories")
    for project, url in make.SITES.items():
        kept = ROOT / "docs" / "inventories" / f"{project}.inv"
        heads, bodies = zip(
            *(one.split(b"zlib.\n", 1) for one in (kept.read_bytes(), make.inventory(project))), strict=True
        )
        assert heads[0] == heads[1] and zlib.decompress(bodies[0]) == zlib.decompress(bodies[1]), project
        assert kept.with_suffix(".url").read_text() == f"{url}\n"
        names = make.names(project)
        assert len(names) == len(set(names))
        for name in names:
            assert located(name), name


def located(name: str) -> bool:
    """Whether there is such a name. Some modules are hidden behind a function or class of their name."""
    module, _, own = name.rpartition(".")
    return (
        pydoc.locate(name) is not None or hasattr(importlib.import_module(module or "builtins"), own) or name == "None"
    )


# -- what `import fjoin` imports: nothing that takes longer than torch itself --

# In a folder where the user has a module that is called transforms.
PROGRAM = """
import sys, threading
import torch
import torch.distributed as dist
import transforms
before = set(sys.modules)
import fjoin
from fjoin import transforms as tx
after = set(sys.modules)
assert transforms.mine == 1
tx.chain()
assert not dist.is_initialized() and threading.active_count() == 1
print(*sorted({".".join(name.split(".")[:k]) for name in after - before for k in (1, 2, 3)}))
"""
HEAVY = {
    "functorch", "torch._dynamo", "torch._inductor", "torch.onnx", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy",
    "networkx", "jax", "optax", "matplotlib", "safetensors", "torch.utils.tensorboard", "pytest", "hypothesis",
}  # fmt: skip


def test_import_starts_nothing_and_loads_no_heavy_modules(tmp_path: Path) -> None:
    """torch's compiler takes seconds, and fully_shard as long as torch; they are imported where they are used."""
    (tmp_path / "transforms.py").write_text("mine = 1\n")
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = done.stdout.split()
    assert "fjoin.transforms" in found and not HEAVY & set(found)


def test_heavy_modules_are_imported_on_first_use() -> None:
    program = """
import sys, torch, fjoin
from fjoin import transforms as tx
step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(tx.mean("data"), tx.adamw(1e-3)))
state, _ = step(step.init({"w": torch.ones(3)}), torch.ones(3))
state.pipeline
assert "sympy" not in sys.modules
fjoin.apply_activation_checkpointing(torch.nn.Sequential(torch.nn.Linear(2, 2)))
"""
    subprocess.run([sys.executable, "-c", program], check=True)
