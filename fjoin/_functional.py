"""Modules as pure functions, and the loss with its gradient."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeAlias

import optree
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from .transforms.base import checks, trees
from .transforms.rematerialization import memory_of, run_op, tensors_in

# Parameter -> path and memory, of the modules that `functional` has taken.
TAKEN: Any = WeakIdKeyDictionary()
# The output of a module, the buffers that it was given, and those after the call.
_Outcome: TypeAlias = tuple[Any, dict[str, Tensor], dict[str, Tensor]]

_BY_ATTRIBUTES = (
    "functional has made a function of it. A forward pass must reach its submodules by attributes, self.name = ..., nn.ModuleList "
    "or nn.ModuleDict, and not by a plain list, dict, object, closure or bound method, and must make views of parameters itself"
)


class _OwnParams(TorchDispatchMode):
    """Refuses operations on the memory of a module's own parameters, by a view for instance; also where no graph is
    made.

    Args:
        paths: Memory -> the path of the parameter.
    """

    supports_higher_order_operators = True

    def __init__(self, paths: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._paths = paths

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tensors_in(args, kwargs or {}):
            if (path := self._paths.get(memory_of(x))) is not None:
                _refuse("forward pass", path)
        return run_op(func, types, args, kwargs or {})


def _refuse(what: str, path: str) -> NoReturn:
    raise ValueError(
        f"the {what} reads the parameter {path!r} of the module itself, which keeps its value: {_BY_ATTRIBUTES}; elsewhere "
        f"read params[{path!r}]"
    )


def refuse_module_params(loss: Tensor) -> None:
    """Check that a loss does not depend on the parameters of a module itself, but only on those given to its `Apply`.

    Raises:
        ValueError: it does.
    """
    seen, waiting = set[Any](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(before for before, _ in node.next_functions)
        leaf = getattr(node, "variable", None)
        if leaf is not None and (taken := TAKEN.get(leaf)) is not None:
            _refuse("loss", taken[0])


class Apply:
    """The forward pass of a module as a pure function; made by `functional`.

    - `apply(params, buffers, *args, **kwargs)` returns the module's output and leaves `buffers` unchanged. The first
      call that discards an update of buffers warns.
    - `apply.with_buffers(...)` returns `(out, buffers)` with the buffers that the module updated, such as running
      statistics.
    - Entries missing in `buffers` have the module's values. `params` must be complete.
    - A call follows the module: its mode, its hooks, layers that are replaced by others with the same paths, and its
      plain attributes, which a forward pass may assign. `apply.eval()` and `apply.train()` are functions of one mode.
    - The forward pass must reach submodules and parameters by attributes, nn.ModuleList or nn.ModuleDict.

    Each call has a shallow copy of the module, so threads and simulated ranks may share an `Apply`. The module's own
    parameters and buffers are neither used nor changed. It is not kept alive: without it, a call does what it did when
    `functional` took it. A compiled module is not copied: it holds the given tensors during a call, and only one thread
    at a time may call it.
    """

    def __init__(self, module: nn.Module, trained: frozenset[str], training: bool | None = None) -> None:
        self._trained, self._training, self._warned = trained, training, False
        self._called = False  # whether a call has shown that it runs copies only
        self._module = weakref.ref(module)
        first: dict[int, str] = {}
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        # The further paths of shared tensors, and paths without those of wrappers -> the first one.
        self._aliases = {path: first[id(t)] for path, t in named if first.setdefault(id(t), path) != path}
        names = inner_names(module, first.values())
        self._aliases |= {name: path for path, name in names.items() if name != path}
        self._own: dict[str, Any] = {}  # path -> the memory of the module's own parameter, which a kept view keeps
        # In the place of a module that is gone; of what is trained it has no values.
        values: dict[str, Tensor] = {}
        for path, p in module.named_parameters():
            if path in trained:
                _, self._own[path] = TAKEN.get(p) or (path, StorageWeakRef(p.untyped_storage()))
                values[path] = stand = nn.Parameter(torch.empty_like(p, device="meta"))
                TAKEN[p] = TAKEN[stand] = path, self._own[path]
        copies = _Copies(self, values)
        shell = copies.of(module)
        self._shell: nn.Module = module if copies.compiled else shell

    def __repr__(self) -> str:
        return f"Apply({type(self._now()).__name__}, training={self._training})"

    def eval(self) -> Apply:
        """This function with the module in eval mode, whatever mode the module itself is in.

        >>> apply, params, buffers = fjoin.functional(torch.nn.Dropout())
        >>> apply.eval()(params, buffers, torch.ones(3))
        tensor([1., 1., 1.])
        """
        return Apply(self._now(), self._trained, False)

    def train(self) -> Apply:
        """This function with the module in training mode, whatever mode the module itself is in."""
        return Apply(self._now(), self._trained, True)

    def __call__(self, params: dict[str, Tensor], buffers: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """The forward pass.

        Warns:
            UserWarning: once, where the module updates buffers: the update is discarded.

        Raises:
            ValueError: a path that the module does not have, or params that lack one; the first call runs a submodule
                that it reaches by other objects than attributes.
        """
        out, given, after = self._call(params, buffers, args, kwargs)
        if given and not self._warned:
            updated = [p for p, t in given.items() if after[p] is not t or (not t.is_inference() and t._version)]
            if updated:
                self._warned = True
                warnings.warn(
                    f"this forward pass has updated buffers of the module, {updated[0]!r} among them, which apply(params, buffers, "
                    f"...) throws away; keep them by out, buffers = apply.with_buffers(params, buffers, ...), and in train_step by "
                    f"step.init(params, buffers) and loss_fn(params, buffers, batch) -> (loss, aux, buffers), or put the module "
                    f"into eval mode",
                    stacklevel=2,
                )
        return out

    def with_buffers(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """The forward pass and the buffers after it, as `(out, buffers)`."""
        out, _, after = self._call(params, buffers, args, kwargs)
        return out, {path: after.get(self._aliases.get(path, path), tensor) for path, tensor in buffers.items()}

    def __reduce__(self) -> Any:
        return Apply, (self._now(), self._trained, self._training)

    def _now(self) -> nn.Module:
        module = self._module()
        return self._shell if module is None else module

    def _call(self, params: dict[str, Tensor], buffers: dict[str, Tensor], args: Any, kwargs: Any) -> _Outcome:
        given = {**params, **buffers}
        if self._aliases:
            given = {self._aliases.get(path, path): tensor for path, tensor in given.items()}
        if torch.compiler.is_compiling():
            return self._traced(given, args, kwargs)
        module = self._now()
        copies = _Copies(self, given)
        copy = copies.of(module)
        copies.check()
        if copies.compiled:
            modes = {part: part.training for part in module.modules()}
            try:
                if self._training is not None:
                    module.train(self._training)
                return self._traced(given, args, kwargs)
            finally:
                for part, mode in modes.items():
                    part.training = mode
        with contextlib.nullcontext() if self._called else copies.running_alone(self._own):
            out = copy(*args, **kwargs)
        self._called = True
        copies.write_back()
        return out, copies.buffers, copies.after() if copies.buffers else {}

    def _traced(self, given: dict[str, Tensor], args: Any, kwargs: Any) -> _Outcome:
        """The call by torch.func.functional_call, which torch.compile traces."""
        module = self._now() if self._training is None else self._shell
        given.update({path: given.get(path, own).clone() for path, own in module.named_buffers()})
        return torch.func.functional_call(module, given, args, kwargs), {}, given


class _Copies:
    """Shallow copies of a module and its submodules for one call.

    Args:
        given: Path -> tensor.

    Attributes:
        buffers: Path -> the buffer that the copy was given, a clone, since a module writes into its buffers in place.
        compiled: Whether the module cannot be copied, since compiled code refers to it.
    """

    def __init__(self, apply: Apply, given: dict[str, Tensor]) -> None:
        self._given, self._trained, self._training = given, apply._trained, apply._training
        self.buffers: dict[str, Tensor] = {}
        self.compiled = False
        self._paths: dict[int, str] = {}  # the first path of a tensor, by its identity
        self._places: dict[str, tuple[dict[str, Any], str]] = {}  # path -> the dict that has it, and its name there
        self._done: dict[int, Any] = {}  # copies by the identity of modules
        self._assigning: list[tuple[dict[str, Any], dict[str, Any], Any]] = []  # of a module, its copy before, the copy

    def of(self, module: nn.Module) -> Any:
        """A copy of a module and of all inside it, in the order of registration; one without tensors stands for itself."""
        made: dict[str, Any] = {}
        waiting = [(module, "", made, "")]
        while waiting:  # a loop, and no call for each module: a call costs more than what it does here
            part, prefix, place, at = waiting.pop()
            own, kind = part.__dict__, type(part)
            place[at] = self._done.get(id(part), part)
            children = own["_modules"]
            if "_compiled_call_impl" in own or "_orig_mod" in children:
                self.compiled = True
            inside = own["_parameters"] or own["_buffers"] or children or self._training is not None
            if id(part) in self._done or not inside:
                continue
            place[at] = copy = self._done[id(part)] = object.__new__(kind)
            new = own.copy()
            object.__setattr__(copy, "__dict__", new)
            if self._training is not None:
                new["training"] = self._training
            for held, found in (("_parameters", self._given), ("_buffers", self.buffers)):
                if own[held]:
                    new[held] = tensors = own[held].copy()
                    for name, tensor in own[held].items():
                        if tensor is not None:
                            path = self._paths.setdefault(id(tensor), prefix + name)
                            given = found.get(path)
                            tensors[name] = self._tensor(path, tensor, found) if given is None else given
                            self._places.setdefault(path, (tensors, name))
            if children:
                new["_modules"] = copied = dict(children)
                for name, child in reversed(children.items()):
                    if child is not None:
                        waiting.append((child, f"{prefix}{name}.", copied, name))
            if "_flat_weights" in own:  # nn.RNNBase keeps a list of its parameters
                weights = [getattr(copy, name, None) for name in own["_flat_weights_names"]]
                new["_flat_weights"] = weights
                new["_flat_weight_refs"] = [None if w is None else weakref.ref(w) for w in weights]
            hooked = own["_forward_hooks"] or own["_forward_pre_hooks"]
            if hooked or not kind.__module__.startswith("torch.nn.modules."):
                self._assigning.append((own, new.copy(), copy))
        return made[""]

    def _tensor(self, path: str, own: Tensor, found: dict[str, Tensor]) -> Tensor:
        """What stands for a tensor of the module that has not been given; for a buffer a clone."""
        given = self._given.get(path)
        if given is None and (path in self._trained or own.requires_grad):
            lacking = sorted(self._trained - self._given.keys()) or [path]
            raise ValueError(f"params lacks {lacking}; pass all that functional returned")
        new = own if given is None else given
        if found is self.buffers:
            new = found[path] = new.clone()
        return new

    @contextlib.contextmanager
    def running_alone(self, own: dict[str, Any]) -> Iterator[None]:
        """A context in which this thread may run the copies, and not the modules in whose place they stand.

        Nor may it read the parameters in whose place others stand: `own` has their memory by path.
        """
        here, given = threading.get_ident(), set(map(memory_of, self._given.values()))
        paths = {ref.cdata: path for path, ref in own.items() if ref.cdata not in given}

        def refuse(part: nn.Module, args: Any) -> None:
            if threading.get_ident() == here and self._done.get(id(part), part) is not part:
                raise ValueError(f"the forward pass runs {type(part).__name__} of the module itself: {_BY_ATTRIBUTES}")

        with register_module_forward_pre_hook(refuse), _OwnParams(paths):
            yield

    def check(self) -> None:
        """Raises a ValueError if a path was given that the module does not have."""
        if unknown := self._given.keys() - self._places.keys():
            raise ValueError(f"the module has no parameter or buffer {sorted(unknown)}; it has {list(self._places)}")

    def after(self) -> dict[str, Tensor]:
        """Path -> what a copy has there now."""
        return {path: held[name] for path, (held, name) in self._places.items()}

    def write_back(self) -> None:
        """Write the plain attributes that a call has assigned, such as kept losses, to the modules."""
        for own, before, copy in self._assigning:
            now = copy.__dict__
            if len(now) == len(before) and not any(map(operator.is_not, now.values(), before.values())):
                continue
            for name, value in now.items():
                if before.get(name, self) is not value and name != "training" and not _is_wrapped(value):
                    own[name] = value


def _is_wrapped(value: Any) -> bool:
    """Whether a value is of a transform of torch.func, at whose end it has no meaning."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def functional(module: nn.Module) -> tuple[Apply, dict[str, Tensor], dict[str, Tensor]]:
    """A module as `(apply, params, buffers)`.

    Args:
        module: Any module. Training does not change its tensors, but calls follow its mode and attributes; see `Apply`.

    Returns:
        `apply`, an `Apply`, called as `apply(params, buffers, *args, **kwargs)`; `params`, path -> tensor, copies of
        the trained values: the parameters that require a gradient, in the order of registration, a shared one once,
        under its first path, which is that inside torch.compile, DistributedDataParallel and DataParallel; and
        `buffers`, path -> tensor, copies of the untrained values: the module's frozen parameters and its buffers.

    Raises:
        TypeError: `module` is no nn.Module, or holds one of torch.jit.

    Same as: torch.func.functional_call over the module's own tensors.

    >>> apply, params, buffers = fjoin.functional(torch.nn.Linear(2, 1))
    >>> list(params), buffers
    (['weight', 'bias'], {})
    >>> apply(params, buffers, torch.ones(3, 2)).shape
    torch.Size([3, 1])
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"functional takes an nn.Module, got {module!r}")
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise TypeError("functional cannot replace parameters of torch.jit; pass the module before it is scripted")
    # Copies, since optimizers of torch and the module's own calls write into its tensors in place.
    values = {path: t.detach().clone() for path, t in (*module.named_parameters(), *module.named_buffers())}
    params = {path: values.pop(path) for path, p in module.named_parameters() if p.requires_grad}
    apply, names = Apply(module, frozenset(params)), inner_names(module, [*params, *values])
    return apply, *({names[path]: t for path, t in tree.items()} for tree in (params, values))  # type: ignore[return-value]


def _wrapped_part(module: nn.Module) -> str:
    """The name of the child for which a module of torch.compile or of data parallelism stands, or ""."""
    if "_orig_mod" in module._modules:
        return "_orig_mod"
    return "module" if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)) else ""


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside those that only stand for it."""
    while part := _wrapped_part(module):
        module = getattr(module, part)
    return module


