"""Error of the queueing model compared with a simulation: python -m bench.llm.queues.

Owns the grid and its table. The stated error of the model must hold for 95 of 100
points of the grid; this is checked, and the exit status reports it.
"""

import itertools
import sys
from collections.abc import Iterator

import click
import numpy as np

from bench.llm.queue_simulation import Queue, simulate
from bench.runner import Options, benchmark
from eelgrid_controller.profiles.queueing_model import MODEL_ERROR, ArrivalProcess, ServiceStation, latency_quantile

QUANTILES = (0.5, 0.9, 0.95, 0.99)
_LOADS = (0.3, 0.6, 0.8, 0.9)
_SERVERS = (1, 2, 8, 32)
_VARIATIONS = ((1.0, 1.0), (1.0, 0.0), (1.0, 0.25), (4.0, 0.25), (0.25, 0.25), (4.0, 2.0))  # arrivals, service
_BATCHES = ((4, 1.0), (4, 0.2), (32, 0.5), (32, 0.2))  # most requests, time of one over that of a full batch
_NOISE = 0.05  # what a simulation of this length may miss itself
_BATCH_SERVERS, _BATCH_VARIATIONS = (1, 4), ((1.0, 0.0), (1.0, 0.1), (4.0, 0.1))


def grid(kind: str) -> Iterator[Queue]:
    """The points of a kind: exact, simple or batched."""
    if kind == "exact":
        for servers, load in itertools.product(_SERVERS, _LOADS):
            yield Queue(load * servers, 1.0, servers, 1.0, 1.0)
    elif kind == "simple":
        for servers, load, (arrival, service) in itertools.product(_SERVERS, _LOADS, _VARIATIONS[1:]):
            yield Queue(load * servers, arrival, servers, 1.0, service)
    else:
        for servers, load, (batch, alone), (arrival, service) in itertools.product(
            _BATCH_SERVERS, (0.1, *_LOADS), _BATCHES, _BATCH_VARIATIONS
        ):
            yield Queue(load * servers * batch, arrival, servers, 1.0, service, batch, alone)


def missed(queue: Queue, customers: int, seed: int, shape: str) -> np.ndarray:
    """Relative difference of the model from the simulation at each of QUANTILES."""
    played = np.quantile(simulate(queue, customers, seed, shape), QUANTILES)
    station = ServiceStation(
        servers=queue.servers,
        service_s=queue.service_s,
        service_cv2=queue.service_cv2,
        batch=queue.batch,
        alone_s=queue.alone_s,
    )
    arrivals = ArrivalProcess(queue.rate_hz, queue.arrival_cv2)
    return np.array([latency_quantile(station, arrivals, level).value_s for level in QUANTILES]) / played - 1.0


@benchmark(out=None)
@click.option("--customers", default=400000)
@click.option("--seed", default=1)
def main(options: Options) -> int:
    """Prints the errors of each kind; 1 if a stated error does not hold 95 of 100 points."""
    broken = 0
    print(f"{'kind':8} points  stated  " + "  ".join(f"p{round(100 * level)} 50/95/100 %" for level in QUANTILES))
    for kind, stated in zip(("exact", "simple", "batched"), MODEL_ERROR, strict=True):
        # M/M/c is exact for exponential times, which are gamma with variation 1.
        shapes = ("gamma",) if kind == "exact" else ("gamma", "lognormal")
        customers = options.customers * (4 if kind == "exact" else 1)  # where only the simulation can be wrong
        rows = np.abs([missed(one, customers, options.seed, shape) for shape in shapes for one in grid(kind)])
        cells = ["/".join(f"{value:.3f}" for value in np.quantile(column, (0.5, 0.95, 1.0))) for column in rows.T]
        within = float((rows <= max(stated, _NOISE)).mean())
        print(
            f"{kind:8} {len(rows):6}  {stated:6.2f}  " + "  ".join(cells) + f"  within {100 * within:.1f} %", flush=True
        )
        broken += within < 0.95
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
