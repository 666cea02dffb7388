"""Nodes that hold more than the journal knows: how that is seen, and when it is over.

Owns the comparison of what an agent holds with what was placed. Must not know how agents speak, nor how the journal
came to lose anything.

Theory. A plan goes out only after the entries that it follows from are on disk. So an agent with a plan of a higher
epoch than this controller has given it, and than its journal had when it began, is proof that the journal was rolled
back. What the node holds beyond the journal runs on: its room is not free, and the next plan would end it. So
nothing is placed there and no plan is sent, until what it holds is known again or an operator gives it up. An agent
that was started anew has forgotten its plan, and then only an operator knows what runs there.

Epochs rise again after a loss. Where the loss is known, each node's epoch of that moment is kept until its agent has
spoken, over restarts; where a whole directory was put back unseen, only within the life of the controller.
"""

from dataclasses import dataclass

from eelgrid_controller.events import NodeAhead, NodeReconciled
from eelgrid_controller.ledger import NodeRecord
from eelgrid_protos.messages import UNKNOWN_WORKLOADS_MOST, Assignment

__all__ = ["PlanClaim", "compared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanClaim:
    """The plan that an agent holds and what it holds by it, None where it cannot say.

    `is_beyond`: of an epoch that this controller never gave it.
    """

    epoch: int
    held: tuple[Assignment, ...] | None
    is_beyond: bool


def compared(
    record: NodeRecord | None, node_name: str, claim: PlanClaim | None, *, now_ns: int
) -> tuple[NodeAhead | NodeReconciled, ...]:
    """What follows from an agent's claim; `record` is None for a node that the journal does not know."""
    ahead = None if record is None else record.ahead
    doubted_epoch = None if record is None else record.doubted_epoch
    if claim is None:
        return ()
    is_beyond = claim.is_beyond or (doubted_epoch is not None and claim.epoch > doubted_epoch)
    if not (is_beyond or (ahead is not None and claim.epoch >= ahead.plan_epoch)):
        if ahead is not None or doubted_epoch is None:
            return ()
        return (NodeReconciled(time_ns=now_ns, node_name=node_name, plan_epoch=claim.epoch),)
    unknown = claim.held if record is None or claim.held is None else record.unknown(claim.held)
    if unknown is not None and not unknown:
        if record is None:
            return ()
        return (NodeReconciled(time_ns=now_ns, node_name=node_name, plan_epoch=claim.epoch),)
    count = None if unknown is None else len(unknown)
    ids = tuple(dict.fromkeys(item.workload_id for item in unknown or ()))[:UNKNOWN_WORKLOADS_MOST]
    if ahead is not None and (ahead.plan_epoch, ahead.assignments, ahead.workload_ids) == (claim.epoch, count, ids):
        return ()
    return (
        NodeAhead(time_ns=now_ns, node_name=node_name, plan_epoch=claim.epoch, assignments=count, workload_ids=ids),
    )
