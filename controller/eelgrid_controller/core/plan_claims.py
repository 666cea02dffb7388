"""Claims of agents about the plans that they hold: detects nodes that hold more than the journal knows."""

from dataclasses import dataclass

from eelgrid_controller.state.events import NodeAhead, NodeHeard, NodeReconciled
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_protos.messages import UNKNOWN_WORKLOADS_MOST, Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanClaim:
    """The plan that an agent holds and what it holds by it, None where it cannot say."""

    epoch: int
    held: tuple[Assignment, ...] | None


def compare_claim(
    record: NodeRecord | None, node_name: str, claim: PlanClaim | None, *, now_ns: int
) -> tuple[NodeAhead | NodeHeard | NodeReconciled, ...]:
    """What follows from an agent's claim; `record` is None for a node that the journal does not know.

    Without a claim somebody else lists what runs there, and nothing is compared.
    """
    ahead = None if record is None else record.ahead
    is_doubted = record is not None and not record.is_reported
    heard = (NodeHeard(time_ns=now_ns, node_name=node_name),) if is_doubted else ()
    if claim is None or (claim.epoch <= known_epoch(record) and (ahead is None or claim.epoch < ahead.plan_epoch)):
        return heard
    unknown = claim.held if record is None or claim.held is None else record.find_unknown_assignments(claim.held)
    if unknown is not None and not unknown:
        if record is None:
            return ()
        return (NodeReconciled(time_ns=now_ns, node_name=node_name, plan_epoch=claim.epoch),)
    count = None if unknown is None else len(unknown)
    ids = tuple(dict.fromkeys(item.workload_id for item in unknown or ()))[:UNKNOWN_WORKLOADS_MOST]
    if ahead is not None and (ahead.plan_epoch, ahead.assignments, ahead.workload_ids) == (claim.epoch, count, ids):
        return heard
    return (
        NodeAhead(time_ns=now_ns, node_name=node_name, plan_epoch=claim.epoch, assignments=count, workload_ids=ids),
    )


def known_epoch(record: NodeRecord | None) -> int:
    """The highest epoch that the node's agent can have been given by this journal."""
    if record is None:
        return 0
    return record.plan_epoch if record.doubted_epoch is None else record.doubted_epoch
