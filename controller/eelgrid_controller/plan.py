"""Plans: the whole of what a node should hold, made from its ledger and the policy.

Owns the shape of a NodePlan. Must not know how a plan travels or whether it
was applied. Epochs are the state's: they rise in `ClusterState.apply`.
"""

from eelgrid_controller.state import NodeRecord, enforces
from eelgrid_protos.messages import NodePlan, Policy

__all__ = ["node_plan"]


def node_plan(record: NodeRecord, policy: Policy) -> NodePlan:
    """The desired state; equal records and policies give equal plans, whatever the order of placing."""
    return NodePlan(
        node_name=record.inventory.node_name,
        epoch=record.plan_epoch,
        lease_s=policy.lease_s,
        enforce=enforces(policy, record.inventory.pool),
        assignments=tuple(record.assignments[key] for key in sorted(record.assignments)),
    )
