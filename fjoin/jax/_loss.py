"""A loss of jax as a function of tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import optree
import torch
from torch import Tensor

from ..transforms.axes import axis_index, bound, bound_call
from ..transforms.base import checks, trees
from ._trees import Layout, adopt, flat, jax, nested, to_array, to_tensor

_WIDE = (torch.float64, torch.complex128)
_WHOLE = {torch.int64: torch.int32, torch.uint64: torch.uint32}


def arguments(args: tuple[Any, ...], wide: bool) -> tuple[list[Any], Any, bool]:
    """Arguments as tensors, arrays of jax and numbers of Python's, their structure, and whether jax must compute with
    64 bits.

    Args:
        wide: Whether it must do so in any case.

    Raises:
        TypeError: a leaf that jax cannot take, or that requires a gradient.
        ValueError: a 64-bit integer that does not fit 32 bits, in a computation with 32.
    """
    adopt(args)
    given: Any = args
    paths, found, structure = optree.tree_flatten_with_path(given)
    leaves: list[Any] = [_of_numpy(x) if isinstance(x, (np.ndarray, np.generic)) else x for x in found]
    wide = wide or any(isinstance(x, Tensor) and x.dtype in _WIDE for x in leaves)
    narrow = not wide and not jax.config.jax_enable_x64
    return [_checked(path, x, narrow) for path, x in zip(paths, leaves, strict=True)], structure, wide


def _of_numpy(x: Any) -> Any:
    """A tensor, of the same memory where torch can take it; text and objects as they are."""
    if x.dtype.kind not in "biufc":
        return x
    fits = isinstance(x, np.ndarray) and x.flags.c_contiguous and x.flags.writeable and x.dtype.isnative
    return torch.from_numpy(x if fits else np.array(x, x.dtype.newbyteorder("="), order="C"))


def _checked(path: tuple[Any, ...], x: Any, narrow: bool) -> Any:
    name = f"the argument {trees.path_string(path)!r}"
    if isinstance(x, Tensor):
        if x.requires_grad:
            raise TypeError(f"{name} requires a gradient, and a loss of jax has one by params only; detach it")
        if not narrow or x.dtype not in _WHOLE:
            return x
        out = x.to(_WHOLE[x.dtype])
        if not torch.equal(out.to(x.dtype), x):
            raise ValueError(
                f"{name} has whole numbers of {x.dtype} that do not fit {out.dtype}; set jax.config.update('jax_enable_x64', True)"
            )
        return out
    if isinstance(x, (jax.Array, bool, int, float, complex)):
        return x
    raise TypeError(f"{name} is a {type(x).__name__}; a function of jax takes tensors, arrays and numbers")


def loss(f: Callable[..., Any], *, buffers: bool = False, seed: int | None = None) -> Callable[..., Any]:
    """A function of jax as a `loss_fn`: jax compiles it with its gradient, and torch's tensors go in and out.

    Parameters go in by DLPack without a copy: large ones where their memory is aligned to 64 bytes, small ones as one
    array for each dtype. The call has ended before torch may write into them again. All gradients come at once, so no
    message overlaps with the backward pass. A batch of another shape is compiled anew, for which the other ranks wait.

    Args:
        f: `(params, *args) -> loss`, 0-d, or `-> (loss, aux)`: what `jax.value_and_grad` takes. Any jax: flax, equinox,
            by hand. `params` is a pytree of arrays. Classes that jax knows as nodes, such as equinox's modules, are
            rebuilt. It must not communicate, neither by jax nor by fjoin.
        buffers: Whether f is `(params, buffers, batch) -> (loss, aux, buffers)`, with nested dicts such as flax's
            `batch_stats`; see `flat`.
        seed: With a seed f also gets `key=`, a key of jax.random: in a train_step it is folded from the seed, the
            number of the call and the rank, so that a run that is resumed goes on with the same numbers; elsewhere the
            caller passes it.

    Returns:
        A function of tensors, differentiable once, by `params` only. Tensors of 64-bit integers in its arguments become
        32-bit ones where all their values fit; where a tensor is float64, jax computes with 64 bits. Under
        `torch.no_grad()` jax computes the value only.

    Raises:
        ImportError: by `import fjoin.jax`: jax is not installed.
        TypeError: `f` is no function; raised by the call: an argument that jax cannot take, or that requires a
            gradient.
        ValueError: raised by the call: a 64-bit integer that does not fit 32 bits, while jax has no 64-bit mode.
        RuntimeError: raised by the call: there is a seed but neither a train_step nor `key=`; raised by a second
            derivative.

    Same as: jax.value_and_grad.

    >>> import fjoin.jax
    >>> from fjoin import transforms as tx
    >>> loss_fn = fjoin.jax.loss(lambda params, x: ((params["w"] * x - 1.0) ** 2).mean())
    >>> step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)), weight=len)
    >>> state, metrics = step(step.init({"w": torch.tensor(0.0)}), torch.tensor([1.0, 2.0]))
    >>> state.params["w"], metrics.loss
    (tensor(0.3000), 1.0)
    """
    if not callable(f):
        raise TypeError(f"fjoin.jax.loss takes a function, got {f!r}")
    checks.flag("buffers", buffers)
    if seed is not None:
        checks.whole_number("seed", seed, 0, 2**32 - 1)  # of larger ones jax takes the last 32 bits

    @functools.lru_cache(maxsize=64)
    def compiled(form: _LossForm) -> _CompiledLoss:
        return _CompiledLoss(f, form, buffers)

    def of(params: Any, *args: Any, key: Any = None) -> Any:
        number = bound_call().number
        adopt(params)
        leaves, structure = optree.tree_flatten(params)
        _check_params(structure, leaves)
        if buffers:
            args = (nested(args[0]), *args[1:])
        wide = any(leaf.dtype is torch.float64 for leaf in leaves)
        values, args_structure, wide = arguments(args, wide)
        keyed: tuple[Any, ...] = ()
        if seed is not None:
            keyed = (key,) if key is not None else (_key(seed, number),)
        elif key is not None:
            raise TypeError("key= was given, but the loss was made without a seed: fjoin.jax.loss(f, seed=0)")
        forms = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        form = _LossForm(structure, forms, args_structure, wide, bool(keyed))
        run = compiled(form)
        given = [x for x in values if isinstance(x, Tensor)]
        behind, apply = _Behind(), cast("Any", _Value.apply)
        if torch.is_grad_enabled():
            value, *others = apply(run, values, keyed, behind, *leaves, *given)
        else:
            value, *others = run([*leaves, *given], values, keyed, behind, False)
        parts = run.parts(behind, others)
        return (value, *parts) if parts else value

    functools.update_wrapper(of, f, [name for name in functools.WRAPPER_ASSIGNMENTS if hasattr(f, name)], ())
    of.__signature__ = _signature(f, seed is not None)  # type: ignore[attr-defined]
    return of


def _signature(f: Callable[..., Any], keyed: bool) -> inspect.Signature:
    """How the loss is called: as `f`, where the key need not be given."""
    signature = inspect.signature(f)
    if not keyed:
        return signature
    if "key" not in signature.parameters:
        raise TypeError(f"with a seed the loss is called with key=..., but {f!r} takes {signature}")
    return signature.replace(parameters=[p for name, p in signature.parameters.items() if name != "key"])


def _key(seed: int, number: Any) -> Any:
    """The key of this rank in this call of a train_step."""
    if number is None:
        raise RuntimeError(
            "the key of a loss with a seed is known in a train_step; in a loop of your own pass it: loss_fn(params, batch, key=...)"
        )
    rank = int(axis_index(tuple(bound()))) if bound() else 0
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), rank)


def _check_params(structure: Any, leaves: Sequence[Any]) -> None:
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            got = f"a tensor of {leaf.dtype}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            name = trees.path_string(optree.treespec_paths(structure)[i])
            raise TypeError(
                f"params[{name!r}] must be a tensor of floating point numbers, got {got}; pass state.params, or "
                f"fjoin.jax.to_torch(params), without leaves that are not trained"
            )


class _LossForm(NamedTuple):
    """What a compiled function depends on, besides shapes of the arguments."""

    params: Any
    leaves: tuple[tuple[torch.Size, torch.dtype], ...]
    args: Any
    wide: bool  # whether jax computes with 64 bits
    keyed: bool


class _Behind:
    """The structure of what one call of f has returned after the loss: batches of another shape may have another one."""

    structure: Any


class _CompiledLoss:
    """The loss and its gradient, compiled for parameters of one form."""

    def __init__(self, f: Callable[..., Any], form: _LossForm, buffers: bool) -> None:
        self._form, self.layout = form, Layout(form.leaves)

        def value(flats: Any, args: Any, *key: Any) -> tuple[Any, Any]:
            params = optree.tree_unflatten(form.params, self.layout.cut(flats))
            given = optree.tree_unflatten(form.args, args)
            out = f(params, *given, **({"key": key[0]} if form.keyed else {}))
            found, *rest = out if isinstance(out, tuple) else (out,)
            if buffers:
                if len(rest) != 2:
                    raise TypeError(f"a loss with buffers must return (loss, aux, buffers), got {1 + len(rest)} values")
                if jax.tree.structure(rest[1]) != jax.tree.structure(given[0]):
                    raise ValueError(
                        f"the loss returned buffers {jax.tree.structure(rest[1])}, expected {jax.tree.structure(given[0])}"
                    )
            return found, tuple(rest)

        self._buffers = buffers
        self._value, self._value_and_grad = jax.jit(value), jax.jit(jax.value_and_grad(value, has_aux=True))

    def __call__(
        self,
        tensors: Sequence[Tensor],
        values: Sequence[Any],
        key: tuple[Any, ...],
        behind: _Behind,
        grads: bool = True,
    ) -> tuple[Tensor, ...]:
        """(loss, the leaves behind it, the gradients as flat tensors).

        Args:
            tensors: The parameters, then those of `values` that are tensors.
            behind: Gets the structure of the leaves.
            grads: Whether to compute gradients.
        """
        count = len(self.layout.places)
        params, given = tensors[:count], iter(tensors[count:])
        with jax.enable_x64(self._form.wide or jax.config.jax_enable_x64):
            flats = [to_array(flat) for flat in self.layout.join([p.detach() for p in params], torch.cat)]
            args = [to_array(next(given).detach()).reshape(x.shape) if isinstance(x, Tensor) else x for x in values]
            run = self._value_and_grad if grads else lambda *given: (self._value(*given), ())
            (found, aux), slopes = jax.block_until_ready(run(flats, args, *key))
            leaves, behind.structure = jax.tree.flatten(aux)
            return tuple(map(to_tensor, (found, *leaves, *slopes)))

    def parts(self, behind: _Behind, leaves: Sequence[Tensor]) -> list[Any]:
        """What f has returned after the loss, in tensors."""
        aux = list(jax.tree.unflatten(behind.structure, leaves[: behind.structure.num_leaves]))
        if self._buffers:
            aux[1] = flat(aux[1])
        return aux


class _Value(torch.autograd.Function):
    """The loss, with the gradients that jax has computed with it."""

    @staticmethod
    def forward(
        run: _CompiledLoss, values: Sequence[Any], key: tuple[Any, ...], behind: _Behind, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        return run(tensors, values, key, behind)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.run, count = inputs[0], len(output) - len(inputs[0].layout.sizes)
        ctx.others, ctx.aux = len(inputs) - 4 - len(ctx.run.layout.places), count - 1
        # The gradients have a gradient of their own, whose computation raises: without it a second derivative were 0.
        ctx.save_for_backward(*output[count:])
        ctx.mark_non_differentiable(*output[1:count])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, start: Any, *others: Any) -> Any:
        if any(x is not None for x in others[ctx.aux :]):
            raise RuntimeError("a loss of jax is differentiable once: its gradient has no gradient")
        flats, layout = ctx.saved_tensors, ctx.run.layout
        grads = [None] * len(layout.places) if start is None else layout.cut([flat * start for flat in flats])
        return None, None, None, None, *grads, *(None,) * ctx.others
