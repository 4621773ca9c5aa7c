"""A loop with gradient checkpointing, as of GPT-2 in transformers (huggingface/transformers), as a `train_step`.

torchrun --nproc-per-node 2 examples/ported/gpt2/train_step.py

Changed: the model's own switch, which calls torch.utils.checkpoint, stays off, and one line has its blocks computed again;
DistributedDataParallel and the optimizer are a pipeline. Dropout is on: a block that is computed again draws the same masks.

Checked at the end: losses and parameters are those of reference.py, to the bit on one or two ranks; the activations that a
step keeps are less than a third of those without the line. The reference's AdamW has `fused=True`, since torch's other AdamW
rounds otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from model import GPT2Block, GPT2LMHeadModel, batches

import fjoin
from fjoin import transforms as tx

learning_rate, weight_decay, steps = 1e-3, 0.01, 4


def checkpoint_blocks(model: GPT2LMHeadModel) -> None:
    fjoin.apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, GPT2Block))


def main() -> dict[str, Any]:
    mesh = fjoin.mesh({"data": -1})
    torch.manual_seed(0)
    model = GPT2LMHeadModel()
    checkpoint_blocks(model)
    apply, params, _ = fjoin.functional(model)
    pipeline = tx.fuse(tx.mean("data"), tx.adamw(learning_rate, weight_decay=weight_decay))
    step = fjoin.train_step(lambda params, batch: apply(params, {}, **batch), pipeline, mesh=mesh)
    state = step.init(params)

    torch.manual_seed(mesh.rank)  # each rank has its own dropout
    losses = []
    for batch in step.join(batches(step.rank, steps)):
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
        if step.rank == 0:
            print(f"step {metrics.step}: loss {losses[-1]:.4f}")
    return {"losses": losses, "params": state.params}


if __name__ == "__main__":
    import sys
    from pathlib import Path

    import reference

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from _compare import finish, start

    def kept_bytes(model: GPT2LMHeadModel) -> int:
        """The bytes of activations that a backward pass would keep, without running one."""
        apply, params, _ = fjoin.functional(model)
        return tx.saved_residuals(lambda params: apply(params, {}, **batches(0, 1)[0]), params).activation_bytes

    rank, ranks = start()
    model = GPT2LMHeadModel()
    whole = kept_bytes(model)
    checkpoint_blocks(model)
    if rank == 0:
        print(f"activations kept: {kept_bytes(model)} of {whole} bytes")
    assert 3 * kept_bytes(model) < whole
    # The sum of more than two ranks' gradients depends on its order, and torch divides before it.
    finish(main(), reference.main, largest=0.0 if ranks <= 2 else 1e-6)
