"""Shares of GPUs whose limit on interference closes the GPU to all others are charged with the whole GPU."""

import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request, build_spending_limit
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.interference import count_held_milli
from eelgrid_controller.state.queue_usage import count_charge
from eelgrid_protos import catalogue
from eelgrid_protos.messages import GpuSharing, Interference, Policy, Queue, QueueQuota, WorkloadPhase

HOUR_NS = 3600 * 10**9


def pairs(*found):
    return tuple(Interference(load=load, beside=beside, slowdown=slowdown) for load, beside, slowdown in found)


MEASURED = pairs(("a", "b", 0.1), ("b", "a", 0.3), ("c", "*", 0.05))


def share(load="", most=None, *, milli=100, replicas=1, **spec):
    return build_request(milli=milli, replicas=replicas, gpu_sharing=GpuSharing(load=load, slowdown_most=most), **spec)


@pytest.mark.parametrize(
    ("load", "most", "default", "held_milli"),
    [
        # Without a limit it keeps its share from others, and no more.
        ("a", None, None, 100),
        ("", None, None, 100),
        # Beside b it takes 1.1 times as long.
        ("a", 0.1, None, 100),
        ("a", 0.09, None, 1000),
        # It was never measured, so it bears nobody, whoever sets the limit.
        ("d", 5.0, None, 1000),
        ("", 0.5, None, 1000),
        ("", None, 0.5, 1000),
        ("a", None, 0.05, 1000),
        ("a", 0.2, 0.05, 100),
        # Measured beside any other.
        ("c", 0.05, None, 100),
        ("c", 0.0, None, 1000),
    ],
)
def test_a_limit_that_lets_no_load_join_holds_the_whole_gpu(load, most, default, held_milli):
    policy = Policy(interference=MEASURED, shared_slowdown_most=default)
    spec = share(load, most, replicas=3).spec
    assert count_held_milli(policy, spec) == held_milli
    assert count_charge(policy, spec)["gpu"] == 3 * held_milli


def test_whole_gpus_and_work_without_gpus_are_charged_as_they_ask():
    policy = Policy(interference=MEASURED, shared_slowdown_most=0.0)
    assert count_held_milli(policy, build_request(gpus=2).spec) == 1000
    assert count_held_milli(policy, build_request(gpus=0).spec) == 0


def queued(gpus=4, nominal_milli=1000, **policy):
    core = build_core(build_node("n", gpus=gpus))
    queue = Queue(name="q", quotas=(QueueQuota(resource="gpu", nominal=nominal_milli),))
    core.update_policy(replace(core.state.policy, queues=(queue,), **policy), now_ns=2)
    return core


def submit(core, key, load="", most=None, now_ns=3, **spec):
    core.submit(replace(share(load, most, queue="q", **spec), workload_id=key), now_ns=now_ns)
    return core.workload(key)


def charged_milli(core):
    return {key: charge.amounts["gpu"] for key, charge in core.state.queue_usage.charges.items()}


def test_a_quota_of_one_gpu_starts_one_share_that_bears_nobody():
    core = queued()
    assert submit(core, "first", "x", 0.0).phase is WorkloadPhase.PLACED
    second = submit(core, "second", "x", 0.0)
    assert second.phase is WorkloadPhase.PENDING
    assert second.reason.startswith("quota:")
    for key in ("first", "second"):
        core.cancel(key, now_ns=4)
    # What bears others is charged with its share still.
    assert {submit(core, f"tolerant-{at}", "x").phase for at in range(3)} == {WorkloadPhase.PLACED}
    assert charged_milli(core) == dict.fromkeys(("tolerant-0", "tolerant-1", "tolerant-2"), 100)
    check_invariants(core.state)


def test_pairs_that_are_told_later_change_what_running_and_waiting_work_is_charged_with():
    core = queued()
    assert submit(core, "first", "a", 0.2).phase is WorkloadPhase.PLACED
    assert submit(core, "second", "a", 0.2).phase is WorkloadPhase.PENDING
    assert charged_milli(core) == {"first": 1000}
    core.update_policy(replace(core.state.policy, interference=pairs(("a", "a", 0.1))), now_ns=4)
    assert charged_milli(core) == {"first": 100, "second": 100}
    assert core.workload("second").phase is WorkloadPhase.PLACED
    again = Core(ClusterState.load(json.loads(json.dumps(core.state.dump()))), catalogue.load_catalogue())
    assert again.state.queue_usage.charges == core.state.queue_usage.charges
    core.update_policy(replace(core.state.policy, interference=()), now_ns=5)
    # Both stay where they are, on one GPU, and neither lets others join.
    assert charged_milli(core) == {"first": 1000, "second": 1000}
    for key in ("first", "second"):
        core.cancel(key, now_ns=6)
    assert charged_milli(core) == {}
    assert core.state.queue_usage.history["q", ""].rate == (0, 0, 0)


def test_gpu_hours_count_the_whole_gpu_while_a_limit_closes_it():
    core = build_core(build_node("n", gpus=2))
    limit = build_spending_limit(gpu_hours=10.0, name="research")
    core.update_policy(replace(core.state.policy, spending=(limit,)), now_ns=1)
    asked = replace(share("a", 0.2, namespace="research"), workload_id="w")
    core.submit(asked, now_ns=HOUR_NS)

    def spent_h(now_ns):
        ((_, gpu_time),) = core.state.spending._gpu_times.items()
        gpu_time.advance(now_ns)
        return gpu_time.total / (1000 * HOUR_NS)

    assert spent_h(2 * HOUR_NS) == 1.0
    core.update_policy(replace(core.state.policy, interference=pairs(("a", "b", 0.1))), now_ns=2 * HOUR_NS)
    assert spent_h(12 * HOUR_NS) == pytest.approx(2.0)
    core.update_policy(replace(core.state.policy, interference=()), now_ns=12 * HOUR_NS)
    assert spent_h(13 * HOUR_NS) == pytest.approx(3.0)
