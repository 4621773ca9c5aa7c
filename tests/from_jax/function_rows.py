"""The rows for functions, trees, policies and random numbers."""

from __future__ import annotations

from tests.from_jax.row import Row, Section

FUNCTIONS = Section(
    "Functions, and trees",
    "values",
    '`loss(w, x) -> (loss, aux)`; `f` is the loss alone; `tree` is `{"b": [2.0, None], "a": (1.0, 3.0)}`.',
    [
        Row("jax.value_and_grad(loss, has_aux=True)(w, x)", "fjoin.value_and_grad(loss, has_aux=True)(w, x)"),
        Row("jax.grad(f)(w, x)", "torch.func.grad(f)(w, x)"),
        Row("jax.vmap(f, (None, 0))(w, x)", "torch.func.vmap(f, (None, 0))(w, x)"),
        Row("jax.jacrev(f)(w, x)", "torch.func.jacrev(f)(w, x)"),
        Row('jax.shard_map(lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())(x)',
            'tx.simulate(lambda x: tx.psum(x, "data"), {"data": 8}, x.chunk(8))[0]',
            "names and sizes in the place of a mesh, a list of parts in the place of specs; the result of each rank"),
        Row("jax.tree.map(lambda v: 2 * v, tree)", "optree.tree_map(lambda v: 2 * v, tree)"),
        Row("jax.tree.leaves(tree)", "optree.tree_leaves(tree)"),
        Row("jax.tree.structure(tree).num_leaves", "optree.tree_structure(tree).num_leaves"),
        Row("jax.tree.reduce(lambda a, b: a - b, tree)", "optree.tree_reduce(lambda a, b: a - b, tree)"),
        Row('jax.tree.map_with_path(lambda path, v: keystr(path, simple=True, separator="."), tree)',
            'optree.tree_map_with_path(lambda path, v: ".".join(map(str, path)), tree)',
            "a path is a tuple of names and numbers; `masked` and `partition` match it with dots", exact=True),
        Row("ravel_pytree(w)[0]", "optree.integrations.torch.tree_ravel(w)[0]"),
    ],
)  # fmt: skip

SAME = "the policies of the same names; `remat` is for `jax.checkpoint`"
POLICIES = Section(
    "Checkpoint policies",
    "policy",
    "`p` is `jax.checkpoint_policies`. Gradients of `jax.checkpoint(block, policy=...)` and `tx.remat(block, policy=...)`, and the sizes "
    "of what `print_saved_residuals` and `tx.saved_residuals` list beside the arguments. `block` names two values by `checkpoint_name`.",
    [
        Row("p.nothing_saveable", "tx.checkpoint_policies.nothing_saveable", SAME),
        Row("p.everything_saveable", "tx.checkpoint_policies.everything_saveable",
            "gradients only: backward formulas of torch keep other values", residuals=False),
        Row("p.dots_saveable", "tx.checkpoint_policies.dots_saveable"),
        Row("p.dots_with_no_batch_dims_saveable", "tx.checkpoint_policies.dots_with_no_batch_dims_saveable"),
        Row('p.save_only_these_names("h")', 'tx.checkpoint_policies.save_only_these_names("h")'),
        Row('p.save_any_names_but_these("s")', 'tx.checkpoint_policies.save_any_names_but_these("s")'),
        Row('p.save_from_both_policies(p.dots_saveable, p.save_only_these_names("h"))', "tx.checkpoint_policies.save_from_both_policies("
            'tx.checkpoint_policies.dots_saveable, tx.checkpoint_policies.save_only_these_names("h"))'),
        Row('p.save_and_offload_only_these_names(names_which_can_be_saved=["s"], names_which_can_be_offloaded=["h"], '
            'offload_src="device", offload_dst="pinned_host")',
            'tx.checkpoint_policies.save_and_offload_only_these_names(names_which_can_be_saved=["s"], names_which_can_be_offloaded=["h"])',
            "from a GPU"),
        Row('p.offload_dot_with_no_batch_dims("device", "pinned_host")', "tx.checkpoint_policies.offload_dot_with_no_batch_dims()",
            "as above"),
    ],
)  # fmt: skip

KEYS = Section(
    "Keys and random numbers",
    "values",
    "`random` is `jax.random` and `tx.random`; `k` is `random.key(7)`. To the bit, but for `normal`, whose last bits differ.",
    [
        Row("random.key_data(random.key(42))", "random.key(42)", "a key is a tensor, (2,) int32", exact=True),
        Row("random.key_data(random.split(k, 3))", "random.split(k, 3)", exact=True),
        Row("random.key_data(random.fold_in(k, 5))", "random.fold_in(k, 5)", exact=True),
        Row("random.bits(k, (4,))", "random.bits(k, (4,))", "uint32 in jax, the same bits as int32 here", exact=True),
        Row("random.uniform(k, (3, 4))", "random.uniform(k, (3, 4))", exact=True),
        Row("random.uniform(k, (4,), minval=-1.0, maxval=2.0)", "random.uniform(k, (4,), minval=-1.0, maxval=2.0)",
            "up to the last bit: XLA multiplies and adds at once"),
        Row("random.normal(k, (3, 4))", "random.normal(k, (3, 4))"),
        Row("random.bernoulli(k, 0.3, (16,))", "random.bernoulli(k, 0.3, (16,))", exact=True),
        Row("random.randint(k, (16,), -5, 100)", "random.randint(k, (16,), -5, 100)", exact=True),
        Row("random.permutation(k, 20)", "random.permutation(k, 20)", exact=True),
        Row("jax.vmap(lambda k: random.uniform(k, (3,)))(random.split(k, 4))",
            "torch.vmap(lambda k: random.uniform(k, (3,)))(random.split(k, 4))", exact=True),
    ],
)  # fmt: skip
