"""The partition planner in the daemon: from the state to a problem, from its answer to events.

Owns what lies between eelgrid_controller.partition, which knows no cluster, and the
core, which knows no search. Must not apply anything: core.py does.
"""
