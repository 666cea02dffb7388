"""The seam to the Kubernetes API: a port of a few verbs over plain JSON objects, and what is built on it.

    resources.py   which kinds there are, as values
    errors.py      what can go wrong, and whose move it is
    port.py        the verbs: `Cluster`
    client.py      the verbs over HTTP, as `kubeconfig.py` and `credentials.py` say
    informer.py    a kind held in memory and kept up to date, by the rules of `store.py`
    elector.py     one leader among several controllers, by the rules of `election.py`
    retry.py       which errors are worth another attempt, and when

Owns how one speaks with an API server. Must not know what Eelgrid decides: a module that
places, gates or claims is built on the port and stands beside this package.

Theory. Objects stay plain JSON (dictionaries): a typed model of a kind drops the fields of
the next Kubernetes version, costs four times as much to decode, and Eelgrid reads a dozen
fields and writes with patches. The port is small so that another library, a fake or a
recording can stand in its place; one contract suite says what every implementation does.
"""
