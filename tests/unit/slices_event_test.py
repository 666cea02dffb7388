"""PartitionsPlanned on a state: what it may not say, and that nothing changes where it says it."""

import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_request
from tests.builders.partition import build_mig_node, build_partitioned_core, build_sliced_service, list_seats
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.cordons import DrainTerms
from eelgrid_controller.state.events import PartitionsPlanned, PlannedLayout, SlicedService
from eelgrid_controller.state.node_allocations import ContradictoryEvent
from eelgrid_protos.messages import DrainOutcome, GpuLayout, Placement, Slice, WantedInstance, WorkloadPhase


def alike(core: Core) -> None:
    """The state is sound, and comes back from a checkpoint as JSON."""
    check_invariants(core.state)
    back = ClusterState.load(json.loads(json.dumps(core.state.dump())))
    check_invariants(back)
    assert back.digest() == core.state.digest()


LAYOUT = GpuLayout(
    gpu_uuid="GPU-a-0",
    mig_enabled=True,
    instances=(WantedInstance(profile="3g.20gb", start=0), WantedInstance(profile="3g.20gb", start=4)),
)


def place(replica: int = 0, start: int = 0, **changes) -> Placement:
    where = Slice(profile="3g.20gb", start=start, gpu_milli=428)
    fields = {
        "replica": replica,
        "node_name": "a",
        "gpu_uuids": ("GPU-a-0",),
        "gpu_indexes": (0,),
        "gpu_instance": where,
    }
    return Placement(**(fields | changes))


def event(
    layout: GpuLayout | None = LAYOUT, *placements: Placement, key: str = "s", name: str = "a"
) -> PartitionsPlanned:
    return PartitionsPlanned(
        time_ns=9,
        layouts=() if layout is None else (PlannedLayout(node_name=name, layout=layout),),
        services=(SlicedService(workload_id=key, placements=placements or (place(),)),),
    )


@pytest.mark.parametrize(
    "wrong",
    [
        event(key="nobody"),
        event(key="whole"),
        event(name="nowhere"),
        event(None),
        event(LAYOUT, place(), place()),
        event(LAYOUT, place(0), place(1)),
        event(LAYOUT, place(start=1)),
        event(LAYOUT, place(gpu_instance=None)),
        event(LAYOUT, place(gpu_uuids=("GPU-a-0", "GPU-a-1"))),
        event(LAYOUT, place(gpu_uuids=("GPU-a-9",))),
        event(LAYOUT, place(node_name="nowhere")),
        event(replace(LAYOUT, gpu_uuid="GPU-a-9")),
        event(replace(LAYOUT, instances=(*LAYOUT.instances, WantedInstance(profile="1g.5gb", start=3)))),
        event(replace(LAYOUT, instances=(WantedInstance(profile="3g.20gb", start=1),))),
        event(replace(LAYOUT, instances=(WantedInstance(profile="9g", start=0),))),
        event(replace(LAYOUT, mig_enabled=False)),
        replace(event(), services=event().services * 2),
        replace(event(), services=(SlicedService(workload_id="s", placements=()),)),
    ],
)
def test_events_that_contradict_the_state_change_nothing(wrong):
    core = build_partitioned_core(build_mig_node("a"))
    core.submit(build_sliced_service("s", 20.0), now_ns=5)
    core.register_node(build_mig_node("z", pool=""), now_ns=6)
    core.submit(build_request(gpus=1, key="whole"), now_ns=7)
    before = core.state.digest()
    with pytest.raises(ContradictoryEvent):
        core.state.apply(wrong)
    assert core.state.digest() == before
    check_invariants(core.state)
    core.state.apply(event(LAYOUT, place(0), place(1, start=4)))
    alike(core)


def test_a_layout_cannot_leave_a_replica_without_its_slice():
    core = build_partitioned_core(build_mig_node("a"))
    core.submit(build_sliced_service("s", 20.0), now_ns=5)
    core.state.apply(event())
    smaller = replace(LAYOUT, instances=LAYOUT.instances[1:])
    with pytest.raises(ContradictoryEvent, match="not in the layout"):
        core.state.apply(replace(event(smaller), services=()))
    core.state.apply(event(smaller, place(7, start=4)))
    assert list_seats(core, "s") == [("GPU-a-0", "3g.20gb", 4)]
    alike(core)


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_drain_leaves_slices_to_the_partition_planner_unless_it_is_forced(is_forced):
    core = build_partitioned_core(build_mig_node("a"))
    core.submit(build_sliced_service("s", 20.0), now_ns=5)
    core.state.apply(event())
    terms = DrainTerms(deadline_ns=20, force=is_forced)
    (found,) = core.preview_drain("a", (), terms, now_ns=10)
    assert found.outcome is (DrainOutcome.REQUEUED if is_forced else DrainOutcome.STAYS)
    assert "eelctl partition plan" in found.reason
    core.cordon_node("a", drain=terms, now_ns=11)
    core.continue_drains(now_ns=20)
    assert core.workload("s").phase is (WorkloadPhase.PENDING if is_forced else WorkloadPhase.PLACED)
    alike(core)
