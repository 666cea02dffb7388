"""Invariants of the cluster state and of its node records, which hold after every event."""

from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.job_dependencies import list_parents
from eelgrid_controller.state.mig_layouts import find_layout_problem, find_slices_problem
from eelgrid_controller.state.node_allocations import NodeRecord, make_assignment
from eelgrid_protos.messages import WorkloadPhase
from eelgrid_protos.quantities import GPU_MILLI_WHOLE


class InvariantBroken(AssertionError):
    """The state contradicts itself, which is a bug."""


def check_invariants(state: ClusterState) -> None:
    """Checks every invariant; raises InvariantBroken."""
    expected = {name: {} for name in state.nodes}
    for key, workload in state.workloads.items():
        if (key in state.pending) != (workload.phase is WorkloadPhase.PENDING):
            raise InvariantBroken(f"{key} is {workload.phase.name} and in the queue or not at once")
        if workload.phase is WorkloadPhase.PLACED:
            for placement in workload.placements:
                expected[placement.node_name][key, placement.replica] = make_assignment(workload, placement)
    for name, record in state.nodes.items():
        if record.assignments != expected[name]:
            raise InvariantBroken(f"{name} does not hold what the workloads say")
        check_record(record)
    if state.doubted != {name for name, record in state.nodes.items() if not record.is_reported}:
        raise InvariantBroken(f"other agents are awaited than those of {sorted(state.doubted)}")
    gone = {key for key, item in state.workloads.items() if item.phase.is_ended}
    if gone != set(state._ended) | state._kept or len(state._ended) > state._ended_most:
        raise InvariantBroken("the list of ended workloads is not that of the workloads")
    live = [item for item in state.workloads.values() if not item.phase.is_ended]
    parents = {parent for item in live for parent in list_parents(item)}
    of_arrays = {one.spec.array.array_id for one in live if one.spec.array is not None} | parents
    needed = {key for key in state._kept if key in parents or _array_id(state.workloads[key]) in of_arrays}
    if state._kept & set(state._ended) or state._kept != needed or not all(map(state.is_known, parents)):
        raise InvariantBroken("ended workloads are kept for nothing, or one that live work depends on is gone")
    if any(parent not in state.dependents for parent in parents):
        raise InvariantBroken("live work is not among the dependents of what it depends on")

    elements = {}
    for item in state.workloads.values():
        if item.spec.array is not None:
            elements.setdefault(item.spec.array.array_id, []).append(item)
    for array_id, found in elements.items():
        if list(state.arrays.list_elements(array_id)) != [item.workload_id for item in found]:
            raise InvariantBroken(f"the elements of {array_id} are others than those of the workloads")
        status = state.arrays.summarize(array_id, state.workloads).array
        sums = status.pending + status.placed + status.succeeded + status.failed + status.cancelled
        is_live = any(not item.phase.is_ended for item in found)
        if sums != len(found) or state.arrays.is_live(array_id) != is_live or (is_live and sums != status.size):
            raise InvariantBroken(f"the phases of the elements of {array_id} do not sum to it")
        running = sum(item.phase is WorkloadPhase.PLACED for item in found)
        if status.running_most and running > status.running_most:
            raise InvariantBroken(f"{running} elements of {array_id} run at once")


def _array_id(workload):
    return None if workload.spec.array is None else workload.spec.array.array_id


def check_record(record: NodeRecord) -> None:
    """Checks that the sums of a node match its assignments; raises InvariantBroken."""
    name, held = record.inventory.node_name, list(record.assignments.values())
    by_gpu = {}
    for item in held:
        for uuid in item.gpu_uuids:
            by_gpu[uuid] = by_gpu.get(uuid, 0) + item.gpu_milli
    if by_gpu != record.gpu_milli or any(milli > GPU_MILLI_WHOLE for milli in by_gpu.values()):
        raise InvariantBroken(f"{name}: a GPU is held twice, or its sum is wrong")
    for uuid in {item.gpu_uuids[0] for item in held if item.gpu_instance is not None} | record.layouts.keys():
        gpu, layout = record.gpu(uuid), record.layouts.get(uuid)
        problem = find_slices_problem(layout, record.slices(uuid))
        if gpu is not None and layout is not None:
            problem = problem or find_layout_problem(gpu, layout)
        if problem:
            raise InvariantBroken(f"{name}: GPU {uuid}: {problem}")
        if any(uuid in item.gpu_uuids and item.gpu_instance is None for item in held):
            raise InvariantBroken(f"{name}: GPU {uuid} is cut, and held by what knows no slices")
    cpu_milli, memory_bytes = sum(item.cpu_milli for item in held), sum(item.memory_bytes for item in held)
    if (cpu_milli, memory_bytes) != (record.allocated_cpu_milli, record.allocated_memory_bytes):
        raise InvariantBroken(f"{name}: the sums of CPU or memory are wrong")
    beyond = cpu_milli > record.inventory.cpu_milli or memory_bytes > record.inventory.memory_bytes
    if beyond != record.overcommitted:
        raise InvariantBroken(f"{name}: holds more than it has though it did not shrink")
