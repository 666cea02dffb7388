"""Quarantine: closes nodes and GPUs on which one job after the other fails as soon as it starts.

Decides which of the bad places (state.failure_streaks) are closed, and in which words. Must not know how the evidence is
weighed. An operator opens them again.

Bounds. No more than a tenth of the nodes (or one) are closed so at a time, and never the only one that takes work: what makes
work fail everywhere is not one machine. A node whose GPUs are all closed counts as closed. A place on which something has run
for a while, and still does, stays open: of a node those GPUs are closed on which nothing does.
"""

from collections.abc import Iterator

from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import NodeCordoned
from eelgrid_controller.state.failure_streaks import QUICK_S
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_protos.messages import AttemptState, AttemptStatus, Workload

# As whom the controller cordons.
USER = "eelgrid"
_SHARE_MOST = 0.1
_NS = 1e9


class Quarantine:
    """Closes places of one state, unless an operator has switched that off."""

    def __init__(self, state: ClusterState, *, is_on: bool = True) -> None:
        self._state, self._is_on = state, is_on

    def plan(self, workload: Workload, status: AttemptStatus, now_ns: int) -> Iterator[NodeCordoned]:
        """Yields the cordons, not yet applied, that follow from the end of a process."""
        place = workload.find_place(status.replica)
        if place is None or not self._is_on:
            return
        record, streaks = self._state.nodes[place.node_name], self._state.interruptions.streaks
        if record.cordon is not None:
            return
        bad = [uuid for uuid in ("", *place.gpu_uuids) if streaks.is_bad(place.node_name, uuid, now_ns=now_ns)]
        if "" in bad and self._may_close(record) and not self._runs_work(record, "", now_ns):
            yield self._cordon(record, "", now_ns)
            return
        closed = set[str]()
        for uuid in bad:
            if not uuid or uuid in record.gpu_cordons or self._runs_work(record, uuid, now_ns):
                continue
            if _has_open_gpu(record, closed | {uuid}) or self._may_close(record):
                closed.add(uuid)
                yield self._cordon(record, uuid, now_ns)

    def _cordon(self, record: NodeRecord, gpu_uuid: str, now_ns: int) -> NodeCordoned:
        name, streaks = record.inventory.node_name, self._state.interruptions.streaks
        streak = streaks.find(name, gpu_uuid)
        count, share = len(streak.groups), streaks.estimate_share_elsewhere(name, streak, now_ns)
        reason = (
            f"quarantine: {count} different jobs in a row failed here within {QUICK_S:.0f} s of their start, and nothing "
            f"else ran; elsewhere {100.0 * share:.0f} % do"
        )
        uuids = (gpu_uuid,) if gpu_uuid else ()
        return NodeCordoned(
            time_ns=now_ns, node_name=name, gpu_uuids=uuids, reason=reason, user=USER, is_quarantine=True
        )

    def _may_close(self, record: NodeRecord) -> bool:
        """Whether a node may take no more work, as far as the others are concerned."""
        others = [one for one in self._state.nodes.values() if one is not record]
        closed = sum(map(_is_closed, others))
        takes_work = any(one.is_schedulable and not _is_closed(one) for one in others)
        return takes_work and closed + 1 <= max(1, int(_SHARE_MOST * len(self._state.nodes)))

    def _runs_work(self, record: NodeRecord, gpu_uuid: str, now_ns: int) -> bool:
        """Whether a process has run for a while on a node, or on a GPU of it."""
        return any(
            one.replica == replica
            and one.state is AttemptState.RUNNING
            and now_ns - one.started_ns > QUICK_S * _NS
            and (not gpu_uuid or gpu_uuid in assignment.gpu_uuids)
            for (key, replica), assignment in record.assignments.items()
            for one in self._state.workloads[key].attempts
        )


def _is_closed(record: NodeRecord) -> bool:
    """Whether a node, or each of its GPUs, is in quarantine."""
    if record.cordon is not None:
        return record.cordon.is_quarantine
    gpus = record.inventory.gpus
    cordons = [record.gpu_cordons.get(gpu.uuid) for gpu in gpus]
    return bool(gpus) and all(one is not None and one.is_quarantine for one in cordons)


def _has_open_gpu(record: NodeRecord, closed: set[str]) -> bool:
    return any(
        gpu.uuid not in closed and gpu.uuid not in record.lost_gpus and not record.cordon_reason(gpu)
        for gpu in record.inventory.gpus
    )
