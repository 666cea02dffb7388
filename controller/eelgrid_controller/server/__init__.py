"""Servers of the controller: gRPC, HTTP, authorization, metrics and tracing."""
