"""What `import fjoin` imports: nothing that takes longer than torch itself."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
before = set(sys.modules)
import fjoin
from fjoin import transforms as tx
print(*sorted({".".join(name.split(".")[:k]) for name in set(sys.modules) - before for k in (1, 2, 3)}))
"""
HEAVY = {
    "functorch", "torch._dynamo", "torch._inductor", "torch.onnx", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy",
    "networkx", "jax", "optax", "matplotlib", "safetensors", "torch.utils.tensorboard", "pytest", "hypothesis",
}  # fmt: skip


def test_import_loads_no_heavy_modules() -> None:
    """torch's compiler takes seconds, and fully_shard as long as torch; they are imported where they are used."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())


def test_heavy_modules_are_imported_on_first_use() -> None:
    program = """
import sys, torch, fjoin
from fjoin import transforms as tx
fn = tx.remat(lambda x: x.sin().cos(), tx.min_cut)
x = torch.ones(3, requires_grad=True)
fn(x).sum().backward()
want = -(torch.ones(3).sin().sin() * torch.ones(3).cos())
assert torch.allclose(x.grad, want), x.grad
model = torch.nn.Sequential(torch.nn.Linear(2, 2))
fjoin.apply_activation_checkpointing(model)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
