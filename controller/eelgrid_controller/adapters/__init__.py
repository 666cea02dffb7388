"""Adapters: agents' streams, the journal's file and the metrics page, each behind a port or over the loop.

Own the translation to the world outside. Must not decide anything.
"""
