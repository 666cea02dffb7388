"""The energy ledger: joules and money by owner and hour, from the energy windows that agents send.

`ledger` turns windows into entries and has the values, queries and exporters, `savings` compares what was placed with a
best-fit baseline. Both are pure; store/ keeps the ledger in SQLite. docs/explanation/energy-ledger.md explains it.
"""
