"""The form of an optimizer's states, and checks of states by it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..tree._tree import State, fields


class _Form(NamedTuple):
    """The form of a state for parameters of one shape and dtype."""

    structure: Any
    names: list[str]
    fields: list[tuple[torch.Size, torch.dtype, bool] | None]  # shape, dtype, whether it is on the parameter's device

    def filled(self) -> list[str]:
        """The names of the fields that are tensors."""
        return [name for name, field in zip(self.names, self.fields, strict=True) if field is not None]


class Forms:
    """The forms of an optimizer's states, by the shape and dtype of the parameter."""

    def __init__(self, init_param: Callable[[Tensor], State]) -> None:
        self.init_param = init_param
        self._known: dict[Any, _Form] = {}

    @functools.cached_property
    def probe(self) -> State:
        """A state without data."""
        return self.init_param(torch.empty(3, device="meta"))

    @functools.cached_property
    def common(self) -> tuple[bool, ...]:
        """For each field of a state, whether one value serves all elements of a flat buffer."""
        return tuple(field is not None and field.dim() == 0 for field in fields(self.probe))

    def of(self, param: Tensor) -> _Form:
        key = param.shape, param.dtype
        compiles = torch.compiler.is_compiling()  # what is made while a compiler traces is not of use outside
        form = None if compiles else self._known.get(key)
        if form is None:
            state = self.init_param(torch.empty(param.shape, dtype=param.dtype, device="meta"))
            accessors, fields, structure = optree.tree_flatten_with_accessor(state, none_is_leaf=True)
            names = [
                ".".join(str(getattr(entry, "field", entry.entry)) for entry in accessor) for accessor in accessors
            ]
            kinds = [None if f is None else (f.shape, f.dtype, f.is_meta and f.dim() > 0) for f in fields]
            form = _Form(structure, names, kinds)
            if not compiles:
                self._known[key] = form
        return form

    def check_state(self, param: Tensor, state: State, where: Callable[[], str]) -> list[Any]:
        """The fields of a state, if it is of the form that `init_param` gives it.

        Args:
            where: Gives the name of the state for the message.

        Raises:
            ValueError: other fields, another shape or device.
            TypeError: another dtype, or no tensor.
        """
        form = self.of(param)
        found, structure = optree.tree_flatten(state, none_is_leaf=True)
        if structure != form.structure:
            raise ValueError(f"{where()} is a {_brief(state)}, expected one that init makes, with {form.names}")
        for field, kind, name in zip(found, form.fields, form.names, strict=True):
            if kind is None and field is None:
                continue
            if kind is None or not isinstance(field, Tensor):
                want = "None" if kind is None else f"a tensor of shape {tuple(kind[0])}"
                raise TypeError(f"{where()}.{name} is {_brief(field)}, expected {want}; start from init(params)")
            shape, dtype, beside = kind
            if field.layout is not torch.strided or field.is_meta != param.is_meta:
                raise TypeError(
                    f"{where()}.{name} has layout {field.layout} and lies on {field.device}, expected a dense tensor beside its "
                    f"parameter, on {param.device}"
                )
            if field.shape != shape:
                raise ValueError(
                    f"{where()}.{name} has shape {tuple(field.shape)}, expected {tuple(shape)}: the parameter has shape "
                    f"{tuple(param.shape)}; pass the state that init(params) or the last step of these parameters returned"
                )
            if field.dtype is not dtype:
                raise TypeError(
                    f"{where()}.{name} has dtype {field.dtype}, expected {dtype}; convert it with .to(dtype)"
                )
            if beside and field.device != param.device:
                raise ValueError(f"{where()}.{name} lies on {field.device}, but its parameter on {param.device}")
        return found

    def check_ages(self, states: list[State]) -> None:
        """Raise ValueError unless states share the tensors that count steps, which a kernel counts once for all."""
        names = self.of(torch.empty(3, device="meta")).names
        leaves = [optree.tree_leaves(state, none_is_leaf=True) for state in states]
        for i, other in enumerate(leaves[1:], 1):
            for name, common, a, b in zip(names, self.common, leaves[0], other, strict=True):
                if common and a is not b:
                    raise ValueError(
                        f"states[{i}].{name} is another tensor than states[0].{name}; states that are stepped in one call share it, as "
                        f"those of init(params) do; step the others in a call of their own"
                    )


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else type(value).__name__
