"""Energy attribution: splits each device's energy among containers, Slurm jobs and processes.

`node_energy` is the entry point; docs/energy.md describes the method. `split`, `shares`, `metering`,
`accounts`, `anomalies`, `attributor`, `report` and `windows` are pure; `process_owners`, `node_energy` and
`window_file` read or write files.
"""
