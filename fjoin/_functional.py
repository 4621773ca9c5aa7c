"""Modules as pure functions, and the loss with its gradient."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ._module_copy import ModuleCopies
from .transforms.base import flag, path_string

# Parameter -> path, of the modules that `functional` has taken.
TAKEN: Any = WeakIdKeyDictionary()


def warn_of_module_params(loss: Tensor, stacklevel: int) -> None:
    """Warn if a loss depends on the parameters of a module itself, and not only on those given to its `Apply`."""
    seen, waiting = set[Any](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(before for before, _ in node.next_functions)
        leaf = getattr(node, "variable", None)
        if leaf is not None and (path := TAKEN.get(leaf)) is not None:
            warnings.warn(
                f"the loss reads the parameter {path!r} of the module itself, which keeps its value: functional has made a function of "
                f"it, whose parameters are those given to apply. Read params[{path!r}] instead",
                stacklevel=stacklevel,
            )
            return


class Apply:
    """The forward pass of a module as a pure function; made by `functional`.

    - `apply(params, buffers, *args, **kwargs)` returns the module's output and leaves `buffers` unchanged. The first call that
      discards an update of buffers warns.
    - `apply.with_buffers(...)` returns `(out, buffers)` with the buffers that the module updated, such as running statistics.
    - Entries missing in `buffers` have the module's values. `params` must be complete.
    - A call follows the module: its mode, its hooks and wrappers, and its plain attributes, which a forward pass may assign.
      `apply.eval()` and `apply.train()` are functions of one mode.

    Each call has a shallow copy of the module, so threads and simulated ranks may share an `Apply`. The module's own parameters and
    buffers are neither used nor changed. It is not kept alive: without it, a call does what it did when `functional` took it. A
    compiled module is not copied; only one thread at a time can call it.
    """

    def __init__(self, module: nn.Module, trained: frozenset[str], training: bool | None = None) -> None:
        self._trained, self._training, self._warned = trained, training, False
        self._lock = threading.Lock()
        self._known: Any = WeakIdKeyDictionary()  # the module's tensors -> their paths
        self._copies = ModuleCopies(module, self._known, training)
        for path in self._copies.places:
            self._known[self._copies.own(path)] = path
        me = weakref.ref(self)

        def forget(_: Any) -> None:
            if (apply := me()) is not None:
                apply._copies.forget()

        self._module = weakref.ref(module, forget)
        # In the place of a module that is gone; of what is trained it has no values.
        self._shell = module if self._copies.whole else self._without_values()
        self._of_shell = ModuleCopies(self._shell, {}, training)

    def __repr__(self) -> str:
        return f"Apply({type(self._now()[0]).__name__}, training={self._training})"

    def _without_values(self) -> nn.Module:
        copies = self._copies

        def value(path: str) -> Tensor:
            own = copies.own(path)
            return nn.Parameter(torch.empty_like(own, device="meta")) if path in self._trained else own

        return copies.take({path: value(path) for path in copies.places}).modules[0]  # type: ignore[no-any-return]

    def eval(self) -> Apply:
        """This function with the module in eval mode, whatever mode the module itself is in.

        >>> apply, params, buffers = fjoin.functional(torch.nn.Dropout())
        >>> apply.eval()(params, buffers, torch.ones(3))
        tensor([1., 1., 1.])
        """
        return Apply(self._now()[0], self._trained, training=False)

    def train(self) -> Apply:
        """This function with the module in training mode, whatever mode the module itself is in."""
        return Apply(self._now()[0], self._trained, training=True)

    def __call__(self, params: dict[str, Tensor], buffers: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """The forward pass.

        Warns:
            UserWarning: once, where the module updates buffers: the update is discarded.

        Raises:
            ValueError: a path that the module does not have, or params that lack one.
        """
        return self._call(params, buffers, args, kwargs, keeps=False)[0]

    def with_buffers(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """The forward pass and the buffers after it, as `(out, buffers)`."""
        return self._call(params, buffers, args, kwargs, keeps=True)

    def __reduce__(self) -> Any:
        return Apply, (self._now()[0], self._trained, self._training)

    def _now(self) -> tuple[nn.Module, ModuleCopies]:
        """The module as it is, and what makes copies of it."""
        module = self._module()
        if module is None:
            return self._shell, self._of_shell
        if not self._copies.fit():
            self._copies = ModuleCopies(module, self._known, self._training)
        return module, self._copies

    def _call(
        self,
        params: dict[str, Tensor],
        buffers: dict[str, Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keeps: bool,
    ) -> tuple[Any, dict[str, Tensor]]:
        if torch.compiler.is_compiling():
            return self._traced(self._copies, {**params, **buffers}, buffers, args, kwargs)
        module, copies = self._now()
        given = self._given(copies, params, buffers)
        if copies.whole:
            with self._alone(module):
                return self._traced(copies, given, buffers, args, kwargs)
        # The module writes into its buffers in place, so give it copies.
        new = {path: given[path].clone() for path in copies.buffers}
        given.update(new)
        made = copies.take(given)
        out = made.modules[0](*args, **kwargs)

        def after(path: str) -> Tensor:
            i, kind, name = copies.places[copies.aliases.get(path, path)]
            held: Tensor = made.modules[i].__dict__[kind][name]
            return held

        updated = {path: after(path) for path in (buffers if keeps else () if self._warned else new)}
        copies.give_back(made)
        if not keeps and not self._warned:
            self._warn_of_updates(new, updated)
        return out, updated

    def _given(
        self, copies: ModuleCopies, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Path -> tensor, of all that the module has."""
        given = {**params, **buffers}
        if given.keys() == copies.places.keys():
            return given
        for alias in given.keys() & copies.aliases.keys() - copies.places.keys():
            given.setdefault(copies.aliases[alias], given.pop(alias))
        if unknown := sorted(given.keys() - copies.places.keys()):
            raise ValueError(f"the module has no parameter or buffer {unknown}; it has {list(copies.places)}")
        for path in copies.places.keys() - given.keys():
            if path in self._trained or (own := copies.own(path)).requires_grad:
                lacking = sorted(p for p in copies.places.keys() - given.keys() if p in self._trained) or [path]
                raise ValueError(f"params lacks {lacking}; pass all that functional returned")
            given[path] = own
        return given

    def _traced(
        self,
        copies: ModuleCopies,
        given: dict[str, Tensor],
        buffers: dict[str, Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, dict[str, Tensor]]:
        """The call by torch.func.functional_call, which torch.compile traces."""
        given.update({path: (given[path] if path in given else copies.own(path)).clone() for path in copies.buffers})
        module = self._module() if self._training is None else self._shell
        out = torch.func.functional_call(self._shell if module is None else module, given, args, kwargs)
        return out, {path: given[path] for path in buffers}

    @contextlib.contextmanager
    def _alone(self, module: nn.Module) -> Iterator[None]:
        """For a module that holds the given tensors during a call: one thread at a time, in the mode of this function.

        Raises:
            RuntimeError: another thread calls it now.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"two threads, or two simulated ranks, call the compiled {type(module).__name__} at the same time; give "
                f"each its own fjoin.functional(...), or leave the module uncompiled"
            )
        modes = {part: part.training for part in module.modules()}
        try:
            if self._training is not None:
                module.train(self._training)
            yield
        finally:
            for part, mode in modes.items():
                part.training = mode
            self._lock.release()

    def _warn_of_updates(self, new: dict[str, Tensor], after: dict[str, Tensor]) -> None:
        """Warn if the module has updated one of the buffers `new` that it was given, in place or by assignment."""
        updated = [
            path
            for path, tensor in new.items()
            if after[path] is not tensor or (not tensor.is_inference() and tensor._version)
        ]
        if not updated:
            return
        self._warned = True
        warnings.warn(
            f"this forward pass has updated buffers of the module, {updated[0]!r} among them, which apply(params, buffers, ...) throws "
            f"away, so that the module in eval mode will use the old ones; keep them by out, buffers = "
            f"apply.with_buffers(params, buffers, ...), which train_step takes as step.init(params, buffers) and "
            f"loss_fn(params, buffers, batch) -> (loss, aux, buffers); where they are not wanted call apply.eval(), or put the "
            f"module into eval mode",
            stacklevel=4,
        )


def functional(module: nn.Module) -> tuple[Apply, dict[str, Tensor], dict[str, Tensor]]:
    """A module as `(apply, params, buffers)`.

    Args:
        module: Any module. Training does not change its tensors, but calls follow its mode and attributes; see `Apply`.

    Returns:
        `apply`, an `Apply`, called as `apply(params, buffers, *args, **kwargs)`; `params`, path -> tensor, copies of the trained
        values: the parameters that require a gradient, in the order of registration, a shared one once, under its first path; and
        `buffers`, path -> tensor, copies of the untrained values: the module's frozen parameters and its buffers.

    Raises:
        TypeError: `module` is no nn.Module, or holds one of torch.jit.
        ValueError: it keeps a view of a parameter that cannot be made of other values.

    Same as: torch.func.functional_call over the module's own tensors.

    >>> apply, params, buffers = fjoin.functional(torch.nn.Linear(2, 1))
    >>> list(params), buffers
    (['weight', 'bias'], {})
    >>> apply(params, buffers, torch.ones(3, 2)).shape
    torch.Size([3, 1])
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"functional takes an nn.Module, got {module!r}")
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError(
                f"{path!r} is a module of torch.jit, whose parameters cannot be replaced; pass the module that was scripted or traced"
            )
    trained = {path: p for path, p in module.named_parameters() if p.requires_grad}
    for path, p in trained.items():
        TAKEN[p] = path
    # Copies, since optimizers of torch and the module's own calls write into its tensors in place.
    values = {path: t.detach().clone() for path, t in (*module.named_parameters(), *module.named_buffers())}
    params = {path: values.pop(path) for path in trained}
    return Apply(module, frozenset(params)), params, values


