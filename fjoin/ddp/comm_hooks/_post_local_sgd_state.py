"""torch's PostLocalSGDState, as data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ...groups._mesh import Mesh
from ...groups._nested_mesh import nested_mesh, world_size
from ...transforms._check import flag, whole_number


@dataclass(frozen=True)
class PostLocalSGDState:
    """The settings of `post_localSGD_hook` under torch's names, and the mesh of their process groups.

    Args:
        process_group: All ranks; by default those of the default process group.
        subgroup: This rank's subgroup, of consecutive ranks of `process_group`; by default the ranks of this host, whose
            number torchrun sets in LOCAL_WORLD_SIZE.
        start_localSGD_iter: The number of passes with the mean over all ranks.
        post_local_gradient_allreduce: Whether gradients are averaged over the subgroup afterwards.

    Raises:
        ValueError: `start_localSGD_iter` is no whole number, or negative.
        TypeError: another argument is none of these.

    Same as: torch's PostLocalSGDState. It counts no passes: `handle.step` does.

    >>> state = fjoin.ddp.PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=100)
    >>> fjoin.ddp.post_localSGD_hook(state)  # fjoin.ddp.register(model, post_localSGD_hook(state), state.mesh())
    switch_after(100, mean(('node', 'local'), over='world'), mean('local', over='world'))
    """

    process_group: Any
    subgroup: Any
    start_localSGD_iter: int
    post_local_gradient_allreduce: bool = True

    def __post_init__(self) -> None:
        whole_number("start_localSGD_iter", self.start_localSGD_iter, 0)
        flag("post_local_gradient_allreduce", self.post_local_gradient_allreduce)
        for name, group in (("process_group", self.process_group), ("subgroup", self.subgroup)):
            if group is not None and not isinstance(group, dist.ProcessGroup):
                raise TypeError(f"{name} must be a process group of torch.distributed, or None, got {group!r}")

    def mesh(self) -> Mesh:
        """The ranks of `process_group` in the axes "node" and "local", for `fjoin.ddp.register`.

        All ranks of `process_group` must call it.

        Raises:
            ValueError: the subgroups are not of consecutive ranks and of one size; `subgroup` is None, and
                LOCAL_WORLD_SIZE is not set.
        """
        ranks = world_size() if self.process_group is None else self.process_group.size()
        local = self._local(ranks)
        if ranks % local:
            raise ValueError(f"subgroups of {local} ranks do not divide the {ranks} ranks of process_group")
        return nested_mesh({"node": ranks // local, "local": local}, self.process_group)

    def _local(self, ranks: int) -> int:
        """The number of ranks in a subgroup."""
        if self.subgroup is None:
            known = os.environ.get("LOCAL_WORLD_SIZE", "1" if ranks == 1 else "")
            if not known.isdecimal() or int(known) == 0:
                raise ValueError(
                    f"subgroup is None, which stands for the ranks of a host, but LOCAL_WORLD_SIZE is {known!r}; start the "
                    f"program with torchrun, or pass the subgroup: torch.distributed.new_subgroups(group_size=ranks of a host)[0]"
                )
            return int(known)
        of_all = dist.get_process_group_ranks(dist.group.WORLD if self.process_group is None else self.process_group)
        members = dist.get_process_group_ranks(self.subgroup)
        here = of_all.index(dist.get_rank()) // len(members) * len(members)
        if of_all[here : here + len(members)] != members:
            raise ValueError(
                f"subgroup must be one of equal groups of consecutive ranks of {of_all}, got {members}; use "
                f"torch.distributed.new_subgroups, or pass fjoin.ddp.register a fjoin.mesh"
            )
        return len(members)
