"""Prometheus remote write: the series of devices, owners and this controller, for whoever keeps metrics for years."""
