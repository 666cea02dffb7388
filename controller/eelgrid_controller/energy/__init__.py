"""The energy ledger: joules and money by owner and hour, from the energy windows that agents send.

ledger.py has its values, windows.py turns a window into entries, ledger_queries.py defines queries and answers,
exporters.py the marks of those who export it. These are pure; the store keeps them. Explained in docs/ledger.md.
"""
