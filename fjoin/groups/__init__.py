"""Ranks: meshes of named axes over process groups, their messages, their failures."""

from ._axis import GroupAxis as GroupAxis, keep_freed as keep_freed
from ._connect import linked_mesh as linked_mesh
from ._group_mesh import mesh_from_group as mesh_from_group
from ._make_mesh import (
    bind as bind,
    mesh as mesh,
    mesh_or_world as mesh_or_world,
    nested_mesh as nested_mesh,
    world_mesh as world_mesh,
    world_size as world_size,
)
from ._mesh import Communicator as Communicator, Mesh as Mesh, check_mesh as check_mesh
from ._message import StepEnd as StepEnd, plain as plain
from ._traffic import TIMELINES as TIMELINES, Sent as Sent, Traffic as Traffic, is_watched as is_watched
