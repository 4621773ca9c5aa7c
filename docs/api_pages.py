"""The pages of the public names, one for each, from their docstrings: docs/api/NAME.rst, which the build writes."""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path
from typing import Any

import fjoin
import fjoin.checkpoint
import fjoin.ddp
import fjoin.jax
import fjoin.testing
from fjoin import transforms as tx

PAGES = Path(__file__).parent / "api"
MODULES: dict[str, types.ModuleType] = {
    "fjoin": fjoin,
    "fjoin.transforms": tx,
    "fjoin.transforms.checkpoint_policies": tx.checkpoint_policies,
    "fjoin.transforms.random": tx.random,
    "fjoin.jax": fjoin.jax,
    "fjoin.ddp": fjoin.ddp,
    "fjoin.checkpoint": fjoin.checkpoint,
    "fjoin.testing": fjoin.testing,
}
TITLES = {
    "fjoin": "fjoin: training",
    "fjoin.transforms": "fjoin.transforms: `tx`, the pure part",
    "fjoin.transforms.checkpoint_policies": "fjoin.transforms.checkpoint_policies: `tx.checkpoint_policies`, what `remat` keeps",
    "fjoin.transforms.random": "fjoin.transforms.random: `tx.random`, keys and random numbers",
    "fjoin.jax": "fjoin.jax: losses of jax, and optax",
    "fjoin.ddp": "fjoin.ddp: in DistributedDataParallel",
    "fjoin.checkpoint": "fjoin.checkpoint: files",
    "fjoin.testing": "fjoin.testing: the laws",
}
# Members that fjoin's own parts use, and no user.
HIDDEN = {
    "Join": "begin check live shadowing syncing",
    "TrainState": "settled",
    "ZeroRedundancyOptimizer": "join_hook owned slices",
}


def public(module: types.ModuleType) -> dict[str, Any]:
    """Name -> object, of the names that a module shows."""
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    return {name: vars(module)[name] for name in names if not inspect.ismodule(vars(module)[name])}


def page(module: str, name: str, value: Any) -> str:
    """The page of one name."""
    title = f"{module.replace('fjoin.transforms', 'tx')}.{name}"
    head = f"{title}\n{'=' * len(title)}\n\n"
    if inspect.isclass(value):
        return f"{head}.. autoclass:: {module}.{name}\n{_options(name, value)}"
    if callable(value) and not isinstance(value, type(fjoin.NO_BATCH)):
        return f"{head}.. autofunction:: {module}.{name}\n"
    return f"{head}.. py:data:: {module}.{name}\n\n   {_first_line(value) or 'A constant.'}\n"


def _options(name: str, value: type) -> str:
    """What the page of a class shows of its members."""
    bases = [base for base in value.__mro__ if _is_ours(base)]
    special = [one for one in ("__call__", "__len__") if any(one in vars(base) for base in bases)]
    options = [f"special-members: {', '.join(special)}"] if special else []
    if not issubclass(value, BaseException) and not hasattr(value, "_fields"):
        options.append("members:")
        if all(_is_ours(base) or base.__module__ in ("typing", "builtins") for base in value.__mro__):
            options.append("inherited-members: tuple")
    if name in HIDDEN:
        options.append(f"exclude-members: {', '.join(HIDDEN[name].split())}")
    return "".join(f"   :{option}\n" for option in options)


def _is_ours(value: type) -> bool:
    return value.__module__.split(".")[0] == "fjoin"


def is_made_by_others(value: Any) -> bool:
    """Whether a class says which function makes its objects, so that its own arguments are nobody's concern."""
    doc = inspect.getdoc(value) or ""
    return inspect.isclass(value) and "; made by " in doc.split("\n")[0] and "\nArgs:" not in doc


def _first_line(value: Any) -> str:
    return (inspect.getdoc(type(value)) or "").split("\n")[0]


def groups(module: types.ModuleType) -> list[tuple[str, list[str]]]:
    """(heading, names), as the module's own docstring groups its names; the rest at the end."""
    names, found = public(module), list[tuple[str, list[str]]]()
    heading = ""
    for line in (inspect.getdoc(module) or "").split("\n")[1:]:
        words = re.split(r"\s{2,}", line.strip())
        shown = [word for part in words for word in part.split() if word.split(".")[-1] in names]
        if not shown:
            continue
        other = [part for part in words if not set(part.split()) & set(shown)]
        if other or not found:
            heading = other[0] if other else ""
            found.append((heading, []))
        seen = {name for _, some in found for name in some}
        found[-1][1].extend(name for name in dict.fromkeys(word.split(".")[-1] for word in shown) if name not in seen)
    rest = sorted(names.keys() - {name for _, some in found for name in some})
    return [*found, *([("others", rest)] if rest else [])]


def index(module: str) -> str:
    """The page that lists a module's names."""
    title = TITLES[module].replace("`", "")
    lines = [title, "=" * len(title), "", *(inspect.getdoc(MODULES[module]) or "").split("\n")[:1], ""]
    for heading, names in groups(MODULES[module]):
        heading = heading or "names"
        lines += [heading, "-" * len(heading), "", ".. list-table::", "   :widths: 30 70", ""]
        for name in names:
            doc = (inspect.getdoc(public(MODULES[module])[name]) or "").split("\n")[0].replace("*", "\\*")
            lines += [f"   * - :doc:`{name} <{module}.{name}>`", f"     - {doc}"]
        lines += ["", ".. toctree::", "   :hidden:", "", *(f"   {module}.{name}" for name in names), ""]
    return "\n".join(lines) + "\n"


def all_pages() -> dict[str, str]:
    """File name -> text, of all pages."""
    found = {f"{module}.rst": index(module) for module in MODULES}
    for module, held in MODULES.items():
        found |= {f"{module}.{name}.rst": page(module, name, value) for name, value in public(held).items()}
    listed = "\n".join(f"   {module}" for module in MODULES)
    return found | {"index.rst": f"API\n===\n\n.. toctree::\n   :maxdepth: 1\n\n{listed}\n"}


def write_pages() -> None:
    """Write the pages that have changed, and remove others."""
    PAGES.mkdir(exist_ok=True)
    pages = all_pages()
    for path in PAGES.glob("*.rst"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = PAGES / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
