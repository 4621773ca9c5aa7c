"""torch's ZeroRedundancyOptimizer: each rank steps its own pieces of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..groups import mesh_over
from ..transforms.layout import Slice
from ._optimizer import Optimizer, step_as
from ._param_groups import Hyperparameters, without_params
from ._zero_shard import Shard, WholeLeaves, cut_group, gather, give, optimizer_of, torchs_state
from ._zero_state import NoState, Owned, gather_states, load_slices, whole_states


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer whose state and work are shared out among the ranks.

    Each rank steps its own pieces of the parameters, with the gradients that DistributedDataParallel has averaged, and
    the ranks gather the parameters. Elementwise optimizers are cut at any element, so the memory is 1 / ranks. Others,
    such as Muon, and classes that fjoin does not know, have one owner per parameter.

    - `step` sends half the bytes of an all-reduce of the parameters, beside the all-reduce of the module. With
      `overlap_with_ddp=True` and `fjoin.ddp.hook_with_zero_step` the module sends pieces instead, and the sum is that
      of one all-reduce.
    - `param_groups` holds whole parameters, and hyperparameters, which schedulers may change.
    - `state_dict` is whole, in torch's form, on the rank given to `consolidate_state_dict`, for any number of ranks.
    - In a `fjoin.Join` with its module, ranks without input step their pieces with the gradients of the others. torch's
      Join discards these gradients, so it raises an error.
    - It works with torch.amp.GradScaler, unless `overlap_with_ddp`.

    Args:
        params: As in torch.optim: tensors, or groups of them.
        optimizer_class: A class of torch.optim, or a function of fjoin.transforms that makes an optimizer, such as
            `tx.lion`.
        process_group: The ranks; by default all.
        parameters_as_bucket_view: Whether to make the parameters views of the buckets in which they are gathered, which
            saves copies. Nothing else may then have replaced or replace `parameter.data`.
        overlap_with_ddp: The step is taken by `fjoin.ddp.hook_with_zero_step`, in the backward pass, from the first one
            on. States are loaded and consolidated once it is registered.
        defaults: The arguments of `optimizer_class`.

    Raises:
        TypeError: `optimizer_class` makes no optimizer; no tensors; sparse parameters; at a step: sparse gradients.
        ValueError: no parameters; arguments that `optimizer_class` refuses.
        RuntimeError: `state_dict` on a rank without the consolidated state; `state[parameter]`.

    Same as: torch.distributed.optim.ZeroRedundancyOptimizer, which owns whole parameters and broadcasts each.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> zero = fjoin.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.1)
    >>> ddp(torch.ones(3, 2)).sum().backward()
    >>> zero.step()
    >>> zero.consolidate_state_dict()
    >>> zero.state_dict()["state"][0]["exp_avg"].shape
    torch.Size([1, 2])
    >>> torch.distributed.destroy_process_group()
    """

    world_size: int
    rank: int
    part: Any
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        optimizer_class: Any,
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        self.process_group: Any = dist.group.WORLD if process_group is None else process_group
        if self.process_group is None:
            raise ValueError("a ZeroRedundancyOptimizer needs torch.distributed.init_process_group first")
        self._mesh = mesh_over(self.process_group)
        self.world_size, self.rank = self._mesh.size, self._mesh.rank
        self.part, hyperparameters = optimizer_of(optimizer_class, defaults)
        self.hyper: Hyperparameters = Hyperparameters(self.part)
        self._class, self._as_views = optimizer_class, parameters_as_bucket_view
        self.overlap_with_ddp = overlap_with_ddp
        self._shards: list[Shard] = []
        self._local: torch.optim.Optimizer | None = None  # on this rank's slices
        self._whole: dict[int, Any] | None = None
        self.run: Any = None  # the states of a module's hook, which steps; see `hook_with_zero_step`
        super().__init__(params, hyperparameters)
        self.state: Any = NoState()
        self._shards, groups = map(list, zip(*map(self._cut, self.param_groups), strict=True))
        if not self.overlap_with_ddp:
            known = not isinstance(self.part, WholeLeaves)
            self._local = Optimizer(groups, self.part) if known else optimizer_class(groups, **defaults)

    def _cut(self, group: dict[str, Any]) -> tuple[Shard, dict[str, Any]]:
        """The pieces of the parameters of a group, and the group of this rank's pieces."""
        self.hyper.check(group)
        shard = cut_group(group["params"], self.part, self.world_size, self.rank, self._as_views)
        # On all ranks, since an optimizer may keep values in its groups, such as a count.
        return shard, {**without_params(group), "params": [one for one in shard.slices.values() if one.numel()]}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch's method. It gets pieces of its own; the other pieces do not move."""
        super().add_param_group(param_group)
        if not self._shards:  # while the constructor adds the first groups
            return
        try:
            if self._local is None:
                raise RuntimeError("the parameters of a module that steps them in its backward pass are fixed")
            shard, own = self._cut(self.param_groups[-1])
            self._local.add_param_group(own)
        except Exception:
            self.param_groups.pop()
            raise
        self._shards.append(shard)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:  # type: ignore[override]
        """Step this rank's pieces, and gather the parameters; returns the result of `closure`, which is called first.

        Further arguments are handed to the optimizer of the pieces. With `overlap_with_ddp` the backward pass has
        stepped already.

        Raises:
            ValueError: a closure, for a class that may call it more than once.
        """
        if closure is not None and isinstance(self.part, WholeLeaves):
            raise ValueError(f"{self._class.__name__} may call its closure again; compute gradients, then call step()")
        loss = None if closure is None else torch.enable_grad()(closure)()
        if self._local is None:
            self._hooked()
            if getattr(self, "grad_scale", None) is not None:
                raise RuntimeError(
                    "the hook has stepped with gradients of a scaled loss; register tx.dynamic_loss_scale(tx.zero(...)) instead"
                )
            return loss
        give(self._shards)
        pairs = list(zip(self._local.param_groups, self.param_groups, strict=True))
        for mine, group in pairs:
            mine.update(without_params(group))
        step_as(self, self._local, **arguments)
        for mine, group in pairs:  # values that the optimizer keeps there
            group.update(without_params(mine))
        gather(self._shards, self._mesh.axes["data"])
        return loss

    def _hooked(self) -> Any:
        if self.run is None:
            raise RuntimeError(
                "overlap_with_ddp=True, but no hook steps: first call ddp.register_comm_hook(None, hook_with_zero_step(hook, ddp, zero))"
            )
        return self.run

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Called by torch's Join."""
        raise TypeError("a ZeroRedundancyOptimizer cannot be in a Join of torch; use fjoin.Join([ddp, zero])")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a ZeroRedundancyOptimizer has no copies and pickles; use consolidate_state_dict, state_dict")

    def slices(self) -> dict[int, Slice] | None:
        """By the number of a parameter; None if a module's hook or an optimizer that is not known steps."""
        if self._local is None or isinstance(self.part, WholeLeaves):
            return None
        return dict(enumerate(shard.pieces.slice_of(path) for shard in self._shards for path in shard.params))

    def owned(self) -> Iterator[Owned]:
        """This rank's part of the state."""
        every = ((shard, *one) for shard in self._shards for one in shard.params.items())
        for number, (shard, path, p) in enumerate(every):
            start, stop = shard.pieces.slices[path]
            if self._local is None:
                state, (start, stop) = self._hooked().state_of(p)
            else:
                state = self._local.state.get(shard.slices[path], {})
            state = torchs_state(self._class, state)
            if not p.dim():  # its slice is a vector
                state = {n: v.reshape(()) if isinstance(v, Tensor) and v.numel() == 1 else v for n, v in state.items()}
            if state and start < stop:
                yield Owned(number, start, stop, state, self.part.elementwise)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on one rank, on which `state_dict` can then be called; all ranks must call this.

        Args:
            to: The rank, in the process group.
        """
        shapes = [p.shape for group in self.param_groups for p in group["params"]]
        device = self.param_groups[0]["params"][0].device
        self._whole = gather_states(self._mesh, to, list(self.owned()), shapes, device)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The whole state in torch's form, as of the last `consolidate_state_dict`, on the rank given to that."""
        if self._whole is None:
            raise RuntimeError(
                f"the state is not consolidated on rank {self.rank}; call consolidate_state_dict(to={self.rank}) on all ranks first"
            )
        return {**super().state_dict(), "state": dict(self._whole)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Load a whole state, of any number of ranks; all ranks must be given it.

        Raises:
            ValueError: other groups, or states of another optimizer or shape; nothing is loaded.
        """
        groups, states = whole_states(self.hyper, self._class, self.param_groups, state_dict)
        if self._local is None:
            self._hooked().load_states(states)
        else:
            load_slices(self._local, self._shards, groups, iter(states))
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update(loaded)
        self._whole = None
