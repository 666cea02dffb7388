"""Queueing: which waiting work may start by its queue's quota, and in which order it is tried.

Pure: it reads the state and never changes it. Preemption, backfill and reservations are not there yet.
"""
