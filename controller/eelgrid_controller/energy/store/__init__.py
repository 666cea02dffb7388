"""SQLite store of the energy ledger: schema, rows, queries, and the asynchronous writer."""
