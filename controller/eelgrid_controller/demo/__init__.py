"""The demo: a controller, a fleet of simulated nodes and a public trace, in one command.

Owns the processes it starts, what it shows and the report it leaves. Everything
it shows comes through the operators' API; it reaches into neither daemon.
"""
