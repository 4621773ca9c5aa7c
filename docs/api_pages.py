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
import fjoin.fsdp
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
    "fjoin.fsdp": fjoin.fsdp,
    "fjoin.checkpoint": fjoin.checkpoint,
    "fjoin.testing": fjoin.testing,
}
# What is no class and no function, or is torch's, and has no docstring of fjoin's.
CONSTANTS = {
    "fjoin.Joinable": "torch's base class for objects that a `Join` takes. A class of your own has `join_hook`, `join_device` and "
    "`join_process_group`; `as_joinable` makes one from pure functions.",
    "fjoin.JoinHook": "torch's class for the work of a rank without input: `main_hook` in each iteration of the other ranks, "
    "`post_hook` at the end.",
    "fjoin.testing.LAWS": "Kind -> the laws that the check of this kind runs, as functions of a maker of the object.",
    "fjoin.NO_BATCH": inspect.getdoc(fjoin.NO_BATCH) or "",
    "fjoin.transforms.PerRank": "Marks a field of a state as one of which each rank has its own value: `PerRank[Any]`.",
}
# Members that fjoin's own parts use, and no user.
HIDDEN = {
    "Members": "begin close end finish",
    "Join": "begin check live shadowing syncing",
    "TrainState": "settled",
    "ZeroRedundancyOptimizer": "join_hook owned slices",
}

# Classes whose methods the list of names shows too.
LISTED = ("TrainStep", "TrainState", "Metrics", "Mesh", "Members", "Checkpoints", "Handle", "ShardedHandle")


def public(module: types.ModuleType) -> dict[str, Any]:
    """Name -> object, of the names that a module shows."""
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    return {name: vars(module)[name] for name in names if not inspect.ismodule(vars(module)[name])}


def shown(module: str, name: str) -> str:
    """The name as the documents write it."""
    return f"{module.replace('fjoin.transforms', 'tx')}.{name}"


def page(module: str, name: str, value: Any) -> str:
    """The page of one name."""
    title = shown(module, name)
    head = f"{title}\n{'=' * len(title)}\n\n"
    if (text := CONSTANTS.get(f"{module}.{name}")) is not None:
        return f"{head}.. py:{'class' if inspect.isclass(value) else 'data'}:: {module}.{name}\n\n   {text}\n"
    if inspect.isclass(value):
        return f"{head}.. autoclass:: {module}.{name}\n{_options(name, value)}"
    return f"{head}.. autofunction:: {module}.{name}\n"


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


def summary(place: str, value: Any) -> str:
    """The first sentence that is said of a name."""
    doc = CONSTANTS.get(place) or inspect.getdoc(value) or ""
    return re.split(r"(?<=[.])\s", " ".join(doc.split("\n\n")[0].split()))[0].replace("*", "\\*")


def methods(name: str, value: type) -> list[tuple[str, Any]]:
    """Name and function of the methods that users call, but `__call__`."""
    hidden = HIDDEN.get(name, "").split()
    found = inspect.getmembers(value, inspect.isfunction)
    return [(own, method) for own, method in found if own not in hidden and not own.startswith("_")]


def index() -> str:
    """The page that lists all names, by module, in the order of the module's docstring."""
    lines = ["API", "===", "", "All public names. `tx` is `from fjoin import transforms as tx`.", ""]
    for module, held in MODULES.items():
        first, *doc = (inspect.getdoc(held) or "").split("\n")
        listed, names = re.findall(r"\w+", " ".join(doc)), public(held)
        order = sorted(names, key=lambda name: (listed.index(name) if name in listed else len(listed), name.lower()))
        title = module.replace("fjoin.transforms", "tx")
        lines += [title, "-" * len(title), "", first, "", ".. list-table::", "   :widths: 35 65", ""]
        for name in order:
            lines += [
                f"   * - :doc:`{shown(module, name)} <{module}.{name}>`",
                f"     - {summary(f'{module}.{name}', names[name])}",
            ]
            for own, method in methods(name, names[name]) if name in LISTED else ():
                place = f"{module}.{name}.{own}"
                lines += [f"   * - :py:meth:`{name}.{own} <{place}>`", f"     - {summary(place, method)}"]
        lines.append("")
    return "\n".join(lines)


def all_pages() -> dict[str, str]:
    """File name -> text, of all pages."""
    found = {"index.rst": index()}
    for module, held in MODULES.items():
        found |= {f"{module}.{name}.rst": page(module, name, value) for name, value in public(held).items()}
    return found


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
