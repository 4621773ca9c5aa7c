"""Pure transforms for distributed training: communication of gradients, optimizers, and parameter averaging.

kinds        Transform  Call  Optimizer  Pipeline  PipelineState  Reduction  Timing  Needs
combine      chain  identity  stateless  masked  partition  fuse
when         switch_after  every  accumulate  skip_if_nonfinite  dynamic_loss_scale
clip         clip_by_global_norm  clip_by_value
agree        mean  sum_over  average_buffers  broadcast_buffers
shard        scatter_mean  zero
local SGD    local_sgd  post_local_sgd  diloco  ema  ema_params  outer_step  average_parameters  average_state
wire         compress  quantized  error_feedback  power_sgd
             batched_power_sgd  hierarchical_mean
codecs       Codec  Noise  bfloat16  bfp16  float16  float32  fp8  int8  uint8  int4  qsgd  sign  top_k
join, layers  JoinHook  broadcast_from_last  last_joiner  current_weight  current_call  sync_batch_norm
convert_sync_batchnorm
optimizers   sgd  adam  adamw  nadam  radam  adamax  adagrad  adadelta  adafactor  rmsprop  rprop  asgd  lion  lamb  muon  frozen
             mixed_precision  inject_hyperparameters  with_hyperparameters  as_functional_optim  register_functional_optim
schedules    linear  cosine  warmup_cosine  warmup  from_torch_scheduler
collectives  psum  pmean  pmax  pmin  pbroadcast  all_gather  psum_scatter  all_to_all  all_to_all_single  ppermute  axis_index  axis_size
run          simulate; random: keys as values, with jax's bits
memory       remat  checkpoint_name  checkpoint_policies  saved_residuals
look         tap  record_norm  explain  Explanation  factory
save         to_state_dict  from_state_dict  PerRank  Merge
"""

if __name__ != "fjoin.transforms":
    raise ImportError(
        f"{__name__!r} is a second copy of fjoin.transforms; write `from fjoin import transforms as tx`, after `pip install -e .`"
    )

from . import random as random
from .averaging import (
    average_parameters as average_parameters,
    average_state as average_state,
    diloco as diloco,
    ema as ema,
    ema_params as ema_params,
    local_sgd as local_sgd,
    outer_step as outer_step,
    post_local_sgd as post_local_sgd,
)
from .axes import (
    all_gather as all_gather,
    all_to_all as all_to_all,
    all_to_all_single as all_to_all_single,
    axis_index as axis_index,
    axis_size as axis_size,
    current_call as current_call,
    current_weight as current_weight,
    pbroadcast as pbroadcast,
    pmax as pmax,
    pmean as pmean,
    pmin as pmin,
    ppermute as ppermute,
    psum as psum,
    psum_scatter as psum_scatter,
    simulate as simulate,
)
from .base import (
    ByNorm as ByNorm,
    Call as Call,
    CollectiveMismatch as CollectiveMismatch,
    Compression as Compression,
    Facts as Facts,
    Merge as Merge,
    Needs as Needs,
    PerRank as PerRank,
    Reduction as Reduction,
    Timing as Timing,
    Transform as Transform,
    TransformInitFn as TransformInitFn,
    TransformUpdateFn as TransformUpdateFn,
    UnboundAxis as UnboundAxis,
    factory as factory,
)
from .base.state_dicts import from_state_dict as from_state_dict, to_state_dict as to_state_dict
from .codecs import (
    Codec as Codec,
    Noise as Noise,
    bfloat16 as bfloat16,
    bfp16 as bfp16,
    float16 as float16,
    float32 as float32,
    fp8 as fp8,
    int4 as int4,
    int8 as int8,
    qsgd as qsgd,
    sign as sign,
    top_k as top_k,
    uint8 as uint8,
)
from .combinators import (
    accumulate as accumulate,
    chain as chain,
    clip_by_global_norm as clip_by_global_norm,
    clip_by_value as clip_by_value,
    every as every,
    identity as identity,
    masked as masked,
    partition as partition,
    record_norm as record_norm,
    stateless as stateless,
    switch_after as switch_after,
    tap as tap,
)
from .optimizers import (
    Optimizer as Optimizer,
    adadelta as adadelta,
    adafactor as adafactor,
    adagrad as adagrad,
    adam as adam,
    adamax as adamax,
    adamw as adamw,
    as_functional_optim as as_functional_optim,
    asgd as asgd,
    cosine as cosine,
    from_torch_scheduler as from_torch_scheduler,
    frozen as frozen,
    inject_hyperparameters as inject_hyperparameters,
    lamb as lamb,
    linear as linear,
    lion as lion,
    mixed_precision as mixed_precision,
    muon as muon,
    nadam as nadam,
    radam as radam,
    register_functional_optim as register_functional_optim,
    rmsprop as rmsprop,
    rprop as rprop,
    sgd as sgd,
    warmup as warmup,
    warmup_cosine as warmup_cosine,
    with_hyperparameters as with_hyperparameters,
)
from .pipelines import (
    Explanation as Explanation,
    Pipeline as Pipeline,
    PipelineState as PipelineState,
    dynamic_loss_scale as dynamic_loss_scale,
    explain as explain,
    fuse as fuse,
    skip_if_nonfinite as skip_if_nonfinite,
    zero as zero,
)
from .reductions import (
    batched_power_sgd as batched_power_sgd,
    compress as compress,
    error_feedback as error_feedback,
    hierarchical_mean as hierarchical_mean,
    mean as mean,
    power_sgd as power_sgd,
    quantized as quantized,
    scatter_mean as scatter_mean,
    sum_over as sum_over,
)
from .rematerialization import (
    checkpoint_name as checkpoint_name,
    checkpoint_policies as checkpoint_policies,
    remat as remat,
    saved_residuals as saved_residuals,
)
from .sync import (
    JoinHook as JoinHook,
    SyncBatchNorm as SyncBatchNorm,
    average_buffers as average_buffers,
    broadcast_buffers as broadcast_buffers,
    broadcast_from_last as broadcast_from_last,
    convert_sync_batchnorm as convert_sync_batchnorm,
    last_joiner as last_joiner,
    sync_batch_norm as sync_batch_norm,
)
