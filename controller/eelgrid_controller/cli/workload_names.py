"""Workloads by name: wherever a command takes the id of a workload, its name does as well if it is unique.

An id comes first: a call is made with what was typed, and only if the controller knows no workload of that id is a
workload of that name looked for, among the live ones and then among those that ended. Several of one name are an error
that lists them. `last` is the workload of the calling user that was submitted last. An array counts as one; its elements are named by id. The API itself
knows ids alone.
"""

import getpass
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from eelgrid_controller.cli.connection import CliSettings, RequestRefused
from eelgrid_controller.cli.workload_listing import iterate_summaries
from eelgrid_protos.errors import ContractError
from eelgrid_protos.messages import GetWorkloadRequest, ListWorkloadsRequest, Workload, WorkloadPhase, WorkloadSummary

LIVE_PHASES = (WorkloadPhase.PENDING, WorkloadPhase.PLACED)
_ENDED_PHASES = tuple(phase for phase in WorkloadPhase if phase.is_ended)
# In place of an id: the workload of the calling user that was submitted last.
LAST = "last"
_SHOWN_MOST = 8

_Answer = TypeVar("_Answer")


def call_with_workload(client: Any, settings: CliSettings, typed: str, call: Callable[[str], _Answer]) -> _Answer:
    """Makes a call with an id, or with the id of the one workload of that name.

    Raises RequestRefused for a name that several workloads have; raises what the call raises if none has it.
    """
    from eelgrid_protos import faults

    try:
        return call(typed)
    except (faults.NotFound, ContractError):
        workload_id = _find_by_name(client, settings, typed)
        if workload_id is None or workload_id == typed:
            raise
    return call(workload_id)


def find_workload(client: Any, settings: CliSettings, typed: str) -> Workload:
    """Returns the workload of an id or of a name; raises as `call_with_workload` does."""
    return call_with_workload(client, settings, typed, partial(get_workload, client, settings))


def get_workload(client: Any, settings: CliSettings, workload_id: str) -> Workload:
    """Returns the workload of an id."""
    request = GetWorkloadRequest(workload_id=workload_id)
    found: Workload = client.get_workload(request, timeout=settings.timeout_s).workload
    return found


def _find_by_name(client: Any, settings: CliSettings, name: str) -> str | None:
    if name == LAST:
        return _find_last(client, settings)
    try:
        live = ListWorkloadsRequest(name_contains=name, phases=LIVE_PHASES, whole_arrays=True)
        ended = ListWorkloadsRequest(name_contains=name, phases=_ENDED_PHASES, whole_arrays=True)
        for request in (live, ended):
            rows = iterate_summaries(client, request, timeout_s=settings.timeout_s)
            found = [row for row in rows if row.name == name]
            if len(found) > 1:
                raise _ambiguous(name, found)
            if found:
                return str(found[0].workload_id)
    except ContractError:
        # No workload can have such a name.
        return None
    return None


def _find_last(client: Any, settings: CliSettings) -> str | None:
    request = ListWorkloadsRequest(user=getpass.getuser(), whole_arrays=True)
    last = None
    for row in iterate_summaries(client, request, timeout_s=settings.timeout_s):
        last = row
    return None if last is None else str(last.workload_id)


def _ambiguous(name: str, found: list[WorkloadSummary]) -> RequestRefused:
    listed = ", ".join(_describe(row) for row in found[:_SHOWN_MOST])
    more = f" and {len(found) - _SHOWN_MOST} more" if len(found) > _SHOWN_MOST else ""
    every = "" if found[0].phase in LIVE_PHASES else " --all"
    return RequestRefused(
        f"{len(found)} workloads are called {name!r}: {listed}{more}",
        f"give the id of one; `eelctl workloads --name {name}{every}` lists them",
    )


def _describe(row: WorkloadSummary) -> str:
    user = f" of {row.user}" if row.user else ""
    return f"{row.workload_id} ({row.phase.name.lower()}{user})"
