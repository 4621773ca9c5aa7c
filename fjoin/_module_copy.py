"""Shallow copies of modules."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._module_references import Rebuilding, References, copy_slots, slots_of

TENSORS = ("_parameters", "_buffers", "_modules")


class PartCopies:
    """Copies of all parts of a module, to be used by one call at a time.

    Attributes:
        modules: The copies; a module without tensors stands for itself.
        copied: The indices of those that are copies.
        slots: For each tensor its dict in a copy, its name there, and its path.
        originals: For each copy the attributes of its module: the present ones, and those that were copied.
        own: For each copy its attributes: the present ones, and those before a call.
        special: Index and name of an attribute that refers to the module's tensors or submodules -> the pair in `own`.
        counts: The number of references to each copy while no call uses it.
        objects: Copies of other objects that this call uses.
    """

    def __init__(self, modules: list[Any], copied: list[int]) -> None:
        self.modules, self.copied = modules, copied
        self.slots: list[tuple[dict[str, Any], str, str]] = []
        self.originals: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.own: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.special: dict[tuple[int, str], tuple[dict[str, Any], dict[str, Any]]] = {}
        self.counts: list[int] = []
        self.objects: list[Any] = []
        self.places: Any = None  # the attributes that were found when it was made

    def count(self) -> list[int]:
        """The number of references to each copy."""
        return [sys.getrefcount(self.modules[i]) for i in self.copied]

    def write_back(self) -> None:
        """Write the plain attributes that a call has assigned, such as kept losses, to the modules."""
        if not same(self.own):
            for i, (now, before), (original, copied) in zip(self.copied, self.own, self.originals, strict=True):
                for name, value in now.items():
                    kept = name in TENSORS or name == "training" or (i, name) in self.special
                    if kept or before.get(name, self) is value:
                        continue
                    before[name] = value
                    if not _is_wrapped(value):
                        original[name] = copied[name] = value
        for original, now, before, _ in self.objects:
            changed = {name: value for name, value in now.items() if before.get(name, self) is not value}
            original.update({name: value for name, value in changed.items() if not _is_wrapped(value)})

    def empty(self) -> None:
        """Let go of the tensors and of other objects."""
        self.objects = []
        for held, name, _ in self.slots:  # they would live until the next call
            held[name] = None
        for (_, name), (now, before) in self.special.items():
            now[name] = before[name] = None


def _is_wrapped(value: Any) -> bool:
    """Whether a value is of a transform of torch.func, at whose end it has no meaning."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def same(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> bool:
    """Whether the dicts of each pair have the same values; values that cannot be compared, such as tensors, are others."""
    try:
        return all([now == before for now, before in pairs])
    except Exception:
        return False


# Dicts of hooks that forward passes do not call.
_UNCALLED = frozenset(vars(nn.Module())) - {"_forward_hooks", "_forward_pre_hooks"}
_COMPILED = "_compiled_call_impl"  # the attribute of a module after its `compile()`


class _Part(NamedTuple):
    """One module: its tensors by path, and its submodules."""

    module: weakref.ref[nn.Module]
    params: dict[str, str]  # name -> path
    buffers: dict[str, str]
    children: dict[str, int | None]  # name -> index among the parts


