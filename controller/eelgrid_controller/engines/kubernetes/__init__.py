"""The Kubernetes engine: what objects of the API mean, what follows from them, and who writes it.

Folders `model`, `pods` and `claims` are pure: JSON and events in, values and instructions out; time is an argument.
`reconcilers` run them, `api` reaches the API server. Only those two do I/O.
"""
