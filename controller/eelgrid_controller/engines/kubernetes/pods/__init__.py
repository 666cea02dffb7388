"""Pods behind a scheduling gate: placement units, pinning, moves, drains and MIG slices. Pure decisions."""
