"""Placement: which node and which GPUs each replica gets, on one immutable snapshot of the cluster.

`snapshot` turns the state into arrays, `planner` places one workload on them, `placer` adds node traits and power
budgets (`power`), `migration_planner` searches for moves of running work, `remedies` for what would place work that
waits, and `explanations` gives the reasons. Pure: no I/O and no clock. Imports state, never core.
"""
