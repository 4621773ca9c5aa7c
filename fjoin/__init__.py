"""Distributed data-parallel training as pure functions, and a small shell that runs them.

train_step  TrainState  Metrics     the step, on uneven inputs
show  trace                         its numbers while it trains, and a timeline of all ranks
JoinedLoader                        what step.join returns: stop(), and its position as state
join  Loop                          uneven inputs in a custom loop
Shuffled                            a batch sampler whose position is a step, on any number of ranks
evaluate  Evaluation                metrics over uneven shards
Join  Joinable  JoinHook            torch's generic Join, for any code that communicates
as_joinable                         a pure join hook for either Join
functional  load_into               a module as a pure function, and values back into a module
value_and_grad                      the loss and its gradient, for a loop of your own
ddp.register                        hooks and pipelines in DistributedDataParallel
ddp.register_comm_hook_type         torch's communication hooks, by name
auto_quantize                       torch's collectives, encoded
Optimizer                           our optimizers in the shape of torch.optim's
PeriodicModelAverager  HierarchicalModelAverager  PostLocalSGDOptimizer     torch's local SGD
ZeroRedundancyOptimizer             torch's ZeRO
checkpoint_wrapper  offload_wrapper  apply_activation_checkpointing  CheckpointImpl     torch's activation checkpointing
Checkpoints  save  load             saves a run, and resumes it to the bit
mesh  bind                          ranks and their axes
testing                             the laws, to check custom transforms, optimizers and codecs
transforms                          the pure part: `from fjoin import transforms as tx`
"""

from . import ddp as ddp
from . import testing as testing
from . import transforms as transforms
from ._errors import CheckpointError as CheckpointError
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
from ._errors import TransportError as TransportError
from ._functional import Apply as Apply
from ._functional import functional as functional
from ._value_and_grad import value_and_grad as value_and_grad
from ._version import __version__ as __version__
from .checkpoint.runs._checkpoints import Checkpoints as Checkpoints
from .checkpoint.runs._functions import load as load
from .checkpoint.runs._functions import save as save
from .groups._bind import bind as bind
from .groups._make_mesh import mesh as mesh
from .groups._mesh import Mesh as Mesh
from .loading._shuffled import Shuffled as Shuffled
from .optim._averagers import HierarchicalModelAverager as HierarchicalModelAverager
from .optim._averagers import PeriodicModelAverager as PeriodicModelAverager
from .optim._optimizer import Optimizer as Optimizer
from .optim._post_local_sgd_optimizer import PostLocalSGDOptimizer as PostLocalSGDOptimizer
from .optim.zero._zero_redundancy_optimizer import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
from .quantization._auto_quantize import auto_quantize as auto_quantize
from .remat._apply import apply_activation_checkpointing as apply_activation_checkpointing
from .remat._checkpoint_wrapper import CheckpointImpl as CheckpointImpl
from .remat._checkpoint_wrapper import checkpoint_wrapper as checkpoint_wrapper
from .remat._checkpoint_wrapper import offload_wrapper as offload_wrapper
from .training._join_steps import NO_BATCH as NO_BATCH
from .training._join_steps import JoinedLoader as JoinedLoader
from .training._step import TrainStep as TrainStep
from .training._train_step import train_step as train_step
from .training.state._load_into import load_into as load_into
from .training.state._metrics import Metrics as Metrics
from .training.state._state import TrainState as TrainState
from .uneven._evaluate import Evaluation as Evaluation
from .uneven._evaluate import evaluate as evaluate
from .uneven._join import Join as Join
from .uneven._join_loader import join as join
from .uneven._joinable import Joinable as Joinable
from .uneven._joinable import JoinHook as JoinHook
from .uneven._joinable import PureJoinable as PureJoinable
from .uneven._joinable import as_joinable as as_joinable
from .uneven._loop import Loop as Loop
from .watch._show import Show as Show
from .watch._show import show as show
from .watch._trace import trace as trace
