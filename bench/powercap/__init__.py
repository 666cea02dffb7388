"""Experiment E4: power limits for training, on Zeus's measurements (NSDI'23)."""
