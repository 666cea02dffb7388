"""What if: changes, other policies and past decisions, tried on a copy of the cluster by the code that runs it.

`scenarios` applies imagined changes, plans capacity and follows the live cluster with a second policy, `decision_record`
saves and replays one decision, `frontier`, `capacity`, `instances` and `slice_layouts` compute the energy, latency and
throughput frontier of a fleet from measured profile points. Pure.
"""
