"""Distributed data-parallel training as pure functions, and the small shell that runs them.

train_step  TrainState  Metrics     the step, on uneven inputs
join  Loop                          uneven inputs in a loop of one's own
evaluate  Evaluation                metrics over uneven shards
Join  Joinable  JoinHook            torch's generic Join, for whatever communicates
as_joinable                         a pure join hook for either Join
functional                          a module as a pure function
ddp.register                        hooks and pipelines in DistributedDataParallel
ddp.register_comm_hook_type         torch's communication hooks, by name
auto_quantize                       torch's collectives, encoded
Optimizer                           ours in the shape of torch.optim's
as_step_param                       torch's own functional optimizers in pipelines
mesh  bind                          ranks and their axes
testing                             the laws, for transforms, optimizers and codecs of one's own
transforms                          the pure part: `from fjoin import transforms as tx`
"""

from . import ddp as ddp
from . import testing as testing
from . import transforms as transforms
from ._auto_quantize import auto_quantize as auto_quantize
from ._errors import CollectiveTimeout as CollectiveTimeout
from ._errors import DesyncError as DesyncError
from ._errors import DonatedState as DonatedState
from ._errors import EarlyTermination as EarlyTermination
from ._errors import FjoinError as FjoinError
from ._errors import JoinError as JoinError
from ._errors import NoBatch as NoBatch
from ._errors import NonFinite as NonFinite
from ._errors import PeerLost as PeerLost
from ._errors import TornState as TornState
from ._evaluate import Evaluation as Evaluation
from ._evaluate import evaluate as evaluate
from ._functional import Apply as Apply
from ._functional import functional as functional
from ._join import NO_BATCH as NO_BATCH
from ._join_context import Join as Join
from ._joinable import Joinable as Joinable
from ._joinable import JoinHook as JoinHook
from ._joinable import PureJoinable as PureJoinable
from ._joinable import as_joinable as as_joinable
from ._loop import Loop as Loop
from ._loop import join as join
from ._make_mesh import bind as bind
from ._make_mesh import mesh as mesh
from ._make_step import train_step as train_step
from ._mesh import Mesh as Mesh
from ._metrics import Metrics as Metrics
from ._optimizer import Optimizer as Optimizer
from ._state import TrainState as TrainState
from ._step import TrainStep as TrainStep
from ._torch_functional import TorchState as TorchState
from ._torch_functional import as_step_param as as_step_param
