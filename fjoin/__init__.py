"""Distributed data-parallel training as pure functions, and a small shell that runs them.

train_step  TrainState  Metrics     the step, on uneven inputs
show  trace                         its numbers while it trains, and a timeline of all ranks
join                                uneven inputs in a custom loop
Shuffled                            a batch sampler whose position is a step, on any number of ranks
evaluate                            metrics over uneven shards
Join  Joinable  JoinHook            torch's generic Join, for any code that communicates
as_joinable                         a pure join hook for either Join
functional  load_into               a module as a pure function, and values back into a module
value_and_grad                      the loss and its gradient, for a loop of your own
ddp.register                        hooks and pipelines in DistributedDataParallel
ddp.register_ddp_comm_hook          torch's communication hooks, by name
fsdp.register                       pipelines in torch's fully_shard
auto_quantize                       torch's collectives, encoded
Optimizer                           our optimizers in the shape of torch.optim's
PeriodicModelAverager  HierarchicalModelAverager  PostLocalSGDOptimizer     torch's local SGD
ZeroRedundancyOptimizer             torch's ZeRO
checkpoint_wrapper  offload_wrapper  apply_activation_checkpointing  CheckpointImpl     torch's activation checkpointing
Checkpoints  save  load             saves a run, and resumes it to the bit
elastic  Members                    training that survives ranks that die, and takes in new ones
mesh  bind                          ranks and their axes
testing                             the laws, to check custom transforms, optimizers and codecs
transforms                          the pure part: `from fjoin import transforms as tx`
"""

from torch.distributed.algorithms.join import Joinable as Joinable, JoinHook as JoinHook

from . import ddp as ddp, fsdp as fsdp, testing as testing, transforms as transforms
from ._auto_quantize import auto_quantize as auto_quantize
from ._checkpoint_wrapper import (
    CheckpointImpl as CheckpointImpl,
    apply_activation_checkpointing as apply_activation_checkpointing,
    checkpoint_wrapper as checkpoint_wrapper,
    offload_wrapper as offload_wrapper,
)
from ._errors import (
    CheckpointError as CheckpointError,
    CollectiveTimeout as CollectiveTimeout,
    DesyncError as DesyncError,
    DonatedState as DonatedState,
    EarlyTermination as EarlyTermination,
    FjoinError as FjoinError,
    JoinError as JoinError,
    NoBatch as NoBatch,
    NonFinite as NonFinite,
    PeerLost as PeerLost,
    TornState as TornState,
    TransportError as TransportError,
)
from ._functional import functional as functional, value_and_grad as value_and_grad
from ._version import __version__ as __version__
from .checkpoint import Checkpoints as Checkpoints, load as load, save as save
from .generations import Members as Members, elastic as elastic
from .groups import Mesh as Mesh, bind as bind, mesh as mesh
from .loading import Shuffled as Shuffled
from .optim import (
    HierarchicalModelAverager as HierarchicalModelAverager,
    Optimizer as Optimizer,
    PeriodicModelAverager as PeriodicModelAverager,
    PostLocalSGDOptimizer as PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer as ZeroRedundancyOptimizer,
)
from .training import (
    NO_BATCH as NO_BATCH,
    Metrics as Metrics,
    TrainState as TrainState,
    TrainStep as TrainStep,
    load_into as load_into,
    show as show,
    trace as trace,
    train_step as train_step,
)
from .uneven import Join as Join, as_joinable as as_joinable, evaluate as evaluate, join as join
