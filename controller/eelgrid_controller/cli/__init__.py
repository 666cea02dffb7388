"""eelctl: the operators' API for people and scripts.

Owns words, tables, exit codes and shell completion. Must not know how the
controller decides: everything here goes through the operators' API, as any
other client's calls do. Modules import grpc, rich and yaml inside the functions
that need them, because `eelctl --help` must answer in under 0.3 s.
"""
