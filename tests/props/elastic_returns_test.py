"""Returns of elastic jobs: work starts if it would without all growth, and no job shrinks that would not have to."""

import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.cluster import build_core, build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadScaled, event_from_plain, event_to_plain
from eelgrid_controller.state.node_allocations import ContradictoryEvent, make_assignment
from eelgrid_protos import catalogue
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import MeasuredPoint, TrainingPromise, WorkloadKind, WorkloadPhase

MOST = 6
PROMISE = TrainingPromise(profile="p", slowdown_most=0.1, replicas_least=1, replicas_most=MOST)


@st.composite
def fleets(draw):
    nodes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    jobs = st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, MOST), st.integers(1, 20))
    sizes = draw(st.sets(st.integers(1, MOST)))
    others = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40)), max_size=2))
    return nodes, draw(st.lists(jobs, min_size=1, max_size=4)), sizes, others


def begin(fleet):
    nodes, jobs, sizes, others = fleet
    core = build_core(*(build_node(f"n{n}", gpus=gpus, cpu=48) for n, gpus in enumerate(nodes)))
    points = [MeasuredPoint(profile="p", gpu_model="G2", gpus=g * n, throughput_hz=n) for n in sizes for g in (1, 2)]
    if points:
        core.record_measurements(tuple({one.gpus: one for one in points}.values()), now_ns=2)
    for number, (gpus, cpu) in enumerate(others):
        submit(core, f"other{number}", gpus=gpus, cpu=cpu)
    for number, (gpus, begun, grown, cpu) in enumerate(jobs):
        key = f"job{number}"
        kind = WorkloadKind.TRAINING_JOB
        submit(core, key, gpus=gpus, cpu=cpu, replicas=begun, kind=kind, training=PROMISE)
        if key in core.state.workloads and core.workload(key).placements and grown > begun:
            core.scale(key, grown, now_ns=4)
    return core


def submit(core, key, *, now_ns=3, **spec):
    """Submits what some node could ever hold; work that waits is taken back, so that only the last submission waits."""
    with contextlib.suppress(InvalidArgument):
        core.submit(build_request(key, **spec), now_ns=now_ns)
        if core.workload(key).phase is WorkloadPhase.PENDING:
            core.cancel(key, now_ns=now_ns)


def smallest(core, key):
    """The replicas that a job has at the least: the smallest measured size that is no smaller than at its submission."""
    workload = core.workload(key)
    return workload.replicas_begun or workload.spec.replicas


@given(
    fleet=fleets(),
    asked=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 30)),
)
@settings(deadline=None, max_examples=250)
def test_work_starts_if_it_would_without_what_jobs_have_grown_by_and_they_keep_what_it_does_not_need(fleet, asked):
    gpus, replicas, cpu = asked
    core = begin(fleet)
    jobs = [key for key in sorted(core.state.workloads) if key.startswith("job") and core.workload(key).placements]
    before = {key: core.workload(key).placements for key in jobs}
    twin = Core(ClusterState.load(core.state.dump()), catalogue.load_catalogue())
    try:
        step = core.submit(build_request("asked", gpus=gpus, cpu=cpu, replicas=replicas), now_ns=10)
    except InvalidArgument:
        return
    check_invariants(core.state)
    for event in step.events:
        kind, body = event_to_plain(event)
        assert event_from_plain(kind, body) == event
    shrunk = {one.workload_id: one for one in step.events if isinstance(one, WorkloadScaled)}
    is_placed = core.workload("asked").phase is WorkloadPhase.PLACED
    # A twin from which all of it was taken by hand.
    for key in jobs:
        if len(before[key]) > smallest(twin, key):
            twin.state.apply(
                WorkloadScaled(
                    time_ns=9,
                    workload_id=key,
                    released=tuple(sorted(place.replica for place in before[key][smallest(twin, key) :])),
                )
            )
    alone = Core(ClusterState.load(twin.state.dump()), catalogue.load_catalogue())
    alone.submit(build_request("asked", gpus=gpus, cpu=cpu, replicas=replicas), now_ns=10)
    assert is_placed == (alone.workload("asked").phase is WorkloadPhase.PLACED)
    if not is_placed:
        assert not shrunk
        return
    for key, event in shrunk.items():
        kept = core.workload(key).placements
        assert len(kept) >= smallest(core, key)
        assert kept[0] == before[key][0]
        # With all that this job released it could not have its place.
        records = {name: record.copy() for name, record in core.state.nodes.items()}
        workload = core.workload(key)
        try:
            for place in before[key]:
                if place.replica in event.released:
                    records[place.node_name].allocate(make_assignment(workload, place))
        except ContradictoryEvent:
            continue
        raise AssertionError(f"{key} shrank for nothing")
