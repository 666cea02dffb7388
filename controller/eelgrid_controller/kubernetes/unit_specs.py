"""One request to the core for all members of a unit.

Owns how members that ask for different amounts become one. Must not know members.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from eelgrid_protos.messages import ResourceRequest, WorkloadSpec

__all__ = ["unit_spec"]

_TRAITS_MOST = 16


def unit_spec(specs: Sequence[WorkloadSpec], traits: Iterable[str]) -> WorkloadSpec:
    """The first's, with a replica for each; members that ask for different amounts each get the most of any."""
    most = specs[0].request
    for spec in specs[1:]:
        most = _most(most, spec.request)
    return replace(
        specs[0], request=most, replicas=len(specs), required_traits=tuple(sorted(set(traits))[:_TRAITS_MOST])
    )


def _most(one: ResourceRequest, other: ResourceRequest) -> ResourceRequest:
    if one == other:
        return one
    return replace(
        one if one.gpu_count else other,
        cpu_milli=max(one.cpu_milli, other.cpu_milli),
        memory_bytes=max(one.memory_bytes, other.memory_bytes),
        gpu_count=max(one.gpu_count, other.gpu_count),
        gpu_milli=max(one.gpu_milli, other.gpu_milli),
    )
