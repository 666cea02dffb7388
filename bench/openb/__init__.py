"""Placement policies, published and ours, on the openb trace: one command, one protocol, one table."""
