"""What `import fjoin` imports: nothing that takes longer than torch itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# In a folder where the user has a module that is called transforms.
PROGRAM = """
import sys, threading
import torch
import torch.distributed as dist
import transforms
before = set(sys.modules)
import fjoin
from fjoin import transforms as tx
after = set(sys.modules)
assert transforms.mine == 1
tx.chain()
assert not dist.is_initialized() and threading.active_count() == 1
print(*sorted({".".join(name.split(".")[:k]) for name in after - before for k in (1, 2, 3)}))
"""
HEAVY = {
    "functorch", "torch._dynamo", "torch._inductor", "torch.onnx", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy",
    "networkx", "jax", "optax", "matplotlib", "safetensors", "torch.utils.tensorboard", "pytest", "hypothesis",
}  # fmt: skip


def test_import_starts_nothing_and_loads_no_heavy_modules(tmp_path: Path) -> None:
    """torch's compiler takes seconds, and fully_shard as long as torch; they are imported where they are used."""
    (tmp_path / "transforms.py").write_text("mine = 1\n")
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = done.stdout.split()
    assert "fjoin.transforms" in found and not HEAVY & set(found)


def test_heavy_modules_are_imported_on_first_use() -> None:
    program = """
import sys, torch, fjoin
from fjoin import transforms as tx
step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(tx.mean("data"), tx.adamw(1e-3)))
state, _ = step(step.init({"w": torch.ones(3)}), torch.ones(3))
state.pipeline
assert "sympy" not in sys.modules
fjoin.apply_activation_checkpointing(torch.nn.Sequential(torch.nn.Linear(2, 2)))
"""
    subprocess.run([sys.executable, "-c", program], check=True)
