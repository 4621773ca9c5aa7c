"""The library gets smaller, and its rooms stay apart: limits that a change may only lower.

    python tests/test_size.py            prints the counts
    python tests/test_size.py --lower    writes those that fell to size.json

Code lines are those without docstrings, comments and blank lines. A room is a folder of modules; its face is its
`__init__`. To raise a limit, edit size.json by hand and say in the commit which promise needs it.
"""

from __future__ import annotations

import ast
import collections
import functools
import importlib.util
import inspect
import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMITS = Path(__file__).with_name("size.json")
FACES = ("fjoin", "fjoin.transforms", "fjoin.ddp", "fjoin.testing", "fjoin.checkpoint", "fjoin.jax")
LONGEST = 300  # code lines of a file
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
Graph = dict[str, set[str]]


parsed = functools.cache(ast.parse)


def code_lines(text: str) -> int:
    docstrings = set[int]()
    for node in ast.walk(parsed(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node) is not None:
                first = node.body[0]
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def tracked(*patterns: str) -> list[Path]:
    """Files that git knows, links apart."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.splitlines()]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@functools.cache
def sources() -> dict[str, str]:
    """Module -> text, as "fjoin.transforms.codecs._codec"; a face is "fjoin.transforms.codecs.__init__"."""
    found = {}
    for path in tracked("fjoin/*.py", "transforms/*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts if parts[0] == "fjoin" else ("fjoin", *parts))] = path.read_text()
    return found


def room_of(module: str) -> str:
    """Its folder. A file beside the rooms, such as `fjoin/_errors.py`, is a room of its own, and its own face."""
    folder = module.rpartition(".")[0]
    return module if folder in FACES[:2] and not module.endswith("__init__") else folder


@functools.cache
def rooms() -> set[str]:
    return {room_of(module) for module in sources()}


def imports(module: str, text: str) -> list[str]:
    """The modules of the library that one imports from, at any depth of its code."""
    here, found = module.split(".")[:-1], list[str]()
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:  # of a room a module may be imported, or another room
                whole = f"{target}.{alias.name}"
                found.append(whole if whole in sources() or whole in rooms() else target)
    return [target for target in found if target.split(".")[0] == "fjoin"]


def targets(module: str, text: str) -> list[tuple[str, bool]]:
    """Of each import from another room: that room, and whether the import is by its face. A public module is a face."""
    found = []
    for target in imports(module, text):
        room = target if target in rooms() else room_of(target)
        if room != room_of(module):
            found.append((room, target == room or not target.rpartition(".")[2].startswith("_")))
    return found


@functools.cache
def arrows() -> Graph:
    """Room -> the rooms that its files import from. The two faces of the library, which pass all names on, are left out."""
    found: Graph = {}
    for module, text in sources().items():
        if module not in ("fjoin.__init__", "fjoin.transforms.__init__"):
            found.setdefault(room_of(module), set()).update(room for room, _ in targets(module, text))
    return found


def past_faces() -> list[str]:
    """The pairs "room -> other room" in which a file imports a file of the other room."""
    pairs = {
        f"{room_of(module)} -> {room}"
        for module, text in sources().items()
        for room, by_face in targets(module, text)
        if not by_face
    }
    return sorted(pairs)


def circles(graph: Graph) -> list[str]:
    """The groups of rooms each of which reaches the others."""

    def reached(room: str) -> set[str]:
        seen, todo = set[str](), [room]
        while todo:
            for other in graph.get(todo.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        return seen

    reach = {room: reached(room) for room in graph}
    groups = {tuple(sorted(b for b in reach[a] if a in reach.get(b, ()))) for a in graph if a in reach[a]}
    return [", ".join(group) for group in sorted(groups)]


def public(face: str) -> dict[str, Any]:
    values = vars(importlib.import_module(face)).items()
    return {name: value for name, value in values if not name.startswith("_") and not inspect.ismodule(value)}


def folders_named_like_functions() -> list[str]:
    functions = {name for face in FACES[:2] for name in public(face)}
    return sorted(room for room in rooms() if room.count(".") and room.rpartition(".")[2] in functions)


def class_names_in_several_files(texts: dict[str, str]) -> list[str]:
    """A class or an alias of a type whose name another file gives to something else."""
    found = collections.defaultdict[str, set[str]](set)
    for module, text in texts.items():
        for node in ast.walk(parsed(text)):
            alias = isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias"
            if isinstance(node, ast.ClassDef) or alias:
                found[node.name if isinstance(node, ast.ClassDef) else ast.unparse(node.target)].add(module)  # type: ignore[union-attr]
    return sorted(name for name, modules in found.items() if len(modules) > 1)


def short_cuts(texts: dict[str, str]) -> dict[str, int]:
    """Where one part of the library looks into another: at a transform's name, at the class of an axis, at private fields."""
    trees = {module: [*ast.walk(parsed(text))] for module, text in texts.items()}
    own = {module: {n.attr for n in nodes if _is_private(n) and _base(n) == "self"} for module, nodes in trees.items()}  # type: ignore[attr-defined]
    ours, found = set[str]().union(*own.values()), collections.Counter[str]()
    for module, nodes in trees.items():
        modules = {(a.asname or a.name).split(".")[0] for n in nodes if isinstance(n, ast.Import) for a in n.names}
        for n in nodes:
            inside = [n.left, *n.comparators] if isinstance(n, ast.Compare) else []
            inside += [n.slice] if isinstance(n, ast.Subscript) else [n.subject] if isinstance(n, ast.Match) else []
            found["comparisons with a spec's name"] += any(ast.unparse(one).endswith("spec.name") for one in inside)
            if isinstance(n, ast.Call) and ast.unparse(n.func) == "isinstance" and ".axes" not in module:
                found["tests for the class of an axis"] += ast.unparse(n.args[1]).endswith("Axis")
            if _is_private(n) and _base(n) not in ("self", "cls", *modules):
                found["accesses to another object's privates"] += n.attr in ours - own[module]  # type: ignore[attr-defined]
    return dict(found)


def _is_private(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("_")


def _base(node: Any) -> str:
    return node.value.id if isinstance(node.value, ast.Name) else ""


def counts() -> dict[str, Any]:
    lines = collections.Counter[str]()
    for module, text in sources().items():
        lines[module.rpartition(".")[0]] += code_lines(text)
    return {
        "code lines": dict(sorted(lines.items())),
        "files": len(sources()),
        "arrows between rooms": number_of_arrows(),
        "public names": {face: len(public(face)) for face in FACES if face != "fjoin.jax" or has_jax()},
        "lines of tests": sum(path.read_text().count("\n") for path in tracked("tests/*.py", "conftest.py")),
        "circles": circles(arrows()),
        "folders named like a function": folders_named_like_functions(),
        "imports past a face": past_faces(),
        "class names in several files": class_names_in_several_files(sources()),
        "short cuts": short_cuts(sources()),
    }


def number_of_arrows() -> dict[str, int]:
    """Within each half, and from the shell to the pure half."""
    kinds = collections.Counter(
        "shell" if not room.startswith("fjoin.transforms") and not other.startswith("fjoin.transforms")
        else "pure" if room.startswith("fjoin.transforms") else "shell to pure"
        for room, others in arrows().items() for other in others
    )  # fmt: skip
    return dict(sorted(kinds.items()))


def has_jax() -> bool:
    return importlib.util.find_spec("jax") is not None


def grown(now: Any, limit: Any, where: str) -> list[str]:
    """What exceeds its limit, or is not in its list, as text."""
    if isinstance(now, dict):
        return [line for key, value in now.items() for line in grown(value, limit.get(key, 0), f"{where}, {key}")]
    if isinstance(now, list):
        return [f"{where}: {one!r} is new" for one in now if one not in (limit or [])]
    return [f"{where}: {now}, at most {limit}"] if now > limit else []


def fallen(now: Any, limit: Any, where: str) -> list[str]:
    """What has left its limit behind by more than a few lines, or is listed and holds by now."""
    if isinstance(limit, dict):
        return [line for key, value in limit.items() for line in fallen(now.get(key, 0), value, f"{where}, {key}")]
    if isinstance(limit, list):
        return [f"{where}: {one!r} holds now" for one in limit if one not in now]
    return [f"{where}: {now}, the limit is {limit}"] if now < limit - max(10, limit // 100) else []


def lowered(now: Any, limit: Any) -> Any:
    if isinstance(limit, dict):
        return {key: lowered(now[key], value) for key, value in limit.items() if key in now}
    return [one for one in limit if one in now] if isinstance(limit, list) else min(now, limit)


def none(lines: list[str], advice: str) -> None:
    assert not lines, "\n".join(["", *lines, advice])


def test_nothing_grows_and_limits_follow_the_counts() -> None:
    found, limits = counts(), json.loads(LIMITS.read_text())
    assert limits.keys() == found.keys()
    lines = [line for name, now in found.items() for line in grown(now, limits[name], name)]
    none(lines, "make it smaller; or raise the limit in tests/size.json, and say why")
    lines = [line for name in limits for line in fallen(found[name], limits[name], name)]
    none(lines, "run `python tests/test_size.py --lower`")


def test_a_file_has_at_most_300_code_lines() -> None:
    lengths = {module: code_lines(text) for module, text in sources().items()}
    none([f"{module}: {n}" for module, n in lengths.items() if n > LONGEST], f"at most {LONGEST} lines of code")


def files_by_room() -> dict[str, list[str]]:
    """Without the faces."""
    found: dict[str, list[str]] = {room: [] for room in rooms()}
    for module in sources():
        if not module.endswith(("__init__", "__main__")):
            found[room_of(module)].append(module.rpartition(".")[2])
    return found


def test_a_room_has_at_most_a_dozen_files() -> None:
    none([f"{room}: {len(files)}" for room, files in files_by_room().items() if len(files) > 12], "at most 12 files")


def test_a_face_that_lists_files_lists_those_of_its_room() -> None:
    wrong = []
    for room, files in files_by_room().items():
        listed = re.findall(r"^(_\w+) {2,}\S", sources().get(f"{room}.__init__", ""), re.MULTILINE)
        wrong += [f"{room}: {name}" for name in {*listed}.symmetric_difference(files) if listed]
    none(wrong, "list these files, or do not")


def test_counts_of_a_small_example() -> None:
    text = '"""A docstring."""\nimport os\n\n# A comment.\n\n\ndef f(\n    x,\n):\n    """Another."""\n    return x  # kept\n'
    assert code_lines(text) == 5
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "d"}}
    assert circles(graph) == ["b, c", "d"]
    limits = {"n": {"a": 100, "b": 3}, "l": ["x", "y"]}
    now = {"n": {"a": 101, "c": 1}, "l": ["y", "z"]}
    assert len(grown(now, limits, "")) == 3 and fallen(now, limits, "") == [", l: 'x' holds now"]
    assert len(fallen({"n": {"a": 80, "b": 3}, "l": ["x", "y"]}, limits, "")) == 1
    assert lowered(now, limits) == {"n": {"a": 100}, "l": ["y"]}


def test_short_cuts_of_a_small_example() -> None:
    texts = {
        "fjoin._x": "def f(axis, part, other):\n    if isinstance(axis, GroupAxis) and part.spec.name == 'mean':\n"
        "        return other._hidden\n    return TABLE[part.spec.name], other._replace(a=1), part.spec.name in NAMES\n",
        "fjoin._y": "class Y:\n    def __init__(self):\n        self._hidden = 1\n",
    }
    assert [*short_cuts(texts).values()] == [3, 1, 1]


def test_faces_of_rooms() -> None:
    module = "fjoin.transforms.combinators._example"
    assert targets(module, "from ..codecs import Codec") == [("fjoin.transforms.codecs", True)]
    assert targets(module, "from ..codecs._codec import Codec") == [("fjoin.transforms.codecs", False)]
    assert targets(module, "from ._chain import chain\nimport torch\nfrom torch import Tensor") == []
    assert targets("fjoin.optim._x", "from ..transforms import codecs") == [("fjoin.transforms.codecs", True)]
    assert targets("fjoin.step._x", "from ..transforms.base import devices") == [("fjoin.transforms.base", True)]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    result = counts()
    if "--lower" in sys.argv:
        result = lowered(result, json.loads(LIMITS.read_text())) if LIMITS.exists() else result
        LIMITS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1), f"code lines in all: {sum(result['code lines'].values())}", sep="\n")
