"""What the agent enforces on devices: the guard, power settings and MIG layouts.

The package imports nothing, so that `rules` and the journals can be used alone.
"""
