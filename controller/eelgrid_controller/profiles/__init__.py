"""What a workload does in a configuration: watts, throughput, latency, memory; measured, interpolated, learned.

Owns points, the models through them and what was learned from what. Must not know
plans, nodes or who asks.
"""
