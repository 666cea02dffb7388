"""Which Slurm job holds which device, from the folder that a prolog keeps.

Owns how the folder is read: one file for each device, named `0` for device 0
or `2.1` for GPU instance 1 of device 2, a job id on each line. Must not know
who writes it; the folder is an argument.

Theory. A prolog writes a job's id and an epilog takes it away, so an epilog
that failed leaves a job that ended long ago. Nothing here can tell; what such
a job would be charged is told apart by its having no process.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from eelgrid_agent.attribution.allocation import Allocation, AllocationSource
from eelgrid_agent.attribution.device_ids import find_mapped
from eelgrid_agent.attribution.owner import Owner, OwnerKind
from eelgrid_protos.messages import Gpu

__all__ = ["jobs_in", "slurm_allocations"]

FILES_MOST = 1024
JOBS_PER_FILE_MOST = 256
_FILE_BYTES_MOST = 16 * 1024
_JOB_LENGTH_MOST = 64


def jobs_in(text: str) -> tuple[str, ...]:
    """The job ids of one file, once each, in its order; a line that is no id is passed over."""
    lines = (line.strip() for line in text.splitlines()[:JOBS_PER_FILE_MOST])
    jobs = (line for line in lines if line and len(line) <= _JOB_LENGTH_MOST and line.isascii())
    return tuple(dict.fromkeys(job for job in jobs if job.replace("_", "").replace("+", "").isalnum()))


def slurm_allocations(folder: Path, gpus: Iterable[Gpu]) -> tuple[Allocation, ...] | None:
    """Who holds what, by the folder; None where there is no folder to ask."""
    devices = tuple(gpus)
    found: list[Allocation] = []
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for count, entry in enumerate(entries) if count < FILES_MOST)
        for name in names:
            place = find_mapped(name, devices)
            if place is None:
                continue
            with (folder / name).open("rb") as file:
                jobs = jobs_in(file.read(_FILE_BYTES_MOST).decode("ascii", "replace"))
            found.extend(
                Allocation(place=place, owner=Owner(kind=OwnerKind.SLURM, job=job), source=AllocationSource.SLURM)
                for job in jobs
            )
    except OSError:
        # A file that goes away while we read is an epilog at work; the next look is whole.
        return None
    return tuple(found)
