"""The version, which pyproject.toml reads from here."""

from __future__ import annotations

__version__ = "0.4.0"
