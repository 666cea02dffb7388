"""Who used a device's joules: attribution of energy to containers, jobs and processes.

Owns the split of each device's energy, the owners of processes, the sources of
allocations and the ledger of joules by owner; `node_energy` is the way in, and
docs/explanation/energy-attribution.md the method. Must not know how a device is read nor how a figure
is shown. split, shares, idle, uncertainty, metering, ledger, name_join,
anomalies, attributor and report are pure; owners, pod_names, slurm_jobs and
pod_resources read, each from a root or a socket that it is given.
"""
