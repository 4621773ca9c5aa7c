"""An optimizer of ours in the shape of torch.optim.Optimizer, for code that expects one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from .transforms import _base
from .transforms._tree import check_dense, fields, with_fields
from .transforms.optimizers._inject import number_arguments, remade
from .transforms.optimizers._wrap import step_in_place


class Optimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer that steps with one of ours, in place, by one kernel for all parameters of a kind.

    Its hyperparameters that are floats stand in `param_groups`, where groups may have their own, and where learning-rate
    schedulers change them. Its state is in `state`, `state_dict` and `load_state_dict`, by names such as "exp_avg". A
    parameter without gradient is left alone, as by torch. It works with torch.amp.GradScaler.

    Args:
        params: What torch.optim takes: tensors, groups of them, or `model.named_parameters()`, whose names are the paths of
            a `partition`.
        optimizer: An `Optimizer` of fjoin.transforms.

    Raises:
        TypeError: `optimizer` is none; at a step: a sparse gradient.
        ValueError: a `partition` without names; parameters that the optimizer cannot serve; at a step: hyperparameters
            out of their range.

    Same as: the classes of torch.optim.

    >>> from fjoin import transforms as tx
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = fjoin.Optimizer(model.parameters(), tx.adamw(1e-3))
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    >>> model(torch.ones(3, 2)).sum().backward()
    >>> optimizer.step()
    >>> scheduler.step()
    >>> optimizer.param_groups[0]["lr"]
    0.0005
    """

    _step_supports_amp_scaling = True

    def __init__(self, params: Any, optimizer: _base.Optimizer) -> None:
        if not isinstance(optimizer, _base.Optimizer):
            raise TypeError(
                f"fjoin.Optimizer takes an Optimizer of fjoin.transforms, such as adamw(), got {optimizer!r}"
            )
        self._optimizer = optimizer
        self._states: dict[Tensor, Any] = {}
        self._made: dict[Any, _base.Optimizer] = {}  # with the hyperparameters of the last steps
        hyperparameters = {} if optimizer.select else number_arguments(optimizer)
        self._names = tuple(hyperparameters)
        super().__init__(params, hyperparameters)
        if optimizer.check:
            optimizer.check(self._by_path())

    def _by_path(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for group in self.param_groups:
            if self._optimizer.select and "param_names" not in group:
                raise ValueError(
                    f"{self._optimizer!r} differs by path, so the parameters need names: pass model.named_parameters()"
                )
            names = group.get("param_names") or [str(len(found) + i) for i in range(len(group["params"]))]
            found.update(zip(names, group["params"], strict=True))
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of all parameters that have a gradient; what `closure` returned, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        guards = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}  # which a GradScaler sets
        sharing = Counter(id(state.step) for state in self._states.values())
        for group in self.param_groups:
            for part, params in self._kinds(group):
                by_age: dict[int, list[Tensor]] = {}
                for param in params:
                    by_age.setdefault(id(self._states[param].step), []).append(param)
                for age, some in by_age.items():
                    if len(some) < sharing[age]:
                        self._share(part, some, self._states[some[0]])
                    grads = [param.grad for param in some if param.grad is not None]
                    step_in_place(part, some, grads, [self._states[param] for param in some], **guards)
        return loss

    def _kinds(self, group: dict[str, Any]) -> list[tuple[_base.Optimizer, list[Tensor]]]:
        """The parameters of a group that have a gradient, by what one kernel can serve."""
        values = tuple((name, float(group[name])) for name in self._names)
        names = group.get("param_names") or [""] * len(group["params"])
        kinds: dict[Any, tuple[_base.Optimizer, list[Tensor]]] = {}
        fresh: dict[Any, Any] = {}
        for name, param in zip(names, group["params"], strict=True):
            if param.grad is None:
                continue
            check_dense(f"the gradient of a parameter of shape {tuple(param.shape)}", param.grad)
            part = self._with(self._optimizer.at(name), values)
            key = (id(part), param.dtype, param.device)
            kinds.setdefault(key, (part, []))[1].append(param)
            if param not in self._states:  # all that begin together are of one age
                self._states[param] = part.init_param(param)
                self._share(part, [param], fresh.setdefault(key, self._states[param]), copy=False)
        return list(kinds.values())

    def _with(self, part: _base.Optimizer, values: tuple[tuple[str, float], ...]) -> _base.Optimizer:
        """An optimizer with other hyperparameters, the same object for the same ones."""
        if not values:
            return part
        key = (id(part), values)
        if key not in self._made:
            if len(self._made) > 64:  # a schedule has gone on
                self._made.clear()
            self._made[key] = remade(part, dict(values))
        return self._made[key]

    def _share(self, part: _base.Optimizer, params: list[Tensor], like: Any, copy: bool = True) -> None:
        """Let the states of some parameters have the same 0-d fields, which count their age."""
        common = [f.clone() if c and copy else f if c else None for f, c in zip(fields(like), part.common, strict=True)]
        for param in params:
            own = fields(self._states[param])
            state = with_fields(self._states[param], [o if c is None else c for o, c in zip(own, common, strict=True)])
            self._states[param], self.state[param] = state, _named(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, for the same parameters in the same order.

        Raises:
            ValueError: other groups, or states of another optimizer.
        """
        super().load_state_dict(state_dict)
        order = [param for group in self.param_groups for param in group["params"]]
        self._states = {}
        alike: dict[Any, Any] = {}
        for path, (i, param) in zip(self._by_path(), enumerate(order), strict=True):
            given = state_dict["state"].get(i)
            if not given:
                continue
            part = self._optimizer.at(path)
            empty = part.init_param(param)
            names = _named(empty)
            if names.keys() != given.keys():
                raise ValueError(f"the state of parameter {i} has {sorted(given)}, but {part!r} keeps {sorted(names)}")
            for name, tensor in names.items():
                tensor.copy_(given[name])  # in its own dtype, which torch would make the parameter's
            self._states[param] = empty
            ages = tuple(f.item() for f, c in zip(fields(empty), part.common, strict=True) if c)
            self._share(part, [param], alike.setdefault((id(part), param.dtype, param.device, ages), empty), copy=False)


def _named(state: Any) -> dict[str, Tensor]:
    """The tensors of a state by name, those of states inside it too."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(state)
    return {
        ".".join(str(getattr(entry, "field", entry.entry)) for entry in accessor): leaf
        for accessor, leaf in zip(accessors, leaves, strict=True)
    }
