"""E2: MIG partitions under latency objectives, on ParvaGPU's profile tables."""