def value_and_grad(loss_fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., tuple[Any, Any]]:
    """A function that returns the loss and its gradient by the first argument.

    It is jax.value_and_grad in plain autograd: faster than torch.func.grad_and_value, not to be used within torch.func.

    Args:
        loss_fn: `(params, *args, **kwargs) -> loss`, 0-d; or `-> (loss, aux)`. `params` is a pytree of tensors.
        has_aux: Whether it returns more than the loss.

    Returns:
        `(params, *args, **kwargs) -> (loss, grads)`, or `-> ((loss, aux), grads)`. `grads` is like `params`, zeros where
        the loss does not depend on a leaf; the loss and `aux` are without graph. No `.grad` is written.

    Raises:
        TypeError: raised by the call: a leaf that is no tensor of floating point or complex numbers; `loss_fn` returns no
            tensor, or no pair with `has_aux`.
        ValueError: raised by the call: the loss is not 0-d, or depends on no leaf.

    Same as: jax.value_and_grad.

    >>> import fjoin
    >>> loss, grads = fjoin.value_and_grad(lambda p, x: (p["w"] * x).sum())({"w": torch.ones(2)}, torch.tensor([3.0, 4.0]))
    >>> loss, grads
    (tensor(7.), {'w': tensor([3., 4.])})
    """
    if not callable(loss_fn):
        raise TypeError(f"value_and_grad: loss_fn must be a function, got {loss_fn!r}")
    flag("has_aux", has_aux)

    known = False  # whether a loss has been searched for parameters of a module

    def of(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        leaves, structure = optree.tree_flatten(params)
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
                got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
                name = path_string(optree.treespec_paths(structure)[i])
                raise TypeError(
                    f"value_and_grad: params[{name!r}] is {got}, expected a tensor of floating point numbers"
                )
        with torch.enable_grad():
            own = [leaf.detach().requires_grad_() for leaf in leaves]
            out = loss_fn(optree.tree_unflatten(structure, own), *args, **kwargs)
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"value_and_grad: with has_aux loss_fn must return (loss, aux), got {type(out).__name__}")
        loss, aux = out if has_aux else (out, None)
        if not isinstance(loss, Tensor):
            raise TypeError(f"value_and_grad: loss_fn must return a tensor, got {type(loss).__name__}")
        if loss.dim():
            raise ValueError(
                f"value_and_grad: the loss has shape {tuple(loss.shape)}, expected (); take its mean or its sum"
            )
        if leaves and not loss.requires_grad:
            raise ValueError("value_and_grad: the loss depends on no leaf of params")
        nonlocal known
        if not known:
            warn_of_module_params(loss, stacklevel=3)
            known = True
        grads = torch.autograd.grad(loss, own, allow_unused=True, materialize_grads=True) if leaves else ()
        value: Any = loss.detach()
        if has_aux:
            held: Any = aux
            value = value, optree.tree_map(_without_graph, held)
        return value, optree.tree_unflatten(structure, grads)

    return functools.update_wrapper(
        of, loss_fn, functools.WRAPPER_ASSIGNMENTS if hasattr(loss_fn, "__name__") else (), ()
    )


def _without_graph(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x