def inner_names(module: nn.Module, paths: Iterable[str], more: str = "") -> dict[str, str]:
    """Paths in a module -> the same without the parts that name what a wrapper stands for.

    Args:
        more: The name of such a part besides those of torch.compile and of data parallelism.
    """
    modules = module.named_modules(remove_duplicate=False)
    found = ((path, _wrapped_part(part) or more * (more in part._modules)) for path, part in modules)
    hidden = {f"{path}.{part}".removeprefix(".") for path, part in found if part}
    if not hidden:
        return {path: path for path in paths}
    steps = {path: list(itertools.accumulate(path.split("."), lambda a, b: f"{a}.{b}")) for path in paths}
    return {path: ".".join(at.rpartition(".")[2] for at in way if at not in hidden) for path, way in steps.items()}


def value_and_grad(loss_fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., tuple[Any, Any]]:
    """A function that returns the loss and its gradient by the first argument.

    It is jax.value_and_grad in plain autograd: faster than torch.func.grad_and_value, not to be used within torch.func.

    Args:
        loss_fn: `(params, *args, **kwargs) -> loss`, 0-d; or `-> (loss, aux)`. `params` is a pytree of tensors.
        has_aux: Whether it returns more than the loss.

    Returns:
        `(params, *args, **kwargs) -> (loss, grads)`, or `-> ((loss, aux), grads)`. `grads` is like `params`, zeros
        where the loss does not depend on a leaf; the loss and `aux` are without graph. No `.grad` is written.

    Raises:
        TypeError: raised by the call: a leaf that is no tensor of floating point or complex numbers; `loss_fn` returns
            no tensor, or no pair with `has_aux`.
        ValueError: raised by the call: the loss depends on parameters of a module that `functional` has taken.
        RuntimeError: raised by torch: the loss is not 0-d, or depends on no leaf.

    Same as: jax.value_and_grad.

    >>> import fjoin
    >>> loss, grads = fjoin.value_and_grad(lambda p, x: (p["w"] * x).sum())({"w": torch.ones(2)}, torch.tensor([3.0, 4.0]))
    >>> loss, grads
    (tensor(7.), {'w': tensor([3., 4.])})
    """
    if not callable(loss_fn):
        raise TypeError(f"value_and_grad: loss_fn must be a function, got {loss_fn!r}")
    checks.flag("has_aux", has_aux)

    known = False  # whether a loss has been searched for parameters of a module

    @functools.wraps(loss_fn, updated=())
    def of(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        leaves, structure = optree.tree_flatten(params)
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
                got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
                name = trees.path_string(optree.treespec_paths(structure)[i])
                raise TypeError(f"value_and_grad: params[{name!r}] is {got}, expected a floating point tensor")
        with torch.enable_grad():
            own = [leaf.detach().requires_grad_() for leaf in leaves]
            out = loss_fn(optree.tree_unflatten(structure, own), *args, **kwargs)
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"value_and_grad: with has_aux loss_fn must return (loss, aux), got {type(out).__name__}")
        loss = out[0] if has_aux else out
        if not isinstance(loss, Tensor):
            raise TypeError(f"value_and_grad: loss_fn must return a tensor, got {type(loss).__name__}")
        nonlocal known
        if not known:
            refuse_module_params(loss)
            known = True
        grads = torch.autograd.grad(loss, own, allow_unused=True, materialize_grads=True) if leaves else ()
        value: Any = loss.detach()
        if has_aux:
            value = value, optree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, out[1])
        return value, optree.tree_unflatten(structure, grads)

    return of
