"""Computes the energy, latency and throughput frontier of a described fleet from measured profile points. Pure."""
