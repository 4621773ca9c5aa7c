"""Helpers that many tests share."""

from __future__ import annotations

from collections.abc import Callable

from fjoin.testing._compare import assert_untouched as assert_untouched
from fjoin.testing._compare import leaves as leaves
from fjoin.testing._compare import max_diff as max_diff
from fjoin.testing._compare import params_like as params_like
from fjoin.testing._compare import same_bits as same_bits
from fjoin.testing._compare import snapshot as snapshot


def raises_text(kind: type[BaseException], function: Callable[[], object], *parts: str) -> str:
    """The text of the error that `function` must raise, which must contain the parts."""
    try:
        function()
    except kind as error:
        text = str(error)
        for part in parts:
            assert part in text, f"{part!r} not in {text!r}"
        return text
    raise AssertionError(f"expected a {kind.__name__}, nothing was raised")
