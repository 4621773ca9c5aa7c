"""The recorded rows that this release may change, and why. All others stay as they are, to the bit."""

from __future__ import annotations

# Rows whose messages may be fewer than was recorded.
MAY_CHANGE: dict[str, str] = {}

_PHASES = "The table is that of step 0: a stage has one row with its own repr, not one for each phase."
_PARTS = "A stage has one row, also where it runs other transforms on some of the leaves."
_BALANCE = (
    "The table does not say how evenly the ranks share the matrices; tests/transforms/sharding/test_zero.py does."
)
_MODE = "clip_by_global_norm has no argument `mode`."

# Rows of explained.json that were recorded again, since the table of `explain` has no phases.
EXPLAINED_AGAIN: dict[str, str] = {
    "accumulate 0": _PHASES,
    "accumulate 1": _PHASES,
    "accumulate 2": _PHASES,
    "average_every 0": _PHASES,
    "average_every 1": _PHASES,
    "batched_power_sgd 2": _PHASES,
    "chain 5": _PHASES,
    "dgc 1": _PHASES,
    "every 0": _PHASES,
    "hierarchical_average 0": _PHASES,
    "masked 2": _PHASES,
    "one_bit_adam 0": _PHASES,
    "one_bit_adam 1": _PHASES,
    "other: 1-bit Adam, world": _PHASES,
    "other: dgc": _PHASES,
    "other: first whole, then ef21": _PHASES,
    "other: first whole, then int8": _PHASES,
    "other: masters, average of states": _PHASES,
    "other: power_sgd": _PHASES,
    "outer_step 0": _PHASES,
    "outer_step 1": _PHASES,
    "outer_step 2": _PHASES,
    "plan: DiLoCo": _PHASES,
    "plan: DiLoCo between nodes": _PHASES,
    "plan: encoded": _PHASES,
    "plan: first means, then local steps": _PHASES,
    "plan: hierarchical": _PHASES,
    "plan: in fewer bits": _PHASES,
    "plan: live": _PHASES,
    "plan: local SGD": _PHASES,
    "plan: local steps": _PHASES,
    "plan: local steps of nodes": _PHASES,
    "plan: mean, then an average": _PHASES,
    "plan: moving average": _PHASES,
    "plan: now and then": _PHASES,
    "plan: post-local SGD": _PHASES,
    "plan: post-local SGD, encoded": _PHASES,
    "plan: streaming": _PHASES,
    "plan: two periods": _PHASES,
    "plan: two stages": _PHASES,
    "plan: world": _PHASES,
    "power_sgd 2": _PHASES,
    "sharded: nodes apart": _PHASES,
    "sharded: nodes apart, masters": _PHASES,
    "switch_after 0": _PHASES,
    "switch_after 1": _PHASES,
    "switch_after 2": _PHASES,
    "whole: nodes apart": _PHASES,
    "whole: nodes apart, masters": _PHASES,
    "power_sgd 6": _PARTS,
    "sharded: clip, Muon": _BALANCE,
    "sharded: nodes": _BALANCE,
    "sharded: skip": _BALANCE,
}

# Rows of plans.json that were recorded again: only the argument that has gone differs in the spec, and so the fingerprint.
PLANNED_AGAIN: dict[str, str] = {
    "chain 0": _MODE,
    "clip_by_global_norm 0": _MODE,
    "other: scatter, clip": _MODE,
    "plan: two stages": _MODE,
    "sharded: clip": _MODE,
    "sharded: clip, Muon": _MODE,
    "whole: clip": _MODE,
    "whole: clip, Muon": _MODE,
}
