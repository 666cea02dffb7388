"""Reconcilers of the Kubernetes engine: each follows some objects and writes what the core decided."""
