"""Flux: schedules the jobs of one Flux instance, through a small scheduler module in its broker."""
