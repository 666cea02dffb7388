"""Nodes that hold more than the journal knows: how that is seen, and when it is over.

Owns the comparison of what an agent holds with what was placed. Must not know how agents speak, nor how the journal
came to lose anything.

Theory. A plan goes out only after the entries that it follows from are on disk. So an agent with a plan of a higher
epoch than its node has here is proof that the journal was rolled back. Epochs rise again after a loss, and could come
to where the agent is; so at each start of a controller the epoch of every node is kept as it was (`doubted_epoch`),
until its agent has spoken: what the agent holds cannot be newer than that, unless entries are lost. Until then nobody
knows what the node holds, and nothing new is placed there.

What a node holds beyond the journal runs on: its room is not free, and the next plan would end it. So nothing is
placed there and no plan is sent, until what it holds is known again or an operator gives it up. An agent that was
started anew has forgotten its plan, and then only an operator knows what runs there.
"""

from dataclasses import dataclass

from eelgrid_controller.events import NodeAhead, NodeHeard, NodeReconciled
from eelgrid_controller.ledger import NodeRecord
from eelgrid_protos.messages import UNKNOWN_WORKLOADS_MOST, Assignment

__all__ = ["PlanClaim", "compare_claim", "known_epoch"]


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
    is_doubted = record is not None and not record.is_heard
    heard = (NodeHeard(time_ns=now_ns, node_name=node_name),) if is_doubted else ()
    if claim is None or (claim.epoch <= known_epoch(record) and (ahead is None or claim.epoch < ahead.plan_epoch)):
        return heard
    unknown = claim.held if record is None or claim.held is None else record.unknown(claim.held)
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
