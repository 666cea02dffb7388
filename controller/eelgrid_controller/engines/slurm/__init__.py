"""Slurm: steers jobs that opted in by hold, place and release; Slurm stays the only truth."""