class ModuleCopies:
    """Makes shallow copies of a module. It keeps no part of the module alive.

    Args:
        module: The module.
        known: Tensor -> its path, for tensors that had another path before the module was changed.
        training: The mode of the copies; None for that of the module.

    Attributes:
        places: Path -> the index of the first part that has it, its dict, and its name there.
        aliases: Further paths of shared tensors -> path.
        buffers: The paths of the buffers.
        whole: Whether the module cannot be copied, since compiled code refers to it.
    """

    def __init__(self, module: nn.Module, known: Mapping[Tensor, str], training: bool | None = None) -> None:
        named = list(module.named_modules())
        self._training, self.whole = training, any(_is_whole(part) for _, part in named)
        self._index = {id(part): i for i, (_, part) in enumerate(named)}
        paths: dict[int, str] = {}  # of the module's tensors, by identity
        self.places: dict[str, tuple[int, str, str]] = {}
        self.aliases: dict[str, str] = {}
        for i, (prefix, part) in enumerate(named):
            for kind in ("_parameters", "_buffers"):
                for name, tensor in part.__dict__[kind].items():
                    if tensor is None:
                        continue
                    here = f"{prefix}.{name}" if prefix else name
                    path = paths.setdefault(id(tensor), known.get(tensor, here))
                    self.places.setdefault(path, (i, kind, name))
                    if path != here:
                        self.aliases[here] = path
        self.buffers = tuple(path for path, (_, kind, _) in self.places.items() if kind == "_buffers")
        self._references = References([part for _, part in named], paths, self._index)
        self._parts = [self._part(part, paths) for _, part in named]
        self._find_special()
        # The attributes of each module; the dict of its submodules, with what it held; those of its tensors, with sizes.
        self._attributes = [part.__dict__ for _, part in named]
        self._children = [(of["_modules"], dict(of["_modules"])) for of in self._attributes if of["_modules"]]
        self._sizes = [(of[kind], len(of[kind])) for of in self._attributes for kind in TENSORS]
        self._compiled = any(_COMPILED in of for of in self._attributes)
        self._idle: list[PartCopies] = []

    def _part(self, part: nn.Module, paths: Mapping[int, str]) -> _Part:
        params, buffers = (
            {n: paths[id(t)] for n, t in part.__dict__[kind].items() if t is not None}
            for kind in ("_parameters", "_buffers")
        )
        children = {n: None if m is None else self._index[id(m)] for n, m in part._modules.items()}
        return _Part(weakref.ref(part), params, buffers, children)

    def _find_special(self) -> None:
        """Find the attributes that refer to the module's tensors and submodules, and the modules to be copied."""
        within, parts = self._references.within, self._parts
        self._special = [
            (i, name)
            for i, part in enumerate(parts)
            for name, value in part.module().__dict__.items()
            if name not in TENSORS and within(value)
        ]
        self._seen = [(held, dict(held)) for held in (part.module().__dict__ for part in parts)]
        # What a list or a hook refers to may change; to look at their number is enough for most changes.
        self._containers = [
            value
            for part in parts
            for name, value in part.module().__dict__.items()
            if isinstance(value, (list, dict, set, deque)) and name not in TENSORS and name not in _UNCALLED
        ]
        self._sizes_held = [len(held) for held in self._containers]
        self._held = sum(self._sizes_held)
        copied = {i for i, part in enumerate(parts) if self._training is not None or part.params or part.buffers}
        copied |= {i for i, _ in self._special}
        while more := {i for i, p in enumerate(parts) if not copied.isdisjoint(p.children.values())} - copied:
            copied |= more
        self._copied = sorted(copied)
        self._slotted = [i for i in self._copied if slots_of(parts[i].module())]

    def _have_gained(self) -> bool:
        """Whether lists and other containers have got more references to the module's own since they were looked at."""
        gained = False
        for i, (held, before) in enumerate(zip(self._containers, self._sizes_held, strict=True)):
            if (n := len(held)) != before:
                self._sizes_held[i] = n
                values = held.values() if isinstance(held, dict) else held
                new = itertools.islice(values, before if before < n and not isinstance(held, set) else 0, None)
                gained |= any(map(self._references.within, list(new)))
        self._held = sum(self._sizes_held)
        return gained

    def forget(self) -> None:
        """Let go of the module's attributes, once it is gone."""
        self._attributes, self._children, self._sizes, self._idle = [], [], [], []
        self._seen, self._containers, self._sizes_held, self._held = [], [], [], 0

    def fit(self) -> bool:
        """Whether the module still has the structure that it had, and is compiled or not, as before."""
        return (
            all([len(held) == before for held, before in self._sizes])
            and same(self._children)
            and self._compiled == any([_COMPILED in of for of in self._attributes])
        )

    def own(self, path: str) -> Tensor:
        """The module's own tensor."""
        at, kind, name = self.places[path]
        held: Tensor = self._parts[at].module().__dict__[kind][name]  # type: ignore[union-attr]
        return held

    def take(self, tensors: Mapping[str, Tensor]) -> PartCopies:
        """Copies with these tensors, to be given back after the call.

        Args:
            tensors: Path -> tensor.
        """
        copies = self._idle.pop() if self._idle else None
        seen = self._seen if copies is None else copies.originals
        if not same(seen) or (self._held != sum(map(len, self._containers)) and self._have_gained()):
            self._find_special()
        if copies is None or copies.places is not self._special:
            copies = self._make()
        for held, name, path in copies.slots:
            held[name] = tensors[path]
        for i in self._slotted:
            copy_slots(self._parts[i].module(), copies.modules[i])
        rebuilding = Rebuilding(self._references, copies.modules, tensors)
        for (i, name), (now, before) in copies.special.items():
            value = self._parts[i].module().__dict__[name]
            now[name] = before[name] = rebuilding.of(value)
        copies.objects = rebuilding.copied
        return copies

    def _make(self) -> PartCopies:
        modules: list[Any] = [part.module() for part in self._parts]
        copies = PartCopies([object.__new__(type(module)) for module in modules], self._copied)
        for i in set(range(len(modules))) - set(self._copied):
            copies.modules[i] = modules[i]
        for i in self._copied:
            part, original, own = self._parts[i], modules[i].__dict__, copies.modules[i].__dict__
            own.update(original)
            own["_modules"] = {n: None if at is None else copies.modules[at] for n, at in part.children.items()}
            for kind, paths in (("_parameters", part.params), ("_buffers", part.buffers)):
                own[kind] = dict(own[kind])
                copies.slots += [(own[kind], name, path) for name, path in paths.items()]
            if self._training is not None:
                own["training"] = self._training
            copies.originals.append((original, dict(original)))
            copies.own.append((own, dict(own)))
            copies.special.update({place: copies.own[-1] for place in self._special if place[0] == i})
        copies.counts, copies.places = copies.count(), self._special
        return copies

    def give_back(self, copies: PartCopies) -> None:
        """Write the plain attributes that the call has assigned, such as kept losses, to the module; keep free copies."""
        copies.write_back()
        if copies.count() != copies.counts:  # a graph will call them again, in backward
            return
        copies.empty()
        self._idle.append(copies)


def _is_whole(part: nn.Module) -> bool:
    """Whether a module cannot be copied, since compiled code refers to it."""
    frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    return _COMPILED in part.__dict__ or (frame is not None and isinstance(part, frame.OptimizedModule))
