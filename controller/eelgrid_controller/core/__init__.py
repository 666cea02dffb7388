"""The core: turns every call and message into events and applies them to the cluster state.

`core` holds the one class that the daemon drives; `workloads` and `nodes` turn requests that change them into events,
and `recovery` rebuilds the state from the journal. Pure: no I/O and no clock. Imports placement, partition, state and
profiles; nothing above.
"""
