"""Public traces: found, read, generated, turned into a fleet, and submitted.

Owns the openb format and where it comes from, the fleet file made of it, and
the submitter that feeds tasks to a controller through the operators' API.
Knows nothing of screens or processes: `cli` and `demo` bring those.
"""
