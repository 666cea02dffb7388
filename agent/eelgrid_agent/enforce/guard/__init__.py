"""The guard: what this node lets a plan do, as a state machine without clock, disk or device.

`Guard` receives plans and device events and returns commands; `eelgrid_agent.enforce.power` executes them.
"""
