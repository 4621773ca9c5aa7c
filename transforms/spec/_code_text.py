"""The code of a function as text."""

from __future__ import annotations

import types
from typing import Any


def code_text(code: types.CodeType) -> str:
    """Code and its constants as text; the functions inside it are among its constants."""
    return repr((code.co_code, code.co_names, list(map(_constant_text, code.co_consts))))


def _constant_text(constant: Any) -> str:
    if isinstance(constant, types.CodeType):
        return code_text(constant)
    if isinstance(constant, tuple):
        return f"({', '.join(map(_constant_text, constant))})"
    if isinstance(constant, frozenset):  # whose order differs between processes
        return f"{{{', '.join(sorted(map(_constant_text, constant)))}}}"
    return repr(constant)
