"""Quarantine: closes nodes and GPUs on which one job after the other fails as soon as it starts.

Decides which of the bad places (state.failure_streaks) are closed, and in which words. Must not know how the evidence is
weighed. An operator opens them again.

Bounds. No more than a tenth of the nodes are closed so at a time, and never the only one that takes work: what makes work
fail everywhere is not one machine. A single GPU of a node is closed only while another of it is open.
"""

from collections.abc import Iterator

from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.cordons import QUARANTINE_USER
from eelgrid_controller.state.events import NodeCordoned
from eelgrid_controller.state.failure_streaks import QUICK_S
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_protos.messages import AttemptStatus, Workload

_SHARE_MOST = 0.1


class Quarantine:
    """Closes places of one state, unless an operator has switched that off."""

    def __init__(self, state: ClusterState, *, is_on: bool = True) -> None:
        self._state, self._is_on = state, is_on

    def plan(self, workload: Workload, status: AttemptStatus, now_ns: int) -> Iterator[NodeCordoned]:
        """Yields the cordons, not yet applied, that follow from the end of a process."""
        place = next((one for one in workload.placements if one.replica == status.replica), None)
        if place is None or not self._is_on:
            return
        streaks = self._state.interruptions.streaks
        for bad in tuple(streaks.list_bad_places(place.node_name, place.gpu_uuids, now_ns)):
            record = self._state.nodes[place.node_name]
            if bad == place.node_name and self._may_close_node(record):
                yield self._cordon(record, bad, (), now_ns)
            elif bad != place.node_name and _may_close_gpu(record, bad):
                yield self._cordon(record, bad, (bad,), now_ns)

    def _cordon(self, record: NodeRecord, place: str, uuids: tuple[str, ...], now_ns: int) -> NodeCordoned:
        name, streaks = record.inventory.node_name, self._state.interruptions.streaks
        streak = streaks.find(place)
        count, share = len(streak.groups), streaks.estimate_share_elsewhere(name, streak, now_ns)
        reason = (
            f"quarantine: {count} different jobs in a row failed here within {QUICK_S:.0f} s of their start, and nothing "
            f"else ran; elsewhere {100.0 * share:.0f} % do"
        )
        return NodeCordoned(
            time_ns=now_ns, node_name=name, gpu_uuids=uuids, reason=reason, user=QUARANTINE_USER, drain=None
        )

    def _may_close_node(self, record: NodeRecord) -> bool:
        if record.cordon is not None:
            return False
        nodes = self._state.nodes.values()
        closed = sum(one.cordon is not None and one.cordon.is_quarantine for one in nodes)
        takes_work = any(one is not record and one.is_ready and not one.cordon_reason() for one in nodes)
        return takes_work and closed + 1 <= max(1, int(_SHARE_MOST * len(self._state.nodes)))


def _may_close_gpu(record: NodeRecord, gpu_uuid: str) -> bool:
    others = [gpu for gpu in record.inventory.gpus if gpu.uuid != gpu_uuid and gpu.uuid not in record.lost_gpus]
    is_open = record.cordon is None and gpu_uuid not in record.gpu_cordons
    return is_open and any(not record.cordon_reason(gpu) for gpu in others)
