"""Queueing on published loads: peers recomputed from what is published, then ours on the same jobs."""
