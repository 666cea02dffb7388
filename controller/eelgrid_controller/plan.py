"""Plans: the whole of what a node should hold, made from its ledger and the policy.

Owns the shape of a NodePlan. Must not know how a plan travels or whether it
was applied. Epochs are the state's: they rise in `ClusterState.apply`.
"""

from collections.abc import Mapping

from eelgrid_controller.state import NodeRecord, enforces
from eelgrid_protos.messages import GpuSetting, NodePlan, Policy, Workload

__all__ = ["node_plan"]


def node_plan(record: NodeRecord, policy: Policy, workloads: Mapping[str, Workload]) -> NodePlan:
    """The desired state; equal records, policies and limits give equal plans, whatever the order of placing."""
    assignments = tuple(record.assignments[key] for key in sorted(record.assignments))
    limits_w = {
        uuid: limit_w
        for assignment in assignments
        if (limit_w := workloads[assignment.workload_id].power_limit_w) is not None
        for uuid in assignment.gpu_uuids
    }
    return NodePlan(
        node_name=record.inventory.node_name,
        epoch=record.plan_epoch,
        lease_s=policy.lease_s,
        enforce=enforces(policy, record.inventory.pool),
        assignments=assignments,
        gpu_settings=tuple(GpuSetting(gpu_uuid=uuid, power_limit_w=limits_w[uuid]) for uuid in sorted(limits_w)),
    )
