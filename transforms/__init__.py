"""Pure transforms for distributed training: communication of gradients, optimizers, and parameter averaging.

kinds        Transform  Call  Optimizer  Pipeline  Schedule  Reduction  Period  Periodic  Switch  Windows  Changes
combine      chain  identity  stateless  masked  partition  fuse
when         switch_after  every  accumulate  skip_if_nonfinite  dynamic_loss_scale
clip         clip_by_global_norm  clip_by_value
agree        mean  sum_over  noop  average_buffers  broadcast_buffers
shard        scatter_mean  zero
local SGD    local_sgd  post_local_sgd  diloco  ema  ema_params  outer_step  average_parameters  average_every
             hierarchical_average  average_state
wire         cast  compress  quantized  quantized_mean  error_feedback  ef21  dgc  one_bit_adam  power_sgd
             batched_power_sgd  hierarchical_mean
codecs       Codec  Noise  bfloat16  bfp16  float16  float32  fp8  int8  uint8  int4  qsgd  sign  top_k
join, layers  JoinHook  broadcast_from_last  last_joiner  current_weight  current_call  sync_batch_norm  convert_sync_batchnorm
optimizers   sgd  adam  adamw  nadam  radam  adamax  adagrad  adadelta  adafactor  rmsprop  rprop  asgd  lion  lamb  muon  frozen
             mixed_precision  inject_hyperparameters  with_hyperparameters  as_functional_optim  register_functional_optim
schedules    linear  cosine  warmup_cosine  warmup  from_torch_scheduler
collectives  psum  pmean  pmax  pmin  pbroadcast  all_gather  psum_scatter  all_to_all  all_to_all_single  ppermute  axis_index  axis_size
run, optax   simulate  from_optax  to_optax; random: keys as values, with jax's bits
memory       remat  checkpoint_name  everything_saveable  nothing_saveable  dots_saveable  dots_with_no_batch_dims_saveable
             save_only_these_names  save_any_names_but_these  save_from_both_policies  offload_dot_with_no_batch_dims
             save_and_offload_only_these_names  saved_residuals  Residuals  Residual
look         tap  record_norm  explain  Explanation  fingerprint  to_json  factory
save         to_state_dict  from_state_dict  placements  Placement  PerRank  Merge
"""

if __name__ != "fjoin.transforms":
    raise ImportError(
        f"{__name__!r} is a second copy of fjoin.transforms; write `from fjoin import transforms as tx`, after `pip install -e .`"
    )

