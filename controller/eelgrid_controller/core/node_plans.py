"""The plan of a node: the desired state that its agent brings about, derived from its allocations and the policy.

Owns which assignments can start, and what an agent needs of each. Must not know when plans are sent, nor how an agent
carries them out.
"""

from collections.abc import Iterator
from dataclasses import replace

from eelgrid_controller.queueing.checkpoint_interval import find_told_interval
from eelgrid_controller.state.attempts import must_stop
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.policy import get_node_budgets_w, is_pool_enforced
from eelgrid_protos.messages import Assignment, GpuSetting, NodePlan
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

# The bound of quantities.Watts.
_NODE_MOST_W = 1e6


def build_node_plan(record: NodeRecord, state: ClusterState) -> NodePlan:
    """Builds the desired state of a node; equal inputs give equal plans, in whatever order work was placed."""
    policy, workloads = state.policy, state.workloads
    assignments = tuple(_with_process(item, state) for item in _assignments(record))
    known = {gpu.uuid for gpu in record.inventory.gpus}
    limits_w = {
        uuid: limit_w
        for assignment in assignments
        if (limit_w := workloads[assignment.workload_id].power_limit_w) is not None
        for uuid in assignment.gpu_uuids
    }
    budget_w = get_node_budgets_w(policy).get(record.inventory.node_name)
    return NodePlan(
        node_name=record.inventory.node_name,
        epoch=record.plan_epoch,
        lease_s=policy.lease_s,
        enforce=is_pool_enforced(policy, record.inventory.pool),
        assignments=assignments,
        gpu_settings=tuple(GpuSetting(gpu_uuid=uuid, power_limit_w=limits_w[uuid]) for uuid in sorted(limits_w)),
        # A budget above the draw of any node counts as none.
        power_budget_w=None if budget_w is None else min(budget_w, _NODE_MOST_W),
        gpu_layouts=tuple(record.layouts[uuid] for uuid in sorted(record.layouts.keys() & known)),
    )


def _with_process(assignment: Assignment, state: ClusterState) -> Assignment:
    """Returns the assignment with the process that the agent runs, if it runs any."""
    workload = state.workloads[assignment.workload_id]
    if workload.spec.process is None:
        return assignment
    interval_s, every_s = find_told_interval(state, workload.workload_id)
    return replace(
        assignment,
        process=workload.spec.process,
        attempt=workload.attempt,
        replicas=workload.spec.replicas,
        stop=must_stop(workload),
        checkpoint_interval_s=interval_s,
        interrupted_every_s=every_s,
        run_as=workload.owner,
        limit_before_start=workload.limit_before_start,
    )


def _assignments(record: NodeRecord) -> Iterator[Assignment]:
    """Returns the assignments that can start: replicas in slices with the device of their slice."""
    opened = record.slice_devices()
    for key in sorted(record.assignments):
        item = record.assignments[key]
        if item.gpu_instance is None:
            yield item
        elif key in opened:
            yield replace(item, gpu_uuids=(opened[key],), gpu_milli=GPU_MILLI_WHOLE)
