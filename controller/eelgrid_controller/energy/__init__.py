"""The energy ledger: joules and money by owner and hour, from the energy windows that agents send.

ledger has its values, queries and exporters, windows turns a window into entries, savings compares what was placed with
a best-fit baseline. These are pure; store/ keeps the ledger in SQLite. docs/explanation/energy-ledger.md explains it.
"""
