"""The pages of the site that are made from docstrings, and its files."""

from __future__ import annotations

import importlib.util
import re
import types
from pathlib import Path

import pytest

import fjoin
from fjoin import transforms as tx

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def api() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("api_pages", ROOT / "docs" / "api_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_has_a_page_and_is_listed(api: types.ModuleType) -> None:
    pages = api.all_pages()
    for module, held in (("fjoin", fjoin), ("fjoin.transforms", tx)):
        for name in api.public(held):
            assert f"{module}.{name}.rst" in pages, name
            assert len(re.findall(rf":doc:`{name} <{re.escape(module)}\.{name}>`", pages[f"{module}.rst"])) == 1, name
    assert len(pages) > 300


def test_every_document_is_in_the_contents() -> None:
    listed = set(re.findall(r"^([\w./-]+)$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE))
    documents = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert documents <= listed, documents - listed
