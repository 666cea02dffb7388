"""What follows for pods, services and suspended jobs: placement units, pins, moves, MIG slices, sizes. Pure decisions."""
