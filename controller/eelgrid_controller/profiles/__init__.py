"""Models what a workload does in a configuration: power, throughput, latency and memory; measured, interpolated or learned.

Also holds the queueing model that turns a measured configuration and an arrival rate into latency quantiles.
"""
