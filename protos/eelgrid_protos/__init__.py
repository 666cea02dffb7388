"""The contract between agents, controller and operators.

Owns what crosses a process boundary: messages (frozen, SI units), the codec
that validates both ways, the table of calls, how a connection is secured, and
the catalogue of GPU and MIG facts. Knows nothing of what either side does.
Field numbers are never reused; unknown fields are passed over.
"""

__version__ = "0.2.0"
