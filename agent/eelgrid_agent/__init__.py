"""The node agent: reads the node's devices, tells the controller, holds the node's plan.

Owns the device port and its adapters, the sampler, the spool, the guard and
the stream to the controller. Must never know what a job is worth or why the
controller placed it: it imports the contract and neither numpy nor numba.
"""
