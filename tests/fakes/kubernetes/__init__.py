"""An API server in memory, over real HTTP, that behaves like the real one wherever Eelgrid looks.

    store.py        objects, resource versions, the log of changes
    kinds.py        which kinds are served, and what the server tells about them
    faults.py       what it answers when it refuses
    selectors.py    label and field selectors
    patches.py      merge, JSON and strategic patches;  applying.py  server-side apply
    metadata.py     uid, generation, deletion;  rules.py  what may be written, by kind
    pods.py         the gate rules, binding, eviction;  claims.py  ResourceClaims and their traps
    access.py       who may do what
    server.py       HTTP: verbs, lists, watches;  cluster.py  the whole, with its knobs
    scheduler.py, workloads.py, kubelets.py   opt-in parts that act as Kubernetes' own do

A fake is worth what its contract suite proves: `tests/contracts/kubernetes_contract_test.py`
runs each rule here and against a real control plane, where there is one.
"""
