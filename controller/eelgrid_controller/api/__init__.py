"""The operators' API: calls, pages, watches and what they show.

Owns how the cluster looks from outside. Must not change it but through the loop.
"""