from . import random as random
from ._call_env import current_call as current_call
from ._call_env import current_weight as current_weight
from ._errors import CollectiveMismatch as CollectiveMismatch
from ._errors import DonatedState as DonatedState
from ._errors import UnboundAxis as UnboundAxis
from .axes._collectives import axis_index as axis_index
from .axes._collectives import axis_size as axis_size
from .axes._collectives import pbroadcast as pbroadcast
from .axes._collectives import pmax as pmax
from .axes._collectives import pmean as pmean
from .axes._collectives import pmin as pmin
from .axes._collectives import ppermute as ppermute
from .axes._collectives import psum as psum
from .axes._gather_scatter import all_gather as all_gather
from .axes._gather_scatter import all_to_all as all_to_all
from .axes._gather_scatter import psum_scatter as psum_scatter
from .axes._ragged import all_to_all_single as all_to_all_single
from .axes.simulator._simulate import simulate as simulate
from .codecs._blocks import fp8 as fp8
from .codecs._blocks import int4 as int4
from .codecs._blocks import int8 as int8
from .codecs._blocks import uint8 as uint8
from .codecs._codec import Codec as Codec
from .codecs._codec import bfloat16 as bfloat16
from .codecs._codec import bfp16 as bfp16
from .codecs._codec import float16 as float16
from .codecs._codec import float32 as float32
from .codecs._random_bits import Noise as Noise
from .codecs._signs import sign as sign
from .codecs._sparse import top_k as top_k
from .codecs._unbiased import qsgd as qsgd
from .combinators._chain import chain as chain
from .combinators._chain import identity as identity
from .combinators._chain import stateless as stateless
from .combinators._clip import clip_by_global_norm as clip_by_global_norm
from .combinators._clip import clip_by_value as clip_by_value
from .combinators._conditional import AccumulateState as AccumulateState
from .combinators._conditional import EveryState as EveryState
from .combinators._conditional import SwitchState as SwitchState
from .combinators._conditional import accumulate as accumulate
from .combinators._conditional import every as every
from .combinators._conditional import switch_after as switch_after
from .combinators._norms import record_norm as record_norm
from .combinators._optax import OptaxState as OptaxState
from .combinators._optax import from_optax as from_optax
from .combinators._partition import masked as masked
from .combinators._partition import partition as partition
from .combinators._tap import tap as tap
from .combinators._to_optax import to_optax as to_optax
from .feedback._dgc import DGCState as DGCState
from .feedback._dgc import dgc as dgc
from .feedback._ef21 import EF21State as EF21State
from .feedback._ef21 import ef21 as ef21
from .feedback._error_feedback import ErrorState as ErrorState
from .feedback._error_feedback import error_feedback as error_feedback
from .feedback._one_bit_adam import OneBitAdamState as OneBitAdamState
from .feedback._one_bit_adam import one_bit_adam as one_bit_adam
from .local_sgd._average import AverageState as AverageState
from .local_sgd._average import average_every as average_every
from .local_sgd._average import average_parameters as average_parameters
from .local_sgd._average import hierarchical_average as hierarchical_average
from .local_sgd._diloco import diloco as diloco
from .local_sgd._ema import EmaState as EmaState
from .local_sgd._ema import ema as ema
from .local_sgd._ema import ema_params as ema_params
from .local_sgd._local_sgd import local_sgd as local_sgd
from .local_sgd._local_sgd import post_local_sgd as post_local_sgd
from .local_sgd._outer import OuterState as OuterState
from .local_sgd._outer import outer_step as outer_step
from .local_sgd._state import average_state as average_state
from .optimizers._adadelta import AdadeltaState as AdadeltaState
from .optimizers._adadelta import adadelta as adadelta
from .optimizers._adafactor import AdafactorState as AdafactorState
from .optimizers._adafactor import adafactor as adafactor
from .optimizers._adagrad import AdagradState as AdagradState
from .optimizers._adagrad import adagrad as adagrad
from .optimizers._asgd import ASGDState as ASGDState
from .optimizers._asgd import asgd as asgd
from .optimizers._frozen import FrozenState as FrozenState
from .optimizers._frozen import frozen as frozen
from .optimizers._lion import LionState as LionState
from .optimizers._lion import lion as lion
from .optimizers._muon import MuonState as MuonState
from .optimizers._muon import muon as muon
from .optimizers._rmsprop import RMSpropState as RMSpropState
from .optimizers._rmsprop import rmsprop as rmsprop
from .optimizers._rprop import RpropState as RpropState
from .optimizers._rprop import rprop as rprop
from .optimizers._sgd import SGDState as SGDState
from .optimizers._sgd import sgd as sgd
from .optimizers.adam._adam import AdamState as AdamState
from .optimizers.adam._adam import adam as adam
from .optimizers.adam._adam import adamw as adamw
from .optimizers.adam._adamax import AdamaxState as AdamaxState
from .optimizers.adam._adamax import adamax as adamax
from .optimizers.adam._lamb import lamb as lamb
from .optimizers.adam._nadam import NAdamState as NAdamState
from .optimizers.adam._nadam import nadam as nadam
from .optimizers.adam._radam import RAdamState as RAdamState
from .optimizers.adam._radam import radam as radam
from .optimizers.wrappers._as_functional import as_functional_optim as as_functional_optim
from .optimizers.wrappers._as_functional import register_functional_optim as register_functional_optim
from .optimizers.wrappers._inject import InjectState as InjectState
from .optimizers.wrappers._inject import inject_hyperparameters as inject_hyperparameters
from .optimizers.wrappers._inject import with_hyperparameters as with_hyperparameters
from .optimizers.wrappers._mixed_precision import MixedState as MixedState
from .optimizers.wrappers._mixed_precision import mixed_precision as mixed_precision
from .pipelines._fuse import fuse as fuse
from .pipelines._loss_scale import LossScaleState as LossScaleState
from .pipelines._loss_scale import dynamic_loss_scale as dynamic_loss_scale
from .pipelines._pipeline import Pipeline as Pipeline
from .pipelines._placements import placements as placements
from .pipelines._skip_nonfinite import SkipState as SkipState
from .pipelines._skip_nonfinite import skip_if_nonfinite as skip_if_nonfinite
from .pipelines._tree_memory import PipelineState as PipelineState
from .pipelines._zero import zero as zero
from .pipelines.explain._explain import explain as explain
from .pipelines.explain._explanation import Explanation as Explanation
from .power_sgd._mean import PowerSGDState as PowerSGDState
from .power_sgd._power_sgd import batched_power_sgd as batched_power_sgd
from .power_sgd._power_sgd import power_sgd as power_sgd
from .reductions._compress import CompressState as CompressState
from .reductions._compress import cast as cast
from .reductions._compress import compress as compress
from .reductions._compress import quantized_mean as quantized_mean
from .reductions._hierarchical import hierarchical_mean as hierarchical_mean
from .reductions._mean import mean as mean
from .reductions._mean import noop as noop
from .reductions._mean import sum_over as sum_over
from .reductions._quantized_collectives import quantized as quantized
from .reductions._reduction import MeanState as MeanState
from .remat._remat import remat as remat
from .remat._residuals import Residual as Residual
from .remat._residuals import Residuals as Residuals
from .remat._residuals import saved_residuals as saved_residuals
from .remat.record._names import checkpoint_name as checkpoint_name
from .remat.values._policies import dots_saveable as dots_saveable
from .remat.values._policies import dots_with_no_batch_dims_saveable as dots_with_no_batch_dims_saveable
from .remat.values._policies import everything_saveable as everything_saveable
from .remat.values._policies import nothing_saveable as nothing_saveable
from .remat.values._policies import offload_dot_with_no_batch_dims as offload_dot_with_no_batch_dims
from .remat.values._policies import save_and_offload_only_these_names as save_and_offload_only_these_names
from .remat.values._policies import save_any_names_but_these as save_any_names_but_these
from .remat.values._policies import save_from_both_policies as save_from_both_policies
from .remat.values._policies import save_only_these_names as save_only_these_names
from .schedules._schedules import Schedule as Schedule
from .schedules._schedules import cosine as cosine
from .schedules._schedules import linear as linear
from .schedules._schedules import warmup_cosine as warmup_cosine
from .schedules._schedules_of_parts import from_torch_scheduler as from_torch_scheduler
from .schedules._schedules_of_parts import warmup as warmup
from .sharding._gather import GatherState as GatherState
from .sharding._gather import ShardState as ShardState
from .sharding._scatter_mean import scatter_mean as scatter_mean
from .spec._fingerprint import fingerprint as fingerprint
from .spec._spec import Spec as Spec
from .spec._spec import factory as factory
from .spec._to_json import to_json as to_json
from .step_param._optimizer import Optimizer as Optimizer
from .sync._batch_norm import BatchNormState as BatchNormState
from .sync._batch_norm import sync_batch_norm as sync_batch_norm
from .sync._buffers import average_buffers as average_buffers
from .sync._buffers import broadcast_buffers as broadcast_buffers
from .sync._last_joiner import JoinHook as JoinHook
from .sync._last_joiner import broadcast_from_last as broadcast_from_last
from .sync._last_joiner import last_joiner as last_joiner
from .sync._sync_modules import SyncBatchNorm as SyncBatchNorm
from .sync._sync_modules import convert_sync_batchnorm as convert_sync_batchnorm
from .transform._call import Call as Call
from .transform._inner import Inner as Inner
from .transform._timing import Changes as Changes
from .transform._timing import Period as Period
from .transform._timing import Periodic as Periodic
from .transform._timing import Switch as Switch
from .transform._timing import Windows as Windows
from .transform._transform import ByNorm as ByNorm
from .transform._transform import Compression as Compression
from .transform._transform import Needs as Needs
from .transform._transform import Reduction as Reduction
from .transform._transform import Transform as Transform
from .tree._placement import Merge as Merge
from .tree._placement import PerRank as PerRank
from .tree._placement import Placement as Placement
from .tree._state_dict import from_state_dict as from_state_dict
from .tree._state_dict import to_state_dict as to_state_dict
