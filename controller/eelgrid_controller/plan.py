"""Plans: the whole of what a node should hold, made from its ledger and the policy.

Owns the shape of a NodePlan. Must not know how a plan travels or whether it
was applied. A replica in a slice is told from the moment that its slice stands, with
the device to open: before, there is nothing to open. Epochs are the state's: they rise in `ClusterState.apply`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from eelgrid_controller.modes import enforces, node_budgets_w
from eelgrid_controller.state import NodeRecord
from eelgrid_protos.messages import Assignment, GpuSetting, NodePlan, Policy, Workload
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

__all__ = ["node_plan"]

# The bound of quantities.Watts.
_NODE_MOST_W = 1e6


def node_plan(record: NodeRecord, policy: Policy, workloads: Mapping[str, Workload]) -> NodePlan:
    """The desired state; equal records, policies and limits give equal plans, whatever the order of placing."""
    assignments = tuple(_assignments(record))
    known = {gpu.uuid for gpu in record.inventory.gpus}
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
        power_budget_w=_budget_w(node_budgets_w(policy).get(record.inventory.node_name)),
        gpu_layouts=tuple(record.layouts[uuid] for uuid in sorted(record.layouts.keys() & known)),
    )


def _budget_w(limit_w: float | None) -> float | None:
    """A node's budget as a plan can say it: what is more than any node draws binds nothing."""
    return None if limit_w is None else min(limit_w, _NODE_MOST_W)


def _assignments(record: NodeRecord) -> Iterator[Assignment]:
    """What can begin: replicas in slices with the device that stands there, which is theirs whole."""
    opened = record.opened()
    for key in sorted(record.assignments):
        item = record.assignments[key]
        if item.gpu_instance is None:
            yield item
        elif key in opened:
            yield replace(item, gpu_uuids=(opened[key],), gpu_milli=GPU_MILLI_WHOLE)
