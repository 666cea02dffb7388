"""Spending limits: who may spend how much in a period, what is spent, and who waits for it.

Pure: it is told events and figures with their times. docs/how-to/spending.md.
"""
