"""Small inventories of other projects' documentation, so that the pages link there and the build needs no network.

    python docs/inventories/make.py

The names are those that signatures and docstrings hold; tests/test_repository.py imports each. For a project, each line is an
address and the names on it, where $ stands for the name itself.
"""

from __future__ import annotations

import zlib
from pathlib import Path

HERE = Path(__file__).parent
SITES = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "optax": "https://optax.readthedocs.io/en/latest/",
    "jax": "https://docs.jax.dev/en/latest/",
}
PAGES: dict[str, dict[str, str]] = {
    "python": {
        "library/constants.html#$": "None False True",
        "library/functions.html#$": "bool float int object type slice",
        "library/stdtypes.html#$": "str bytes bytearray frozenset dict list tuple set",
        "library/exceptions.html#$": (
            "BaseException Exception AttributeError IndexError KeyError NotImplementedError OSError RuntimeError"
            " StopIteration TimeoutError TypeError UserWarning ValueError FileExistsError FileNotFoundError"
        ),
        "library/typing.html#$": "typing.Any typing.Literal typing.NamedTuple typing.Protocol typing.TypeVar",
        "library/types.html#$": "types.TracebackType types.ModuleType",
        "library/collections.abc.html#$": (
            "collections.abc.Callable collections.abc.Collection collections.abc.Hashable collections.abc.Iterable"
            " collections.abc.Iterator collections.abc.Generator collections.abc.Mapping collections.abc.Sequence"
        ),
        "library/pathlib.html#$": "pathlib.Path",
        "library/os.html#$": "os.PathLike",
        "library/datetime.html#$": "datetime.timedelta",
    },
    "torch": {
        "tensors.html#$": "torch.Tensor",
        "tensor_attributes.html#$": "torch.dtype torch.device",
        "size.html#$": "torch.Size",
        "optim.html#$": "torch.optim.Optimizer",
        # Signatures have the names of the modules in which the classes are written.
        "generated/torch.nn.Module.html#torch.nn.Module": "torch.nn.modules.module.Module",
        "generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel": (
            "torch.nn.parallel.distributed.DistributedDataParallel"
        ),
        "optim.html#torch.optim.Optimizer": "torch.optim.optimizer.Optimizer",
        "optim.html#weight-averaging-swa-and-ema": "torch.optim.swa_utils.AveragedModel",
        "amp.html#gradient-scaling": "torch.amp.GradScaler",
        "futures.html#$": "torch.futures.Future",
        "data.html#$": "torch.utils.data.DataLoader torch.utils.data.Sampler",
        "distributed.optim.html#$": (
            "torch.distributed.optim.ZeroRedundancyOptimizer torch.distributed.optim.PostLocalSGDOptimizer"
        ),
        "distributed.algorithms.join.html#torch.distributed.algorithms.Join": "torch.distributed.algorithms.join.Join",
        "distributed.algorithms.join.html#torch.distributed.algorithms.JoinHook": (
            "torch.distributed.algorithms.join.JoinHook"
        ),
        "distributed.algorithms.join.html#torch.distributed.algorithms.Joinable": (
            "torch.distributed.algorithms.join.Joinable"
        ),
        "generated/$.html#$": (
            "torch.Generator torch.no_grad torch.compile torch.nn.Module torch.nn.SyncBatchNorm torch.func.functional_call"
            " torch.func.vmap torch.func.grad torch.func.vjp torch.nn.parallel.DistributedDataParallel"
            " torch.nn.utils.clip_grad_norm_ torch.nn.utils.clip_grad_value_"
            " torch.optim.ASGD torch.optim.Adadelta torch.optim.Adafactor torch.optim.Adagrad torch.optim.Adam"
            " torch.optim.AdamW torch.optim.Adamax torch.optim.Muon torch.optim.NAdam torch.optim.RAdam"
            " torch.optim.RMSprop torch.optim.Rprop torch.optim.SGD"
            " torch.optim.lr_scheduler.CosineAnnealingLR torch.optim.lr_scheduler.LinearLR"
        ),
    },
    "optax": {
        "api/combining_optimizers.html#$": "optax.chain optax.partition",
        "api/optimizer_wrappers.html#$": "optax.MultiSteps optax.apply_if_finite optax.masked",
        "api/optimizer_schedules.html#$": (
            "optax.cosine_decay_schedule optax.linear_schedule optax.inject_hyperparams"
        ),
        "api/optimizers.html#$": "optax.lamb optax.lion",
        "api/transformations.html#$": (
            "optax.GradientTransformation optax.clip optax.clip_by_global_norm optax.set_to_zero"
            " optax.stateless_with_tree_map"
        ),
    },
    "jax": {
        "_autosummary/$.html#$": (
            "jax.value_and_grad jax.checkpoint jax.debug.callback jax.eval_shape jax.pure_callback jax.lax.ragged_all_to_all"
            " jax.random.key jax.random.split jax.random.fold_in jax.random.bits jax.random.uniform"
            " jax.random.normal jax.random.bernoulli jax.random.randint jax.random.permutation jax.random.categorical"
        ),
    },
}


def names(project: str) -> list[str]:
    return [name for some in PAGES[project].values() for name in some.split()]


def inventory(project: str) -> bytes:
    """In the second form of Sphinx's inventories. All are classes: a link to any other kind of name finds these too."""
    head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
    lines = "".join(
        f"{name} py:class 1 {address.replace('$', name)} -\n"
        for address, some in PAGES[project].items()
        for name in sorted(some.split())
    )
    head += "# The remainder of this file is compressed using zlib.\n"
    return head.encode() + zlib.compress(lines.encode(), 9)


if __name__ == "__main__":
    for project, url in SITES.items():
        (HERE / f"{project}.inv").write_bytes(inventory(project))
        (HERE / f"{project}.url").write_text(f"{url}\n")
