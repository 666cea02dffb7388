"""The state of the cluster: events, workloads, node allocations, policy, demand and telemetry.

`events` is the closed union that the journal stores, `cluster_state` applies it. Values that describe the present
and are not in the journal (telemetry, engine reports, agent liveness) are here too. Pure: no I/O and no clock.
Imports errors and profiles, never placement or core.
"""
