"""The cluster as its events made it: events, workloads, node allocations, policy, demand and telemetry.

`events` is the closed union that the journal keeps, `cluster_state` applies it. Values that are not in the
journal but describe this moment (telemetry, engine reports, agent liveness) are here too. Pure: no I/O and
no clock. Imports common and profiles, never placement or core.
"""
