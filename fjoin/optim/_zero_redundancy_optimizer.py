"""torch's ZeroRedundancyOptimizer: each rank steps its own pieces of the parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.algorithms.join as torch_join
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from ..groups._group_mesh import mesh_from_group
from ..reducer._gather_pieces import gather_leaves
from ..transforms._tree import check_dense
from ..transforms.layout._pieces import cut
from ._grad_scaler import guarded, guards_of
from ._optimizer import Optimizer
from ._optimizer_class import WholeLeaves, optimizer_of, takes_closure, torchs_state
from ._param_groups import Hyperparameters, without_params
from ._whole_state import NoState, Owned, gather_states
from ._zero_join import Shard, ZeroHook, give, gradients, own_gradients
from ._zero_load import WholeState, on_device, packed_slices, whole_states


class ZeroRedundancyOptimizer(torch.optim.Optimizer, torch_join.Joinable):
    """A torch.optim.Optimizer whose state and work are shared out among the ranks.

    Each rank steps its own pieces of the parameters, with the gradients that DistributedDataParallel has averaged, and
    the ranks gather the parameters. Elementwise optimizers are cut at any element, so the memory is 1 / ranks. Others,
    such as Muon, and classes that fjoin does not know, have one owner per parameter.

    - `step` sends half the bytes of an all-reduce of the parameters, beside the all-reduce of the module. With
      `overlap_with_ddp=True` and `fjoin.ddp.hook_with_zero_step` the module sends pieces instead, so that the sum is
      that of one all-reduce.
    - `param_groups` holds whole parameters and the hyperparameters, which schedulers may change.
    - `state_dict` is whole, in torch's form, on the rank given to `consolidate_state_dict`, and loads into any number of
      ranks.
    - In a Join, torch's or ours, in any order with its module, ranks without input step their pieces with the
      gradients of the others.
    - It works with torch.amp.GradScaler, unless `overlap_with_ddp`.

    Args:
        params: As in torch.optim: tensors, or groups of them, on one device.
        optimizer_class: A class of torch.optim, or a function of fjoin.transforms that makes an optimizer, such as
            `tx.lion`.
        process_group: The ranks; by default all.
        parameters_as_bucket_view: Whether to make the parameters views of the buckets in which they are gathered, which
            saves copies. Nothing else may then have replaced or replace `parameter.data`.
        overlap_with_ddp: The step is taken by `fjoin.ddp.hook_with_zero_step`, in the backward pass, from the first one
            on.
        defaults: The arguments of `optimizer_class`.

    Raises:
        TypeError: `optimizer_class` makes no optimizer; no tensors; sparse parameters.
        ValueError: no parameters, or on several devices; arguments that `optimizer_class` refuses.
        RuntimeError: `state_dict` on a rank without the consolidated state; `state[parameter]`.

    Same as: torch.distributed.optim.ZeroRedundancyOptimizer, which owns whole parameters and broadcasts each.

    >>> from torch.nn.parallel import DistributedDataParallel
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> zero = fjoin.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.1)
    >>> ddp(torch.ones(3, 2)).sum().backward()
    >>> zero.step()
    >>> zero.consolidate_state_dict()
    >>> zero.state_dict()["state"][0]["exp_avg"].shape
    torch.Size([1, 2])
    >>> torch.distributed.destroy_process_group()
    """

    _step_supports_amp_scaling = True

    def __init__(
        self, params: Any, optimizer_class: Any, process_group: Any = None, parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False, **defaults: Any,
    ) -> None:  # fmt: skip
        self.process_group = dist.group.WORLD if process_group is None else process_group
        if self.process_group is None:
            raise ValueError("a ZeroRedundancyOptimizer needs torch.distributed.init_process_group first")
        self._mesh = mesh_from_group(self.process_group)
        self.world_size, self.rank = self._mesh.size, self._mesh.rank
        self.part, hyperparameters = optimizer_of(optimizer_class, defaults)
        self.hyper = Hyperparameters(self.part)
        self._class, self._arguments = optimizer_class, defaults
        self._as_views, self.overlap_with_ddp = parameters_as_bucket_view, overlap_with_ddp
        self._shards: list[Shard] = []
        self._local: torch.optim.Optimizer | None = None  # on this rank's slices
        self._whole: dict[int, Any] | None = None
        self._uneven: Any = None  # the mesh of a Join of torch
        self._watch: Any = None  # of the forward passes in a Join
        self._notified = False  # whether a Join has been notified of this iteration
        self._loaded: list[WholeState] = []  # states for the hook, which is not there yet
        self.run: Any = None  # of a module's hook, which steps; see `hook_with_zero_step`
        torch.optim.Optimizer.__init__(self, params, hyperparameters)
        torch_join.Joinable.__init__(self)
        self.state = NoState()  # type: ignore[assignment]
        devices = {p.device for group in self.param_groups for p in group["params"]}
        if len(devices) > 1:
            raise ValueError(
                f"ZeroRedundancyOptimizer: the parameters lie on {sorted(map(str, devices))}; expected one device"
            )
        groups = [self._add(group) for group in self.param_groups]
        if self.overlap_with_ddp:
            return
        if isinstance(self.part, WholeLeaves):
            self._local = self._class(groups, **self._arguments)
        else:
            self._local = Optimizer(groups, self.part)

    def _add(self, group: dict[str, Any]) -> dict[str, Any]:
        """Cut the parameters of a group, and return the group of this rank's pieces; the pieces of other groups stay."""
        self.hyper.check(group)
        params = {str(i): p for i, p in enumerate(group["params"])}
        for path, p in params.items():
            check_dense(f"parameter {path} of a group", p)
        pieces = cut(params, self.part, "data", self.world_size, self.rank)
        flats: list[Tensor | None] = []
        with torch.no_grad():
            for k, bucket in enumerate(pieces.buckets):
                flat = None
                # A module relies on the strides of its parameters.
                if self._as_views and all(params[path].is_contiguous() for path in bucket.paths):
                    flat = pieces.pack(k, {path: p.detach() for path, p in params.items()}).clone()
                    for path, view in pieces.leaves(k, flat).items():
                        params[path].data = view
                flats.append(flat)
            own = pieces.own({path: p.detach() for path, p in params.items()})
        slices = {path: piece.detach().requires_grad_(params[path].requires_grad) for path, piece in own.items()}
        self._shards.append(Shard(pieces, params, slices, flats))
        # On all ranks, since an optimizer may keep values in its groups, such as a count.
        return {**without_params(group), "params": [one for one in slices.values() if one.numel()]}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch's method. It gets pieces of its own; the other pieces do not move."""
        super().add_param_group(param_group)
        if self._shards:  # not while the constructor adds the first groups
            if self.overlap_with_ddp:
                self.param_groups.pop()
                raise RuntimeError("the parameters of a module that steps them in its backward pass are fixed")
            before = len(self._shards)
            try:
                group = self._add(self.param_groups[-1])
                if self._local is not None:
                    self._local.add_param_group(group)
            except Exception:
                self.param_groups.pop()
                del self._shards[before:]
                raise

    # -- a step -----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:  # type: ignore[override]
        """Step this rank's pieces, and gather the parameters; returns the result of `closure`.

        With `overlap_with_ddp` the backward pass has stepped already.
        """
        loss = None
        # A class of one's own calls it itself, such as one that takes the gradient at two points.
        local = (
            self._local
            if isinstance(self.part, WholeLeaves) and takes_closure(self._class) and not self._in_a_join()
            else None
        )
        if closure is not None and (local is None or self.overlap_with_ddp):
            with torch.enable_grad():
                loss = closure()
        if self.overlap_with_ddp:
            if self.run is None:
                raise RuntimeError(
                    "overlap_with_ddp=True, but no hook steps: call ddp.register_comm_hook(None, "
                    "fjoin.ddp.hook_with_zero_step(hook, ddp, zero)) first"
                )
            if getattr(self, "grad_scale", None) is not None:
                raise RuntimeError(
                    "the hook has stepped with gradients of a scaled loss; register tx.dynamic_loss_scale(tx.zero(...)) instead"
                )
            return loss
        self._notify()
        self._notified = False
        if self._in_a_join():
            self._step(self._uneven, gradients(self._uneven.axes["data"], self._shards, live=True), arguments)
        elif closure is None or local is None:
            self._step(self._mesh, own_gradients(self._shards), arguments)
        else:
            asked = closure

            def again() -> Any:
                with torch.enable_grad():
                    loss = asked()
                give(self._shards, own_gradients(self._shards))
                return loss

            loss = self._step(self._mesh, own_gradients(self._shards), {**arguments, "closure": again})
        return loss

    def _in_a_join(self) -> bool:
        return self._uneven is not None and bool(self._join_config.enable)

    def _step(self, mesh: Any, grads: list[dict[str, Tensor | None]], arguments: dict[str, Any]) -> Any:
        local, out = self._local, None
        give(self._shards, grads)
        if local is not None:
            pairs = list(zip(local.param_groups, self.param_groups, strict=True))
            for mine, group in pairs:
                mine.update(without_params(group))
            with guarded(local, guards_of(self)) as steps:
                if steps:
                    out = local.step(**arguments)
            for mine, group in pairs:  # what the optimizer keeps there
                group.update(without_params(mine))
        for shard in self._shards:
            for own in shard.slices.values():
                own.grad = None
            gather_leaves(shard.pieces, shard.slices, shard.params, mesh.axes["data"], shard.flats)
        return out

    def attach(self, run: Any) -> None:
        """Let a module's hook step, with the states that have been loaded."""
        self.run = run
        if self._loaded:
            run.load_states(self._loaded)
            self._loaded = []

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ZeroRedundancyOptimizer cannot be copied or pickled; use consolidate_state_dict and state_dict"
        )

    # -- in a Join of torch -----------------------------------------------------------------------

    @torch.no_grad()
    def shadow_step(self) -> None:
        """The step of a rank that is out of input."""
        self._step(self._uneven, gradients(self._uneven.axes["data"], self._shards, live=False), {})

    def _notify(self) -> None:
        """Notify a Join that this rank has input, once in an iteration."""
        if not self._notified:
            torch_join.Join.notify_join_context(self)
            self._notified = True

    def _before_forward(self, module: Any, args: Any) -> None:
        """Where this is a Join's first joinable: notify it before the messages of a module's forward pass."""
        if isinstance(module, DistributedDataParallel) and torch.is_grad_enabled() and self._join_config.enable:
            self._notify()

    def join_hook(self, **kwargs: Any) -> torch_join.JoinHook:
        """The hook of torch's Join: on a rank without input it steps with the gradients of the others.

        The first call makes a process group, so that the hook's messages are independent of the module's.
        """
        if self._uneven is None and self.run is None:
            # A second group: the module's messages and these are in no fixed order.
            ranks = dist.get_process_group_ranks(self.process_group)
            self._uneven = mesh_from_group(dist.new_group(ranks, use_local_synchronization=True))
        if self._watch is not None:  # of a Join that an exception has ended
            self._watch.remove()
        before_forward = weakref.WeakMethod(self._before_forward)
        self._watch = register_module_forward_pre_hook(
            lambda module, args: None if (own := before_forward()) is None else own(module, args)
        )
        return ZeroHook(self, self._watch)

    @property
    def join_device(self) -> torch.device:
        """The device of a Join's own messages."""
        return cast(torch.device, self.param_groups[0]["params"][0].device)

    @property
    def join_process_group(self) -> Any:
        """The process group."""
        return self.process_group

    # -- the state --------------------------------------------------------------------------------

    def _owned(self) -> Iterator[Owned]:
        """This rank's part of the state."""
        if self.rank == 0:  # of a state that the hook has not taken yet
            numbers = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
            for p, _, state in self._loaded:
                yield Owned(numbers[p], 0, p.numel(), torchs_state(self._class, state), False)
        first = 0
        for shard in self._shards:
            for number, (path, own) in enumerate(shard.slices.items()):
                if self.run is not None:
                    state, (start, stop) = self.run.state_of(shard.params[path])
                else:
                    state = {} if self._local is None or not own.numel() else dict(self._local.state.get(own, {}))
                    start, stop = shard.pieces.slices[path]
                state = torchs_state(self._class, state)
                if state and start < stop:
                    yield Owned(first + number, start, stop, state, self.part.elementwise)
            first += len(shard.slices)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on one rank, on which `state_dict` can then be called; all ranks must call this.

        Args:
            to: The rank, in the process group.
        """
        if not 0 <= to < self.world_size:
            raise ValueError(f"consolidate_state_dict: to must be a rank below {self.world_size}, got {to!r}")
        params = [p for group in self.param_groups for p in group["params"]]
        shapes = [p.shape for p in params]
        self._whole = gather_states(self._mesh.axes["data"], to, self._owned(), shapes, self.join_device)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The whole state in torch's form, as of the last `consolidate_state_dict`, on the rank given to that."""
        if self._whole is None:
            raise RuntimeError(
                f"the state is not consolidated on rank {self.rank}; call consolidate_state_dict(to={self.rank}) on all ranks first"
            )
        first, groups = 0, []
        for group in self.param_groups:
            count = len(group["params"])
            own = {name: value for name, value in group.items() if name != "params"}
            groups.append({**own, "params": list(range(first, first + count))})
            first += count
        return {"state": dict(self._whole), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Load a whole state, of any number of ranks; all ranks must be given it.

        Raises:
            ValueError: other groups, or states of another optimizer or shape; nothing is loaded.
        """
        groups, states = whole_states(self.hyper, self._class, self.param_groups, state_dict)
        if self._local is not None:
            packed = packed_slices(self._shards, groups, states)
            if isinstance(self._local, Optimizer):
                self._local.load_state_dict(packed)
            else:  # not by a method of its own, since this is no state that it has saved; torch's does so too
                torch.optim.Optimizer.load_state_dict(self._local, packed)
        elif self.run is not None:
            self.run.load_states(states)
        else:
            self._loaded = [(p, part, on_device(state, p.device)) for p, part, state in states if state]
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update(loaded)
        self._whole = None
