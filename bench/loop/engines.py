"""The physics of engines that answer token by token: sequences in flight, tokens, watts and latency of every step.

Owns what a service does with so many replicas. Must not know who chose them, or any
model of the controller: what is written here is the world, from measured points alone.

Between two measured numbers of sequences at once, tokens a second, watts and the
quantiles of the inter-token latency go in a straight line; below the least one, tokens
in proportion, and watts from idle to the least measured with the share of time in which
there is any sequence, 1 - exp(-n). Sequences are spread evenly over replicas and wander
about their mean as those of a busy system with many users do, with a variance of n:
three points of a normal distribution stand for that. An engine is `slowness` times
slower and `thirst` times hungrier than it was measured.

With N sequences inside, R replicas and mean length L a step of d seconds ends where
    N' = N + d (arrivals - R T(N' / R) / L)
(an implicit step: it is stable however short an answer is). What is above the most
sequences of all replicas waits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.profiles.points import Point

__all__ = ["BORDERS_S", "Engine", "Engines", "Metrics", "Served"]

# The borders of vLLM's histogram of inter-token latency.
BORDERS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_GRID = 512
_THREE = (((3.0**0.5), 1.0 / 6.0), (0.0, 2.0 / 3.0), (-(3.0**0.5), 1.0 / 6.0))
_LEVELS = (0.5, 0.9, 0.95, 0.99)
Floats = NDArray[np.float64]


class Engine(NamedTuple):
    """One kind of replica, as it is."""

    points: tuple[Point, ...]  # of one shape
    objective_s: float  # of the 95th percentile of the inter-token latency
    output_tokens: float  # of a request, in the mean
    idle_w: float  # of all GPUs of a replica
    slowness: float
    thirst: float


class _Table(NamedTuple):
    """An engine over sequences in flight, (G,) each."""

    sequences: Floats
    token_hz: Floats
    power_w: Floats
    within: Floats  # share of tokens within the objective
    below: Floats  # (G, B + 1) share of tokens up to each border; the last is everything
    most: float  # sequences at once
    least_w: float  # at the fewest sequences that were measured


class Metrics(NamedTuple):
    """What a service's counters gained since they were last read, and what its gauges show."""

    seconds: float
    arrived: float
    tokens: float
    finished: float
    below: Floats  # (B + 1,) tokens up to each border
    waiting: float
    waiting_before: float
    running: float
    spent_s: float  # between tokens, all of them together


class Served(NamedTuple):
    """One step of all services, (S,) each."""

    tokens: Floats
    within: Floats  # tokens within the objective
    power_w: Floats  # of one replica
    waiting: Floats


def _kept(points: Sequence[Point]) -> list[Point]:
    """One point for each number of sequences, up to the most tokens a second."""
    best: dict[int, Point] = {}
    for point in points:
        batch = point.configuration.batch
        if batch not in best or point.throughput_hz > best[batch].throughput_hz:
            best[batch] = point
    rising = [best[batch] for batch in sorted(best)]
    top = max(range(len(rising)), key=lambda at: rising[at].throughput_hz)
    return rising[: top + 1]


def _cdf(border_s: float, quantiles_s: Floats) -> Floats:
    """Share of tokens up to a border, for rows of quantiles (G, 4); straight lines, the last tenth half as long again."""
    edges = np.column_stack((np.zeros(len(quantiles_s)), quantiles_s, 1.5 * quantiles_s[:, -1]))
    shares = (0.0, *_LEVELS, 1.0)
    found = np.zeros(len(edges))
    for at in range(len(shares) - 1):
        low, high = edges[:, at], edges[:, at + 1]
        part = np.clip((border_s - low) / np.maximum(high - low, 1e-9), 0.0, 1.0)
        found += part * (shares[at + 1] - shares[at])
    return found


def _table(engine: Engine, grid: int = _GRID) -> _Table:
    points = _kept(engine.points)
    batches = np.array([float(point.configuration.batch) for point in points])
    token_hz = np.array([point.throughput_hz for point in points]) / engine.slowness
    power_w = np.array([point.power_w or 0.0 for point in points]) * engine.thirst
    quantiles = np.array([[point.latency_s[level] for level in _LEVELS] for point in points]) * engine.slowness
    most = float(batches[-1])
    sequences = most * np.linspace(0.0, 1.0, grid) ** 2
    smooth_hz, smooth_w = np.zeros(grid), np.zeros(grid)
    within, below, weight = np.zeros(grid), np.zeros((grid, len(BORDERS_S) + 1)), np.zeros(grid)
    for away, share in _THREE:
        here = np.clip(sequences + away * np.sqrt(sequences), 0.0, most)
        given_hz = np.interp(here, (0.0, *batches), (0.0, *token_hz))
        loaded_w = np.interp(here, batches, power_w)
        smooth_hz += share * given_hz
        smooth_w += share * (engine.idle_w + (loaded_w - engine.idle_w) * -np.expm1(-here))
        rows = np.column_stack([np.interp(here, batches, quantiles[:, at]) for at in range(len(_LEVELS))])
        of_tokens = share * given_hz
        weight += of_tokens
        within += of_tokens * _cdf(engine.objective_s, rows)
        for at, border_s in enumerate(BORDERS_S):
            below[:, at] += of_tokens * _cdf(border_s, rows)
        below[:, -1] += of_tokens
    weight = np.maximum(weight, 1e-12)
    smooth_hz = np.maximum.accumulate(smooth_hz)
    # Nobody in flight gives no tokens; their shares go on from those of the fewest.
    within[0], below[0], weight[0] = within[1], below[1], weight[1]
    return _Table(sequences, smooth_hz, smooth_w, within / weight, below / weight[:, None], most, float(power_w[0]))


