"""The part of the daemon that acts on promises: what it hears goes into the steering, what that says goes to the core.

Owns the order of a cycle and the translation between the core's state, what agents and
servers tell, and the steering's events. Must not know how a replica count or a limit is
chosen, how pages are fetched, or SQLite and gRPC.
"""
