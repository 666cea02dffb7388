"""Chooses a power limit for each training job, within its promised slowdown and every power budget.

Pure: no clock, no I/O. Contains the power model of a job, the bandit that explores unknown curves, the
allocation of budgets and the rollout of limits.
"""
