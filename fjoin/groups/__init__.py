"""Ranks: meshes of named axes over process groups, their messages, their failures.

Files, from the ground up:
_traffic       what a rank sends over the axes, and how long its host waits
_message       messages under way, whose waits look for failures; `poll`, the wait for what cannot wait itself
_failures      a rank that raised says so in the store; one that was killed is found by its process
_launch        the place of this process among those that a launcher has started
_meetings      values that differ in size, exchanged in the store; ranks at different places are a DesyncError there
_mesh          `Mesh`, and the `Communicator` that the shell uses
_axis          an axis over a process group
_host_axis     an axis in shared memory
_teardown      the end of process groups
_group_mesh    a mesh over process groups: what it does when a message fails
_connect       how ranks meet and choose their transport
_make_mesh     `mesh`, meshes over the user's groups, and `bind`
"""

from ..shared_memory import host_name as host_name
from ._axis import GroupAxis as GroupAxis, keep_freed as keep_freed
from ._connect import linked_mesh as linked_mesh
from ._failures import (
    Processes as Processes,
    Store as Store,
    is_backend_error as is_backend_error,
    raise_from as raise_from,
)
from ._make_mesh import (
    bind as bind,
    connect_generation as connect_generation,
    mesh as mesh,
    mesh_or_world as mesh_or_world,
    mesh_over as mesh_over,
    world_size as world_size,
)
from ._mesh import Communicator as Communicator, Mesh as Mesh, check_mesh as check_mesh
from ._message import StepEnd as StepEnd, plain as plain, poll as poll
from ._traffic import NO_SPAN as NO_SPAN, TIMELINES as TIMELINES, Sent as Sent, Span as Span, Traffic as Traffic