class Engines:
    """All services of a world; a step at a time."""

    def __init__(self, engines: Sequence[Engine], step_s: float) -> None:
        self.engines = list(engines)
        self.step_s = step_s
        count = len(self.engines)
        self._tables = [_table(engine) for engine in self.engines]
        self._length = np.array([engine.output_tokens for engine in self.engines])
        self._stack()
        self.inside = np.zeros(count)  # sequences, waiting ones too
        self.waiting = np.zeros(count)
        self._before = np.zeros(count)  # waiting when last read
        self._rows = np.arange(count)
        self._gained = np.zeros((5, count))  # seconds, arrived, tokens, finished, seconds of sequences in service
        self._below = np.zeros((count, len(BORDERS_S) + 1))

    def _stack(self) -> None:
        self._most = np.array([table.most for table in self._tables])
        self._hz = np.stack([table.token_hz for table in self._tables])
        self._w = np.stack([table.power_w for table in self._tables])
        self._within = np.stack([table.within for table in self._tables])
        self._shares = np.stack([table.below for table in self._tables])
        self._sequences = np.stack([table.sequences for table in self._tables])
        self._ends = self._sequences + self.step_s * self._hz / self._length[:, None]
        self.start_w = np.array([table.least_w for table in self._tables])

    def become(self, service: int, slowness: float) -> None:
        """From now on a service is so many times slower than it was measured."""
        self.engines[service] = self.engines[service]._replace(slowness=slowness)
        self._tables[service] = _table(self.engines[service])
        self._stack()

    def step(self, asked_hz: Floats, serving: Floats) -> Served:
        """One step with (S,) tokens a second asked for and (S,) replicas that serve."""
        arrived = asked_hz * self.step_s / self._length
        replicas = np.maximum(serving, 1.0)
        total = (self.inside + arrived) / replicas
        each = self._inside_after(total)
        low, share = self._places(each)
        rows = self._rows
        alive = serving > 0.0
        each_hz = self._read(self._hz, rows, low, share) * alive
        after = np.where(alive, each * serving, self.inside + arrived)
        finished = self.inside + arrived - after
        tokens = finished * self._length
        self.waiting = np.where(alive, np.maximum(0.0, each - self._most) * serving, after)
        self.inside = after
        below = self._shares[rows, low] * (1.0 - share)[:, None] + self._shares[rows, low + 1] * share[:, None]
        self._below += below * tokens[:, None]
        # Who is served waits for its next token all the time: the sum of the latencies is that of the sequences.
        held_s = np.where(alive, np.minimum(each, self._most) * serving, 0.0) * self.step_s
        for at, gained in enumerate((self.step_s, arrived, tokens, finished, held_s)):
            self._gained[at] += gained
        # An engine out of sequences gives no tokens, whatever the rounding.
        within = self._read(self._within, rows, low, share) * tokens * (each_hz > 0.0)
        return Served(tokens, within, self._read(self._w, rows, low, share), self.waiting)

    def _inside_after(self, total: Floats) -> Floats:
        """Sequences of a replica at the end of a step of which (S,) are inside without those that finish in it."""
        rows, last = self._rows, self._ends[:, -1]
        low = np.minimum((self._ends <= total[:, None]).sum(axis=1) - 1, _GRID - 2)
        x_low, y_low = self._ends[rows, low], self._sequences[rows, low]
        slope = (self._sequences[rows, low + 1] - y_low) / (self._ends[rows, low + 1] - x_low)
        return np.where(total < last, slope * (total - x_low) + y_low, self._most + total - last)

    def _places(self, each: Floats) -> tuple[NDArray[np.int64], Floats]:
        root = np.sqrt(np.minimum(each, self._most) / self._most) * (_GRID - 1)
        low = np.minimum(root.astype(np.int64), _GRID - 2)
        # Cells are read along the root; the lines between their ends are nearly straight in it.
        return low, root - low

    @staticmethod
    def _read(table: Floats, rows: NDArray[np.int64], low: NDArray[np.int64], share: Floats) -> Floats:
        return np.asarray(table[rows, low] * (1.0 - share) + table[rows, low + 1] * share)

    def metrics(self, service: int) -> Metrics:
        """What the counters gained since the last reading, which is now."""
        seconds, arrived, tokens, finished, held_s = self._gained[:, service].tolist()
        waiting = float(self.waiting[service])
        found = Metrics(
            seconds,
            arrived,
            tokens,
            finished,
            self._below[service].copy(),
            waiting,
            float(self._before[service]),
            float(self.inside[service]) - waiting,
            held_s,
        )
        self._gained[:, service] = 0.0
        self._below[service] = 0.0
        self._before[service] = waiting
        return found

    def largest_within(self, service: int) -> tuple[float, float]:
        """The most sequences of a replica, and their tokens a second, at which 95 % of tokens are within the objective."""
        table = self._tables[service]
        good = np.flatnonzero((table.within >= 0.95) | (table.sequences < 1.0))
        bad = np.flatnonzero((table.within < 0.95) & (table.sequences >= 1.0))
        last = int(bad[0]) - 1 if len(bad) else int(good[-1])
        return float(table.sequences[last]), float(table.token_hz[last])
