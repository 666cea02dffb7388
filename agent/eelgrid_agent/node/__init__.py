"""One node: configuration, sampling, spooling, the stream to the controller and the node's own gRPC service.

Pure modules (`node`, `sampler`, `spool`) receive the time as an argument; `loop`, `uplink` and `host` do the I/O.
"""
