"""The core: turns every call and message into events and applies them to the cluster state.

`core` holds the one class that the daemon drives; the modules beside it turn one kind of request each into events:
admission and adoption, migration, scaling, and changes to nodes. `retry_rounds` tries pending work again, `recovery`
rebuilds the state from the journal. Pure except `command`, which answers callers through asyncio futures. Imports
placement, partition, state and profiles; nothing above.
"""
