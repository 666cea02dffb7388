"""Dynamic Resource Allocation (mode `dra`): allocates devices to ResourceClaims. Pure decisions."""
