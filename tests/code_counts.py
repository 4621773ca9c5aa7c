"""Counts of the library's structure, by its syntax trees: `python tests/code_counts.py [FOLDER]` prints them as a table.

`tests/test_code_counts.py` holds each to a limit.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Symbols that may run a step, and that may sum a few scalars over the ranks in a message of their own: "file:name". The
# methods of memories are run by `execute`.
EXECUTORS = (
    "transforms/pipelines/_fuse.py:pipeline_of",
    "transforms/pipelines/explain/_explain.py:explain_memory",
    "fjoin/training/_run.py:Run",
    "fjoin/ddp/_hook.py:DDPRun",
    "fjoin/ddp/_module_step.py:ModuleStep",
    "transforms/program/_execute.py:execute",
)
SCALAR_MESSAGES = (
    "fjoin/agreement/_step_record.py:StepRecord",
    "fjoin/agreement/_agreements.py:Agreements",
    "fjoin/ddp/_unused_params.py:UsedParameters",
    "fjoin/uneven/_loop.py:Loop",
    "fjoin/uneven/_roll.py:Roll",
    "fjoin/optim/zero/_zero_join.py:gradients",
    "fjoin/training/_in_loop.py:InLoop",
    "fjoin/agreement/_record.py:Record",
)
# They run stages, judge, or run an optimizer.
STEPS = ("optimizer.step(", "memory.step(", "part.init(", "stepper.step(", "step_bucket(")
# They make words, and sum them.
SENDS_SCALARS = (("torch.tensor(", "torch.zeros(", "encode_lane("), ("reduce_(", '"psum"'))
STEP_ROOMS = ("fjoin/buckets", "fjoin/agreement", "fjoin/reducer", "fjoin/training", "fjoin/ddp")


class Source(NamedTuple):
    path: str  # from the repository's root
    text: str
    nodes: list[ast.AST]  # all nodes of its syntax tree


def sources(root: Path) -> list[Source]:
    """The library's files; `fjoin/transforms` is a link to `transforms`."""
    found = []
    for room in ("transforms", "fjoin"):
        for path in sorted((root / room).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not name.startswith("fjoin/transforms/"):
                text = path.read_text()
                found.append(Source(name, text, [*ast.walk(ast.parse(text))]))
    return found


def has(files: list[Source], symbol: str, *parts: tuple[str, ...]) -> bool:
    """Whether a file defines a class or a function of this name, at any depth, with one text of each of `parts` in it."""
    path, name = symbol.split(":")
    kinds = (ast.ClassDef, ast.FunctionDef)
    found = [
        ast.get_source_segment(file.text, node) or ""
        for file in files
        if file.path == path
        for node in file.nodes
        if isinstance(node, kinds) and node.name == name
    ]
    return any(all(any(text in one for text in some) for some in parts) for one in found)


def code_lines(file: Source) -> int:
    """The lines that are neither empty, nor a comment, nor an import, nor in a docstring."""
    skipped = set[int]()
    for node in file.nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            first = node.body[0]
            skipped.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(file.text.splitlines(), 1)
    return sum(1 for at, line in lines if at not in skipped and line.strip() and not line.strip().startswith("#"))


def handed_keywords(files: list[Source]) -> set[str]:
    """The keywords of every `update` in `transforms` that runs another one, by their names."""
    found = set[str]()
    for file in files:
        for node in file.nodes if file.path.startswith("transforms/") else ():
            if isinstance(node, ast.FunctionDef) and node.name == "update":
                calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
                if any(isinstance(call, ast.Attribute) and call.attr in ("update", "run") for call in calls):
                    names = [arg.arg for arg in (*node.args.args[3:], *node.args.kwonlyargs)]
                    found |= set(names)
    return found


def axis_kinds(files: list[Source]) -> Iterator[str]:
    """Tests for the class of an axis, outside the rooms of the axes."""
    for file in files:
        if file.path.startswith("transforms/axes/"):
            continue
        for node in file.nodes:
            is_test = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
            if is_test and len(node.args) == 2:
                if any(isinstance(one, ast.Name) and one.id.endswith("Axis") for one in ast.walk(node.args[1])):
                    yield f"{file.path}:{node.lineno}"


def name_comparisons(files: list[Source]) -> Iterator[str]:
    """Comparisons with the name of a spec, by ==, != or `in`, in a `match`, or by a look-up."""

    def is_spec_name(node: ast.AST) -> bool:
        if not (isinstance(node, ast.Attribute) and node.attr == "name"):
            return False
        owner = node.value
        return (isinstance(owner, ast.Attribute) and owner.attr == "spec") or (
            isinstance(owner, ast.Name) and owner.id == "spec"
        )

    for file in files:
        for node in file.nodes:
            inside: list[ast.expr] = []
            if isinstance(node, ast.Compare):
                inside = [node.left, *node.comparators]
            elif isinstance(node, ast.Match):
                inside = [node.subject]
            elif isinstance(node, ast.Subscript):
                inside = [node.slice]
            if any(is_spec_name(one) for one in inside):
                yield f"{file.path}:{node.lineno}"  # type: ignore[attr-defined]


def foreign_privates(files: list[Source]) -> Iterator[str]:
    """Accesses to a private attribute of another object of the library: a name that one of its classes has, in another file.

    Those of torch's objects are `torchs_privates`.
    """
    ours = {node.attr for file in files for node in file.nodes if _is_own(node)}
    for file in files:
        for node in file.nodes:
            if isinstance(node, ast.ClassDef):
                ours |= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                ours |= {one.target.id for one in node.body if _is_field(one)}  # type: ignore[attr-defined]
    yield from (line for name, line in _privates(files) if name in ours)


def torchs_privates(files: list[Source]) -> Iterator[str]:
    """Accesses to a private attribute that no class of the library has: of torch's objects, mostly modules."""
    ours = set(foreign_privates(files))
    yield from (line for _, line in _privates(files) if line not in ours)


def _privates(files: list[Source]) -> Iterator[tuple[str, str]]:
    """Accesses to private attributes of other objects than modules, by name."""
    for file in files:
        modules = {"torch"}
        for node in file.nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        own = {node.attr for node in file.nodes if _is_own(node)}
        for node in file.nodes:
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.endswith("_"):
                continue
            base: ast.AST = node.value
            while isinstance(base, (ast.Attribute, ast.Call, ast.Subscript)):
                base = base.func if isinstance(base, ast.Call) else base.value
            if isinstance(base, ast.Name) and base.id in modules:
                continue
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                continue
            if node.attr not in own and node.attr not in ("_replace", "_fields", "_asdict", "_make"):
                yield node.attr, f"{file.path}:{node.lineno} {node.attr}"


def _is_own(node: ast.AST) -> bool:
    """Whether this is a private attribute that a class of the same file has: `self._x`."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_field(node: ast.AST) -> bool:
    """Whether this is an annotated name in the body of a class."""
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def counts(root: Path) -> dict[str, int]:
    files = sources(root)
    lines = {file.path: len(file.text.splitlines()) for file in files}
    return {
        "executors of a step": sum(has(files, one, STEPS) for one in EXECUTORS),
        "classes of messages of a few scalars": sum(has(files, one, *SENDS_SCALARS) for one in SCALAR_MESSAGES),
        "keywords of update that are handed on": len(handed_keywords(files)),
        "tests for the class of an axis": len(list(axis_kinds(files))),
        "comparisons with a spec's name": len(list(name_comparisons(files))),
        "accesses to another object's privates": len(list(foreign_privates(files))),
        "accesses to privates of torch's objects": len(list(torchs_privates(files))),
        "lines of reducer, training, ddp": sum(n for path, n in lines.items() if path.startswith(STEP_ROOMS)),
        "code lines": sum(map(code_lines, files)),
        "lines": sum(lines.values()),
        "files over 250 lines": sum(n > 250 for n in lines.values()),
        "fmt: skip": sum(file.text.count("# fmt: skip") for file in files),
    }


if __name__ == "__main__":
    here = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    for name, value in counts(here).items():
        print(f"{name:40} {value:7,}")
