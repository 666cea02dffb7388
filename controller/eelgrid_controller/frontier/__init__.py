"""The frontier of a described fleet: energy against latency against throughput, from measured points.

Owns the sweep over latency objectives and what is marked on it. Must not know files,
tables, pictures or a running controller.
"""
