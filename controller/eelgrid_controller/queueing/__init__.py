"""Queueing: which waiting work may start, in which order it is tried, and what makes room for it.

Pure: it reads the state and never changes it. Quotas and fair share, conditions of jobs, victims of preemption, reserved
starts and reservations of nodes are decided here; `core` turns decisions into events.
"""
