"""Kubernetes as values: what pods and nodes say, what a pod's people want, which node may take it.

Pure: JSON in, frozen values out. Must not know how the API server is reached; that is
`adapters/kubernetes`.
"""
