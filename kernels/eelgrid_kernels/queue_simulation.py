"""Queue simulation: response times of a first-come-first-served queue with batch service.

Owns the one loop that no closed form replaces. Must not know rates, quantiles or
where the drawn times come from.

Servers that are alike, one queue, first come first served. A free server takes
what waits, at most a batch, and never waits for more. A batch of k of B lasts
works[i] x (alone + (1 - alone) (k - 1) / (B - 1)), i its first customer.
Twin: bench/llm/queue_simulation.py.
"""

from typing import NamedTuple

import numpy as np

from eelgrid_kernels.arrays import Floats
from eelgrid_kernels.compilation import kernel


class BatchServers(NamedTuple):
    """Servers that are alike."""

    servers: int
    batch: int  # customers that one serves at once, at most
    alone: float  # the time of a batch of one over that of a full one


@kernel
def simulate_queue(arrived_s: Floats, works_s: Floats, station: BatchServers, took_s: Floats) -> None:
    """Response times of customers who come at arrived_s (A,), rising, into took_s (A,), in place.

    works_s (A,) is how long each takes in a full batch. A log(servers) steps.
    """
    servers, batch, alone = station
    free_s = np.zeros(servers)  # a heap: the earliest first
    first, count = 0, arrived_s.shape[0]
    while first < count:
        start_s = max(free_s[0], arrived_s[first])
        last = first + 1
        while last < count and last - first < batch and arrived_s[last] <= start_s:
            last += 1
        share = 1.0 if batch == 1 else alone + (1.0 - alone) * (last - first - 1) / (batch - 1)
        end_s = start_s + works_s[first] * share
        at = 0  # the new end sinks to its place
        while True:
            child = 2 * at + 1
            if child >= servers:
                break
            if child + 1 < servers and free_s[child + 1] < free_s[child]:
                child += 1
            if free_s[child] >= end_s:
                break
            free_s[at] = free_s[child]
            at = child
        free_s[at] = end_s
        for one in range(first, last):
            took_s[one] = end_s - arrived_s[one]
        first = last
