"""Several clusters behind one front: which of them gets a workload, and that at most one runs it.

A controller of controllers. Each cluster keeps its own controller, which decides everything inside it; the front knows of
a cluster what its controller answers. The front keeps for each workload a record of where it may be; see `dispatch`.
"""
