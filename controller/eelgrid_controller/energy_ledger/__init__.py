"""The energy ledger: joules and money by owner and hour, from the windows that agents send.

`entries.py` has its words, `spreading.py` turns a window into entries, `asking.py` says what
can be asked of them. Pure; `adapters/energy_store.py` keeps them. Explained in docs/explanation/energy-ledger.md.
"""
