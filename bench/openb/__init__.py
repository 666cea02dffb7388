"""Placement policies, published ones and Eelgrid's, on the openb trace: one command, one protocol, one table."""
