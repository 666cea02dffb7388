"""A partition plan: which GPUs are cut how, which replica runs in which instance, and what is proven.

Owns the values and the way from counts to places. Must not know the search that
found the counts, nor which GPU of a fleet a plan's GPU becomes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.partition.exact import Proof, Solution
from eelgrid_controller.partition.fleet import Memory
from eelgrid_controller.partition.geometry import Layout
from eelgrid_controller.partition.options import WHOLE
from eelgrid_controller.partition.programme import Programme
from eelgrid_controller.profiles.points import Configuration

__all__ = ["PROVEN", "Gpu", "Instance", "Plan", "Replica", "drawn"]

PROVEN = 1e-6  # a gap that is the rounding of watts


class Replica(NamedTuple):
    """One replica of a service as one of its points measured it, or a training job (no configuration)."""

    owner: str
    number: int
    throughput_hz: float
    added_w: float
    configuration: Configuration | None


class Instance(NamedTuple):
    """A MIG instance with what runs in it."""

    profile: str  # its key in the catalogue
    start: int
    replica: Replica


class Gpu(NamedTuple):
    """One GPU in use: cut into instances, or whole for one replica, which may have several GPUs."""

    model: str
    instances: tuple[Instance, ...] = ()
    whole: Replica | None = None

    def replicas(self) -> Iterator[Replica]:
        """What runs on it."""
        yield from (instance.replica for instance in self.instances)
        if self.whole is not None:
            yield self.whole


@dataclass(frozen=True, slots=True)
class Plan:
    """Every GPU in use, and proofs: of the first objective, then of the second at the first's value."""

    gpus: tuple[Gpu, ...]
    proofs: tuple[Proof, ...]
    memory: Memory | None = None  # of a fleet's plan: what the next one starts from

    @property
    def proven(self) -> bool:
        """Whether no plan has less of the first objective."""
        return self.proofs[0].gap <= PROVEN


def drawn(programme: Programme, solution: Solution, memory: Memory | None = None) -> Plan:
    """The counts of a solution as GPUs with places.

    GPUs of one pattern are alike. Replicas are dealt in the order of their numbers, so that those of one service are
    spread over GPUs.
    """
    waiting = _waiting(programme, solution)
    gpus: list[Gpu] = []
    drawings: dict[tuple[int, tuple[int, ...]], Layout] = {}
    for pattern, count in enumerate(solution.gpus):
        pool = int(programme.pool[pattern])
        model, plan = programme.problem.pools[pool].model, programme.tilings[pool]
        cells = [(cell, int(places)) for cell, places in enumerate(programme.patterns[pattern]) if places]
        if any(programme.cells[cell].profile == WHOLE for cell, _ in cells):
            gpus += (Gpu(model, whole=replica) for replica in _taken(waiting[cells[0][0]], int(count)))
            continue
        assert plan is not None  # a pattern of slices comes from a tiling
        for _ in range(count):
            held = {programme.cells[cell].profile: _taken(waiting[cell], places) for cell, places in cells}
            counts = tuple(len(held.get(key, ())) for key in plan.keys)
            if (pool, counts) not in drawings:
                drawings[pool, counts] = plan.stand(counts)
            if any(counts):
                gpus.append(_cut(model, drawings[pool, counts], held))
    assert not any(waiting)  # places suffice: a row of the programme
    return Plan(tuple(gpus), solution.proofs, memory)


def _waiting(programme: Programme, solution: Solution) -> list[list[Replica]]:
    """Replicas by cell, the last to be dealt first; a replica of several GPUs stands once for each."""
    problem = programme.problem
    owners = [service.name for service in problem.services if service.rate_hz > 0.0]
    owners += [job.name for job in problem.jobs]
    numbers = [0] * len(owners)
    found: list[list[tuple[int, int, Replica]]] = [[] for _ in programme.cells]
    for index in solution.replicas.nonzero()[0]:
        option = programme.options[index]
        how = None if option.point is None else option.point.configuration
        for _ in range(int(solution.replicas[index])):
            number = numbers[option.demand]
            numbers[option.demand] += 1
            replica = Replica(owners[option.demand], number, option.throughput_hz, option.added_w, how)
            found[option.cell] += [(number, option.demand, replica)] * option.width
    return [
        [replica for _, _, replica in sorted(members, key=lambda item: item[:2], reverse=True)] for members in found
    ]


def _taken(waiting: list[Replica], count: int) -> list[Replica]:
    """The next so many, or as many as there are."""
    return [waiting.pop() for _ in range(min(count, len(waiting)))]


def _cut(model: str, layout: Layout, held: dict[str, list[Replica]]) -> Gpu:
    given = {key: iter(replicas) for key, replicas in held.items()}
    return Gpu(model, tuple(Instance(profile, start, next(given[profile])) for profile, start in layout))
