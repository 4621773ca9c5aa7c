"""The site: `make docs` builds it from the documents, the docstrings and the benchmarks' pages, and treats warnings as errors."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from api_pages import is_made_by_others, write_pages

import fjoin

project, author, version, release = "fjoin", "the fjoin team", fjoin.__version__, fjoin.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "benchmarks/*.md",
    "benchmarks/*.png",
    "README.md",
    "examples/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = ["**/__pycache__"]
html_theme, html_title, html_copy_source = "furo", f"fjoin {version}", False
html_static_path, html_css_files, html_show_copyright = ["_static"], ["site.css"], False
html_js_files = [("tables.js", {"defer": "defer"}), ("lines.js", {"defer": "defer"})]
nb_execution_mode, nb_execution_raise_on_error, nb_execution_timeout = "force", True, 120
myst_enable_extensions, myst_heading_anchors = ["colon_fence"], 4
# Inventories of other projects lie in the repository, so the build needs no network.
inventories = Path(__file__).parent / "inventories"
intersphinx_mapping = {
    path.stem: (path.with_suffix(".url").read_text().strip(), str(path)) for path in sorted(inventories.glob("*.inv"))
}
default_role = "code"  # docstrings have single backticks
napoleon_google_docstring, napoleon_numpy_docstring, napoleon_use_rtype = True, False, False
napoleon_custom_sections = [("Warns", "Raises")]
autodoc_member_order, autodoc_typehints, autodoc_preserve_defaults = "bysource", "signature", True
copybutton_prompt_text, copybutton_prompt_is_regexp = r">>> |\.\.\. ", True
suppress_warnings = ["myst.xref_missing", "autodoc.mocked_object", "ref.python", "toc.not_included"]
LITERAL = r"(``?[^`]+``?)"
write_pages()


def formulas(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Indented blocks between paragraphs are formulas and code, which reStructuredText takes for quotations."""
    out: list[str] = []
    section = source = False
    for i, line in enumerate(lines):
        if re.fullmatch(r"[A-Z][a-z]+( [a-z]+)?:", line):
            section, source = True, False
        elif line and not line.startswith(" "):
            section, source = False, line.startswith(("Same as: ", "Source: "))
            out += [""] if source else []
        elif source and line.strip():
            line = line.strip()  # it goes on
        indented, first = line.startswith("    "), i and not lines[i - 1].strip()
        if indented and first and not section and not line.lstrip().startswith((">>>", "- ")):
            before = next((one for one in reversed(out) if one.strip()), "")
            if not before.startswith((" ", "- ", ".. ")) and before != "::":
                out += ["::", ""]
        out.append(line)
    lines[:] = out


def linked(line: str, names: Mapping[str, Any]) -> str:
    """Names of other projects that an inventory has become links, as those behind "Same as"."""
    parts = re.split(LITERAL, line)
    for k, part in enumerate(parts):
        parts[k] = re.sub(
            r"`(.+)`" if k % 2 else r"((?:torch|optax|jax)(?:\.\w+)+)",
            lambda found: f":py:obj:`{found[1]}`" if found[1] in names else found[0],
            part,
        )
    return "".join(parts)


def escaped(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Signs that stand for themselves in docstrings: |x|, step_param_, *args, and the s of `Name`s."""
    names = app.env.intersphinx_inventory.get("py:class", {})
    literal = -1  # the indentation of a literal block's first line
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if literal >= 0 and line.strip() and indent <= literal:
            literal = -1
        if line.strip() == "::" or line.startswith(".. "):
            literal = indent
        elif literal < 0 and not line.lstrip().startswith((">>>", "...")):
            parts = re.split(LITERAL, linked(line, names))
            plain = [re.sub(r"(?<!\\)(\*|\||(?<=\w)_(?!\w))", r"\\\1", part) for part in parts]
            plain = [f"\\ {part}" if k and re.match(r"\w", part) else part for k, part in enumerate(plain)]
            lines[i] = "".join(part if k % 2 else plain[k] for k, part in enumerate(parts))


def without_arguments(app: Any, what: str, name: str, obj: Any, options: Any, args: str, returns: str) -> Any:
    """Classes whose objects another function makes are shown without their own arguments."""
    return ("", None) if is_made_by_others(obj) else None


def where_described(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Source leads back to the place that its page has. Sphinx takes one module for all names of a file."""
    if pagename.startswith("_modules/") and "body" in context:
        places = r"(docs/api/((?:\w+\.)+)(\w+)\.html#)[\w.]*?\b\3\b"
        context["body"] = re.sub(places, r"\1\2\3", context["body"])


def setup(app: Any) -> None:
    # From disk a browser lets no script read other pages, so results of a search are shown without extracts.
    off = "if (location.protocol === 'file:') DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;"
    app.add_js_file(None, body=off, priority=300)
    app.connect("html-page-context", where_described)
    app.connect("autodoc-process-signature", without_arguments)
    app.connect("autodoc-process-docstring", escaped, priority=900)
    app.connect("autodoc-process-docstring", formulas, priority=100)
