"""Simulation of a queue, customer by customer: the reference for the queueing model.

Owns the simulation. Must not know the model. Identical servers, first come first
served; a free server takes the waiting requests, at most a batch, and never waits
for more. Deliberately slow and obvious; the seed is an argument.
"""

import heapq
from typing import NamedTuple

import numpy as np

__all__ = ["Queue", "simulate", "times"]


class Queue(NamedTuple):
    """What is simulated; variations are squared coefficients."""

    rate_hz: float
    arrival_cv2: float
    servers: int
    service_s: float  # of a full batch
    service_cv2: float
    batch: int = 1
    alone_s: float | None = None  # of a batch of one


def times(rng: np.random.Generator, mean: float, cv2: float, number: int, shape: str) -> np.ndarray:
    """Draws with this mean and variation: gamma or lognormal; constant at 0."""
    if cv2 == 0.0:
        return np.full(number, mean)
    if shape == "gamma":
        return rng.gamma(1.0 / cv2, mean * cv2, number)
    sigma2 = np.log1p(cv2)
    return mean * np.exp(rng.normal(-sigma2 / 2.0, np.sqrt(sigma2), number))


def simulate(queue: Queue, customers: int, seed: int, shape: str = "gamma") -> np.ndarray:
    """Response times (customers,) after a tenth of warming up."""
    rng = np.random.default_rng(seed)
    number = customers + customers // 10
    arrived = np.cumsum(times(rng, 1.0 / queue.rate_hz, queue.arrival_cv2, number, "gamma")).tolist()
    factors = times(rng, 1.0, queue.service_cv2, number, shape).tolist()
    alone_s = queue.service_s if queue.alone_s is None else queue.alone_s
    free = [0.0] * queue.servers
    took = np.empty(number)
    first = 0
    while first < number:
        start = max(heapq.heappop(free), arrived[first])
        last = first + 1
        while last < number and last - first < queue.batch and arrived[last] <= start:
            last += 1
        share = 0.0 if queue.batch == 1 else (last - first - 1) / (queue.batch - 1)
        base = queue.service_s if queue.batch == 1 else alone_s + share * (queue.service_s - alone_s)
        end = start + factors[first] * base
        heapq.heappush(free, end)
        for one in range(first, last):
            took[one] = end - arrived[one]
        first = last
    return took[customers // 10 :]
