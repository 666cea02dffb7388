"""Energy attribution: splits each device's energy among containers, Slurm jobs and processes.

`node_energy` is the entry point; docs/explanation/energy-attribution.md describes the method. All modules are pure,
except `process_owners` and `node_energy`, which read and write files.
"""
