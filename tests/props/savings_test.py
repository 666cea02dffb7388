"""Savings against best fit are those of the naive twin that replays the same events, whatever happens to a cluster."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.cluster import GIB, build_core, build_node, build_request
from tests.naive_savings import POWER, Twin
from tests.state_invariants import check_record

from eelgrid_controller.energy.savings import BEST_FIT, BOTH, EELGRID, InitialCluster, PlacementSavings
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_protos.faults import Fault
from eelgrid_protos.messages import LatencyMetric, LatencyObjective, ServicePromise, WorkloadKind, WorkloadPhase

NODES = {
    "a": build_node("a", gpus=2, cpu=40),
    "b": build_node("b", gpus=4, model="T4", cpu=70),
    "c": build_node("c", gpus=0, cpu=33, memory_gib=64),
    "d": build_node("d", gpus=2, model="G3", cpu=96),
}
PROMISE = ServicePromise(
    profile="chat", objectives=(LatencyObjective(metric=LatencyMetric.RESPONSE, latency_s=1.0),), replicas_most=6
)
NAMES = st.sampled_from("abcd")
NUMBERS = st.integers(0, 12)
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.integers(1, 40),
            st.sampled_from((0, 300, 700, 1000, 2000)),
            st.integers(1, 3),
            st.integers(0, 1),
            st.sampled_from(((), ("G2",), ("T4", "G3"))),
            st.booleans(),
        ),
        st.tuples(
            st.just("submit"),
            st.integers(1, 40),
            st.sampled_from((0, 300, 700, 1000)),
            st.just(1),
            st.just(0),
            st.just(()),
            st.just(False),
        ),
        st.tuples(st.just("cancel"), NUMBERS),
        st.tuples(st.just("cancel"), NUMBERS),
        st.tuples(st.just("scale"), NUMBERS, st.integers(1, 5)),
        st.tuples(st.just("lose"), NAMES),
        st.tuples(st.just("join"), NAMES),
        st.tuples(st.just("gpu"), st.sampled_from("abd"), st.integers(0, 1), st.booleans()),
        st.tuples(st.just("others"), NAMES, st.integers(0, 30), st.integers(0, 2), st.booleans(), st.booleans()),
        st.tuples(st.just("limit"), NUMBERS),
    ),
    min_size=15,
    max_size=40,
)


def done(core, step, now_ns):
    """The events of a step; none where the core refuses it."""
    keys = list(core.state.workloads)
    match step:
        case ("submit", cpu, milli, replicas, priority, models, needs):
            promised = {"kind": WorkloadKind.INFERENCE_SERVICE, "service": PROMISE} if replicas < 3 else {}
            wanted = build_request(
                cpu=cpu,
                gpus=2 if milli == 2000 else int(milli > 0),
                milli=min(milli, 1000),
                replicas=replicas,
                priority=priority,
                models=models if milli else (),
                required_traits=("zone",) if needs else (),
                **promised,
            )
            return core.submit(wanted, now_ns=now_ns).events
        case ("cancel", number):
            return core.cancel(keys[number % len(keys)], now_ns=now_ns).events
        case ("scale", number, replicas):
            return core.scale(keys[number % len(keys)], replicas, now_ns=now_ns).events
        case ("lose", name):
            return core.mark_node_lost(name, now_ns=now_ns).events
        case ("join", name):
            return core.register_node(NODES[name], now_ns=now_ns).events
        case ("gpu", name, index, is_lost):
            turn = core.mark_gpu_lost if is_lost else core.mark_gpu_returned
            return turn(name, f"GPU-{name}-{index}", now_ns=now_ns).events
        case ("others", name, cpu, gpus, has, closed):
            others = ExternalUsage(
                cpu_milli=1000 * cpu,
                memory_bytes=GIB,
                gpu_count=gpus,
                traits=("zone",) if has else (),
                closed="cordoned" if closed else "",
            )
            return core.update_external_usage(name, others, now_ns=now_ns).events
        case ("limit", number):
            return core.set_limit(keys[number % len(keys)], 100.0, now_ns=now_ns).events


def alike(savings, twin):
    """Every place, every count and the watts of both plans."""
    figures = savings.figures()
    for key, replica in twin.here.keys() | twin.there.keys():
        place = savings._best_fit.get_place(key, replica)
        assert (place and place[:2]) == twin.there.get((key, replica)), (key, replica)
    both = twin.here.keys() & twin.there.keys()
    alone = {EELGRID: twin.here.keys() - both, BEST_FIT: twin.there.keys() - both, BOTH: both}
    assert figures.replicas == {where: len(found) for where, found in alone.items()}
    for where, found in alone.items():
        asked = [twin.specs[key].request for key, _ in found]
        assert figures.gpu_milli[where] == sum(one.gpu_count * one.gpu_milli for one in asked)
    assert figures.power_w == {BEST_FIT: twin.power_w(twin.there), EELGRID: twin.power_w(twin.here)}
    assert len(savings._best_fit.waiting) == len(twin.waits)


@settings(max_examples=50, deadline=None)
@given(STEPS, st.integers(1, 4))
def test_both_plans_are_those_of_the_naive_twin(steps, turn):
    core = build_core()
    savings, twin = PlacementSavings(InitialCluster.from_state(core.state, 0), POWER.gpu), Twin()
    energy_j, now_ns = dict.fromkeys((BEST_FIT, EELGRID), 0.0), 0
    for number, step in enumerate([*(("join", name) for name in "ac"), *steps], 1):
        try:
            events = done(core, step, number * 10**9)
        except (Fault, ZeroDivisionError):
            continue
        for event in events:
            savings.follow_event(event)
            twin.follow(event)
        if number % turn == 0:
            for plan, power_w in savings.figures().power_w.items():
                energy_j[plan] += power_w * (number - now_ns)
            now_ns = number
            savings.advance_to(number * 10**9)
            alike(savings, twin)
            assert savings.figures().energy_j == energy_j
    for record in savings._best_fit.nodes.values():
        check_record(record)


@settings(max_examples=25, deadline=None)
@given(STEPS)
def test_begun_again_it_is_what_the_live_work_comes_to_in_the_order_of_submission(steps):
    core = build_core(NODES["a"], NODES["d"])
    for number, step in enumerate(steps, 2):
        try:
            done(core, step, number)
        except (Fault, ZeroDivisionError):
            continue
    savings, twin = PlacementSavings(InitialCluster.from_state(core.state, 5), POWER.gpu), Twin()
    for name, record in core.state.nodes.items():
        twin.inventories[name], twin.others[name] = record.inventory, record.others
        twin.lost |= {*record.lost_gpus, *([] if record.is_ready else [name])}
    for key, workload in core.state.workloads.items():
        if workload.phase is WorkloadPhase.CANCELLED:
            continue
        twin.specs[key], twin.numbers[key] = workload.spec, len(twin.numbers)
        standing = tuple(one.replica for one in workload.placements)
        twin.waits.append((key, standing or tuple(range(workload.spec.replicas))))
        twin.try_all(only=twin.waits[-1])
        twin.stand(key, workload.placements)
    twin.try_all()
    alike(savings, twin)
    assert savings.figures().began_ns == 5
