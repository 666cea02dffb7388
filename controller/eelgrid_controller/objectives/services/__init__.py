"""Keeps the latency objectives of inference services: metrics to windows, calibration, service models, autoscaler. Pure."""
