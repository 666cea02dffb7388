"""Ray: jobs, actors and placement groups of a Ray cluster as workloads of the core, and Serve scaled by its autoscaler."""
