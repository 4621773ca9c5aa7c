"""Losses of jax in steps of torch; `import fjoin.jax` needs jax.

losses     loss
trees      to_torch  to_jax
buffers    flat  nested
"""

from ._loss import loss as loss
from ._trees import flat as flat, nested as nested, to_jax as to_jax, to_torch as to_torch
