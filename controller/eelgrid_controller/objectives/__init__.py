"""Keeps service-level objectives and power budgets: observes the cluster, decides replicas and power limits, applies them.

control_loop runs one control_cycle every few seconds; the observers turn what is seen into events,
controller answers with instructions. services/ decides replica counts, power/ decides power limits.
"""
