"""The pages of the site that are made from docstrings, and its files."""

from __future__ import annotations

import importlib
import importlib.util
import pydoc
import re
import types
import zlib
from pathlib import Path
from typing import Any

import pytest

import fjoin
import fjoin.jax
from fjoin import transforms as tx
from tests.helpers import loaded

ROOT = Path(__file__).parents[1]


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
