"""eelctl: the operators' API for people and scripts.

Owns texts, tables, exit codes and shell completion. Must not know how the
controller decides: every command goes through the operators' API, as any
other client does. Modules import grpc, rich and yaml inside the functions
that need them, because `eelctl --help` must answer in under 0.3 s.
"""
