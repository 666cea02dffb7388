"""Allocations: which job of Flux holds which cores and GPUs of each rank, and the exact R of a placement.

Owns that no core and no GPU is held twice. Must not know the core, nor messages.

Theory. The core decides how much of which node a job gets, and on which GPUs; Flux wants the ids of cores as well, which
nothing else depends on: the lowest free ones are taken. A placement that is not free here, because something changed while
it was made, raises AllocationConflict and changes nothing: it is decided anew. Flux frees by rank, in parts while its
housekeeping runs, and says which part is the last; what it frees beyond what a job holds is ignored and told, and the last
part frees everything, so nothing is ever left over.

Sources: flux-framework/rfc 20, 27 (Free).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from eelgrid_controller.engines.flux.jobspecs import JobRequest
from eelgrid_controller.engines.flux.resource_sets import RankResources, ResourceSet, drop_instance_properties


class AllocationConflict(ValueError):
    """What was to be held is not free, or not there."""


class RankPlace(NamedTuple):
    """The place of one part of a job: a rank, and its GPUs there."""

    rank: int
    gpus: tuple[int, ...] = ()


class FluxAllocations:
    """What jobs hold of a pool."""

    def __init__(self, pool: ResourceSet) -> None:
        self.pool = pool
        self._held: dict[int, ResourceSet] = {}
        self._cores: dict[int, set[int]] = {}
        self._gpus: dict[int, set[int]] = {}

    def __contains__(self, job: object) -> bool:
        return job in self._held

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._held))

    def get(self, job: int) -> ResourceSet | None:
        """Returns what a job holds; None if it holds nothing."""
        return self._held.get(job)

    def get_free(self, rank: int) -> RankResources:
        """Returns what is free of a rank."""
        whole = self.pool.ranks[rank]
        cores, gpus = self._cores.get(rank, set()), self._gpus.get(rank, set())
        return replace(whole, cores=whole.cores - cores, gpus=whole.gpus - gpus)

    def hold(self, job: int, resources: ResourceSet) -> None:
        """Has a job hold resources; raises AllocationConflict if they are not there, or not free."""
        if job in self._held:
            raise AllocationConflict(f"job {job} holds resources already")
        for rank, one in resources.ranks.items():
            if rank not in self.pool.ranks:
                raise AllocationConflict(f"rank {rank} is not there")
            free = self.get_free(rank)
            if not (one.cores <= free.cores and one.gpus <= free.gpus):
                raise AllocationConflict(f"resources of rank {rank} are held by another job, or are not there")
        self._held[job] = resources
        for rank, one in resources.ranks.items():
            self._cores.setdefault(rank, set()).update(one.cores)
            self._gpus.setdefault(rank, set()).update(one.gpus)

    def free(self, job: int, resources: ResourceSet, *, is_final: bool) -> ResourceSet | None:
        """Frees a part of what a job holds, or with `is_final` all of it; returns what it holds still."""
        held = self._held.pop(job, None)
        if held is None:
            return None
        left = replace(held, ranks={}) if is_final else held.subtract(resources)
        for rank, one in held.ranks.items():
            rest = left.ranks.get(rank)
            self._cores[rank] -= one.cores - (rest.cores if rest else frozenset())
            self._gpus[rank] -= one.gpus - (rest.gpus if rest else frozenset())
        if not left.ranks:
            return None
        self._held[job] = left
        return left

    def assign(
        self, request: JobRequest, places: Iterable[RankPlace], *, down: frozenset[int], now_s: float
    ) -> ResourceSet:
        """Returns the R of a placement, without holding it; raises AllocationConflict.

        A job that states no duration ends when the instance does.
        """
        parts: dict[int, RankResources] = {}
        for place in places:
            if place.rank in down or place.rank not in self.pool.ranks:
                raise AllocationConflict(f"rank {place.rank} is down")
            parts[place.rank] = self._add_part(request, place, parts.get(place.rank))
        found = self.pool.select_ranks(parts)
        ends = (now_s + request.duration_s) if request.duration_s else self.pool.expiration
        return replace(
            found,
            ranks={rank: parts[rank] for rank in sorted(parts)},
            properties=drop_instance_properties(found.properties),
            nslots=request.slot_count,
            starttime=now_s,
            expiration=ends if ends > now_s else 0.0,
        )

    def _add_part(self, request: JobRequest, place: RankPlace, before: RankResources | None) -> RankResources:
        """Returns what is taken of a rank with one more part of a job."""
        whole, free = self.pool.ranks[place.rank], self.get_free(place.rank)
        taken = before or RankResources(whole.hostname, frozenset(), frozenset())
        if request.is_exclusive:
            if before is not None or free != whole:
                raise AllocationConflict(f"rank {place.rank} is in use")
            return whole
        cores, gpus = request.shape
        left = sorted(free.cores - taken.cores)
        if len(left) < cores:
            raise AllocationConflict(f"rank {place.rank} has {len(left)} free cores of {cores}")
        named = frozenset(place.gpus)
        if len(named) != gpus or not named <= free.gpus - taken.gpus:
            raise AllocationConflict(f"GPUs {sorted(named)} of rank {place.rank} are not free")
        return replace(taken, cores=taken.cores | frozenset(left[:cores]), gpus=taken.gpus | named)


def split_equally(resources: ResourceSet) -> tuple[tuple[int, int], Mapping[int, int]] | None:
    """Splits R into equal parts: the cores and GPUs of one, and how many each rank has; None if its ranks are not alike.

    Of all such parts it is the largest: what a job's slots are cannot be seen from R, and the fewest parts do.
    """
    amounts = {rank: (len(one.cores), len(one.gpus)) for rank, one in resources.ranks.items()}
    if not amounts:
        return None
    size = min(amounts.values())
    if not size[0]:
        return None
    for parts in range(1, size[0] + 1):
        if size[0] % parts or size[1] % parts:
            continue
        cores, gpus = size[0] // parts, size[1] // parts
        times = {rank: amount[0] // cores for rank, amount in amounts.items()}
        if all(amounts[rank] == (count * cores, count * gpus) for rank, count in times.items()):
            return (cores, gpus), times
    return None
