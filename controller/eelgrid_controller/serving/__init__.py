"""Inference services: from a configuration and a rate to a latency quantile, and from an objective to instances.

Owns queueing, the correction by live quantiles, and the scaler. Must not know
engines, MIG geometry or the wire.
"""
