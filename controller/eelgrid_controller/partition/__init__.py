"""Partitions: which replicas, slices, batches, processes and MIG layouts serve the rates at least GPUs or watts.

Owns the search and its certificates. Must not know agents, drivers or the wire.
"""
