"""How a transform is called: its function is adapted to the context of a call, once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..tree._tree import State, Tree
from ._call import KEYWORDS, Call, call_of

if TYPE_CHECKING:
    from ._transform import Transform


class Update:
    """The `update` of a transform: a function `(grads, state, params=None, **keywords) -> (grads, state)`.

    It is made once from the function that was given, and stays the same in copies of the transform.

    Attributes:
        function: The function that was given. It takes `(grads, state, params, call)`, or keywords.
        names: The keywords that it names.
        takes_call: Whether it takes the context.
    """

    __slots__ = (
        "_donates",
        "_flushes",
        "_others",
        "_places",
        "_required",
        "function",
        "names",
        "takes_call",
    )

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.takes_call = function, False
        self._donates = self._flushes = True
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # a builtin, which is called with the gradients, the state and the parameters
            self.names, self._others, self._places = frozenset[str](), False, 3
            self._required = self.names
            return
        kinds = [p.kind for p in parameters]
        by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._others = inspect.Parameter.VAR_KEYWORD in kinds
        self.takes_call = any(p.name == "call" and p.kind in by_name for p in parameters)
        many = inspect.Parameter.VAR_POSITIONAL in kinds
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        by_place = [p.name for p in parameters if p.kind in positional and p.name not in ("call", *KEYWORDS)][:3]
        places = len(by_place)
        if places < 2 and not many and not self._others:
            raise TypeError(
                f"update is called as update(grads, state, params=None, ...), but {function!r} takes {places} arguments"
            )
        self._places = 3 if many or places < 2 else places
        by_name_only = [p for p in parameters if p.kind in by_name and p.name not in by_place]
        self.names = frozenset(p.name for p in by_name_only)
        self._required = frozenset(p.name for p in by_name_only if p.default is inspect.Parameter.empty)

    def for_transform(self, owner: Transform) -> Update:
        """The same update with the facts of a transform."""
        new = object.__new__(Update)
        new.function, new.names, new._others = self.function, self.names, self._others
        new._places, new.takes_call, new._required = self._places, self.takes_call, self._required
        new._donates = "donated" in owner.takes
        new._flushes = owner.accepts("flush")
        return new

    def __getattr__(self, name: str) -> Any:
        if name in ("__name__", "__qualname__"):  # for functools.wraps
            return getattr(self.function, name)
        raise AttributeError(name)

    def __call__(self, grads: Tree, state: State, params: Tree = None, **keywords: Any) -> tuple[Tree, State]:
        return self.run(grads, state, params, call_of(keywords))

    def run(self, grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        """Call the function, with what it takes of the context."""
        if call.flush and not self._flushes:
            return grads, state
        if call.donated and not self._donates:
            call = call.inside(donated=False)
        if self.takes_call:
            out: tuple[Tree, State] = self.function(*(grads, state, params)[: self._places], call=call)
            return out
        given = call.keywords(self.names, self._others, self._required)
        if "params" in self.names:  # by keyword only
            given["params"] = params
        out = self.function(*(grads, state, params)[: self._places], **given)
        return out
