"""Run-time estimates, promised starts and reservations: what is expected, what is told, and why a promise moves."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request, drop_quotes
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.queueing.runtime_estimates import defer_overrun, estimate_runtime
from eelgrid_controller.state import runtime_history
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.cordons import DrainTerms
from eelgrid_controller.state.events import WorkloadPromised, event_to_plain
from eelgrid_protos.catalogue import load_catalogue
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    BackfillMode,
    JobDeadline,
    JobSchedule,
    MeasuredPoint,
    Mobility,
    Policy,
    ProcessSpec,
    Queue,
    QueueQuota,
    Reservation,
    RuntimeSource,
    TrainingPromise,
    WorkloadKind,
    WorkloadPhase,
)

S = 1_000_000_000
EASY = BackfillMode.EASY


def submit(core, key, gpus, runs_s=None, now_s=1, **spec):
    request = build_request(key, name=spec.pop("name", key), gpus=gpus, expected_runtime_s=runs_s, **spec)
    return core.submit(request, now_ns=now_s * S).result


def change(core, now_s=1, **fields):
    return core.update_policy(replace(core.state.policy, **fields), now_ns=now_s * S)


def promises(step):
    return [event for event in step.events if isinstance(event, WorkloadPromised)]


def settle(core, now_s):
    events = []
    while core.has_backlog:
        events += core.retry(now_ns=now_s * S).events
    return events


def build_process(limit_s=0.0):
    return ProcessSpec(argv=("true",), working_directory="/", time_limit_s=limit_s, grace_s=5.0)


# Estimates


@pytest.mark.parametrize(
    ("stated_s", "limit_s", "expected"),
    [
        (60.0, 0.0, (60.0, RuntimeSource.USER)),
        (60.0, 100.0, (60.0, RuntimeSource.USER)),
        (500.0, 100.0, (105.0, RuntimeSource.TIME_LIMIT)),
        (None, 100.0, (105.0, RuntimeSource.TIME_LIMIT)),
        (None, 0.0, (900.0, RuntimeSource.DEFAULT)),
    ],
)
def test_what_is_stated_goes_before_the_limit_and_the_default(stated_s, limit_s, expected):
    core = build_core(build_node("a", runs_processes=True))
    change(core, backfill=EASY, default_runtime_s=900.0)
    process = build_process(limit_s)
    workload = submit(core, "w", 1, stated_s, process=process, mobility=Mobility.FIXED)
    found = estimate_runtime(workload, core.state)
    assert (found.expected_s, found.source) == expected
    assert core.explain_workload("w").runtime == found


def measure(core, gpus, rate_hz, model="G2", **running):
    point = MeasuredPoint(profile="resnet", gpu_model=model, gpus=gpus, throughput_hz=rate_hz, **running)
    core.record_measurements((point,), now_ns=1 * S)


def expect(core, key):
    found = core.explain_workload(key).runtime
    return None if found is None else (found.expected_s, found.source)


def test_a_job_that_states_its_work_is_expected_to_take_as_long_as_its_profile_says_on_as_many_gpus():
    core = build_core(build_node("a", gpus=8))
    training = TrainingPromise(profile="resnet", work=1000.0, deadline_ns=10**15)
    trains = {"kind": WorkloadKind.TRAINING_JOB, "training": training}
    submit(core, "unmeasured", 1, **trains)
    measure(core, 2, 4.0)
    measure(core, 2, 3.0, power_limit_w=100.0)
    measure(core, 2, 2.0, model="P100")
    measure(core, 4, 7.0)
    submit(core, "running", 2, models=("G2",), **trains)
    submit(core, "any", 8, **trains)
    submit(core, "two", 2, now_s=2, **trains)
    submit(core, "stated", 2, 60.0, now_s=2, **trains)
    assert expect(core, "unmeasured") is None
    assert expect(core, "running") == (250.0, RuntimeSource.PROFILE)
    assert expect(core, "any") is None, "nothing was measured on eight"
    # Of the models that it may get the slowest; what was measured at another limit does not count.
    assert expect(core, "two") == (500.0, RuntimeSource.PROFILE)
    assert expect(core, "stated") == (60.0, RuntimeSource.USER)
    # What a running job was expected to take when it started stays, and is in a checkpoint.
    measure(core, 2, 8.0)
    assert expect(core, "running") == (250.0, RuntimeSource.PROFILE)
    assert expect(core, "two") == (500.0, RuntimeSource.PROFILE)
    state = core.state
    again = ClusterState.load(state.dump())
    assert again.digest() == state.digest()
    assert estimate_runtime(again.workloads["running"], again).expected_s == 250.0
    core.cancel("running", now_ns=3 * S)
    core.cancel("two", now_ns=3 * S)
    assert "profiled" not in core.state.dump().get("runtimes", {})


def test_a_profile_is_enough_for_a_promised_start():
    core = build_core(build_node("a", gpus=2))
    measure(core, 2, 4.0)
    training = TrainingPromise(profile="resnet", work=1000.0, deadline_ns=10**15)
    submit(core, "running", 2, kind=WorkloadKind.TRAINING_JOB, training=training)
    promise = submit(core, "waits", 2).promise
    assert promise.start_ns == 251 * S


def test_work_like_what_has_ended_is_expected_to_take_as_long_as_most_of_it_did():
    core = build_core(build_node("a", gpus=8))
    change(core, backfill=EASY)
    for number, ran_s in enumerate((10, 20, 30)):
        submit(core, f"h{number}", 1, name="train", user="ada")
        assert core.explain_workload(f"h{number}").runtime is None
        core.cancel(f"h{number}", now_ns=(1 + ran_s) * S)
    submit(core, "next", 1, name="train", user="ada", now_s=50)
    submit(core, "other", 1, name="train", user="bob", now_s=50)
    submit(core, "service", 1, name="train", user="ada", kind=WorkloadKind.INFERENCE_SERVICE, now_s=50)
    found = core.explain_workload("next").runtime
    assert (found.expected_s, found.source) == (30.0, RuntimeSource.HISTORY)
    assert core.explain_workload("other").runtime is None
    assert core.explain_workload("service").runtime is None, "it does not end by itself"
    # What it was expected to take when it started stays.
    submit(core, "h3", 1, name="train", user="ada", now_s=51)
    core.cancel("h3", now_ns=5000 * S)
    assert core.explain_workload("next").runtime == found
    state = core.state
    assert ClusterState.load(state.dump()).digest() == state.digest()
    change(core, backfill=BackfillMode.NONE)
    assert "runtimes" not in core.state.dump()


def test_the_history_is_bounded(monkeypatch):
    monkeypatch.setattr(runtime_history, "GROUPS_MOST", 3)
    core = build_core(build_node("a"))
    change(core, backfill=EASY)
    for number in range(60):
        submit(core, f"w{number}", 1, name=f"n{number % 5 if number < 55 else 0}")
        core.cancel(f"w{number}", now_ns=(2 + number) * S)
    groups = core.state.dump()["runtimes"]["groups"]
    assert len(groups) == 3
    assert max(map(len, groups)) <= 2 + runtime_history.RUN_TIMES_MOST


def test_without_a_mode_in_the_policy_the_journal_is_as_older_versions_read_it():
    core = build_core(build_node("a"))
    step = core.submit(build_request("w"), now_ns=S)
    core.cancel("w", now_ns=2 * S)
    assert "runtimes" not in core.state.dump()
    assert all("expected_runtime_s" not in str(event_to_plain(event)) for event in step.events)
    body = event_to_plain(core.update_policy(Policy(), now_ns=3 * S).events[0])[1]
    assert {"backfill", "default_runtime_s", "reservations"}.isdisjoint(body["policy"])


def test_an_overrun_counts_as_ending_now_then_at_the_next_tenth():
    assert defer_overrun(0, 1000 * S, 999 * S) == 1000 * S
    assert defer_overrun(0, 1000 * S, 1060 * S) == 1060 * S
    assert {defer_overrun(0, 1000 * S, now_s * S) for now_s in range(1061, 1100)} == {1100 * S}
    assert defer_overrun(0, 1000 * S, 1100 * S) == 1200 * S


# Promises


def build_blocked():
    """Two GPUs, of which one is held for 100 s; a job of both waits, and one of an hour behind it."""
    core = build_core(build_node("a"))
    submit(core, "run", 1, 100.0)
    submit(core, "big", 2, 50.0)
    return core


def test_the_first_that_waits_is_promised_a_start_and_told_what_ends_before():
    core = build_blocked()
    promise = core.workload("big").promise
    assert (promise.start_ns, promise.waits_for, promise.source) == (101 * S, ("run",), RuntimeSource.USER)
    remedy = core.explain_workload("big").remedy
    assert remedy.endswith(
        "Promised to start by 1970-01-01 00:01:41 UTC, when run ends; the last of these ends by what its user expects."
    )
    assert submit(core, "short", 1, 100.0).phase is WorkloadPhase.PLACED
    core.cancel("short", now_ns=2 * S)
    long = submit(core, "long", 1, 101.0)
    assert long.reason == "backfill: there is room, but it would delay work that goes before it"
    assert core.explain_workload("long").constraint == "backfill"
    assert "when big starts" in core.explain_workload("long").remedy
    assert "--expect" in (submit(core, "unknown", 1) and core.explain_workload("unknown").remedy)
    core.cancel("run", now_ns=60 * S)
    assert core.workload("big").promise is None
    assert core.workload("big").phase is WorkloadPhase.PLACED


def test_where_no_end_is_expected_nothing_is_promised_and_nothing_waits_for_it():
    core = build_core(build_node("a"))
    submit(core, "run", 1)
    assert submit(core, "big", 2).promise is None
    assert submit(core, "small", 1).phase is WorkloadPhase.PLACED


def test_a_default_run_time_promises_starts_for_work_that_states_nothing():
    core = build_core(build_node("a"))
    change(core, backfill=EASY, default_runtime_s=100.0)
    submit(core, "run", 1)
    assert submit(core, "big", 2).promise.start_ns == 101 * S
    assert submit(core, "small", 1, now_s=2).reason.startswith("backfill: ")


def test_without_backfill_nothing_is_promised():
    core = build_core(build_node("a"))
    change(core, backfill=BackfillMode.NONE)
    submit(core, "run", 1, 100.0)
    assert submit(core, "big", 2, 50.0).promise is None
    assert submit(core, "long", 1, 1000.0).phase is WorkloadPhase.PLACED


def test_a_promise_moves_later_by_an_overrun_and_says_so():
    core = build_blocked()
    assert not core.is_round_due(150 * S)
    assert core.is_round_due(162 * S)
    (moved,) = promises(core.retry_waiting(now_ns=162 * S))
    assert moved.promise.start_ns == 221 * S
    assert moved.promise.cause == "overrun: run runs for longer than expected"
    assert not core.is_round_due(170 * S)
    assert "later than promised before: overrun" in core.explain_workload("big").remedy


@pytest.mark.parametrize("way", ["lost", "drained", "reserved", "urgent", "cancelled"])
def test_a_promise_moves_later_for_a_named_cause_alone(way):
    core = build_core(build_node("a"), build_node("b"))
    for node, runs_s in (("a", 100.0), ("b", 500.0)):
        submit(core, f"run-{node}", 2, runs_s)
    submit(core, "big", 2, 50.0)
    assert core.workload("big").promise.start_ns == 101 * S
    if way == "lost":
        core.mark_node_lost("a", now_ns=2 * S)
        core.retry_waiting(now_ns=3 * S)
        cause = "node: a is lost"
    elif way == "drained":
        core.cordon_node("a", reason="fan", user="ops", drain=DrainTerms(), now_ns=2 * S)
        core.retry_waiting(now_ns=3 * S)
        cause = "node: a is cordoned"
    elif way == "reserved":
        held = Reservation(name="r", node_names=("a",), start_ns=90 * S, end_ns=900 * S, maintenance=True)
        change(core, 2, reservations=(held,))
        cause = "reservation: r holds nodes"
    elif way == "urgent":
        submit(core, "urgent", 2, 1000.0, priority=9)
        assert core.workload("big").promise is None
        assert core.workload("urgent").promise.start_ns == 101 * S
        return
    else:
        submit(core, "next", 2, 50.0)
        core.cancel("big", now_ns=2 * S)
        settle(core, 2)
        core.retry_waiting(now_ns=2 * S)
        assert core.workload("next").promise.start_ns == 101 * S
        return
    settle(core, 3)
    promise = core.workload("big").promise
    assert promise.start_ns == 501 * S
    assert promise.cause.startswith(cause)


def test_a_promise_outlives_a_restart_of_the_controller_before_agents_are_back():
    core = build_core(build_node("a", agent_version="1"))
    submit(core, "run", 1, 100.0)
    promise = submit(core, "big", 2, 50.0).promise
    again = Core(core.state.copy(), load_catalogue())
    again.record_controller_start(now_ns=2 * S)
    assert promises(again.retry_waiting(now_ns=3 * S)) == []
    assert again.workload("big").promise == promise
    again.mark_node_lost("a", now_ns=4 * S)
    assert promises(again.retry_waiting(now_ns=5 * S)) == [WorkloadPromised(time_ns=5 * S, workload_id="big")]


def test_conservative_backfill_promises_every_waiting_workload_a_start():
    core = build_core(build_node("a"))
    change(core, backfill=BackfillMode.CONSERVATIVE)
    submit(core, "run", 2, 100.0)
    for number in range(3):
        submit(core, f"w{number}", 2, 10.0)
    core.retry_waiting(now_ns=2 * S)
    settle(core, 2)
    assert [core.workload(f"w{number}").promise.start_ns // S for number in range(3)] == [101, 111, 121]
    check_invariants(core.state)


def test_work_in_queues_is_backfilled_in_the_order_of_fair_share_and_quota_makes_no_head():
    core = build_core(build_node("a"))
    core.update_policy(replace(core.state.policy, queues=(Queue(name="x"), Queue(name="y"))), now_ns=1)
    submit(core, "run", 1, 100.0, queue="x")
    assert submit(core, "big", 2, 10.0, queue="y").promise.start_ns == 101 * S
    assert submit(core, "long", 1, 1000.0, queue="x").reason.startswith("backfill: ")
    core.retry_waiting(now_ns=2 * S)
    settle(core, 2)
    assert core.workload("long").phase is WorkloadPhase.PENDING
    assert submit(core, "brief", 1, 10.0, queue="x", now_s=3).phase is WorkloadPhase.PLACED


# Reservations


def reserve(core, *, start_s=1000, end_s=2000, now_s=1, **fields):
    fields = {"node_names": ("a",)} | fields
    held = Reservation(name="r", start_ns=start_s * S, end_ns=end_s * S, **fields)
    return change(core, now_s, reservations=(held,))


def test_before_a_reservation_only_what_ends_by_its_start_is_placed_there():
    core = build_core(build_node("a"))
    reserve(core, users=("ada",))
    assert submit(core, "short", 1, 999.0, user="bob").phase is WorkloadPhase.PLACED
    for key, runs_s, user in (("long", 1001.0, "bob"), ("own", 1001.0, "ada"), ("unknown", None, "bob")):
        assert submit(core, key, 1, runs_s, user=user).reason == (
            "reservation: there is room, but on nodes that reservation r holds"
        )
    assert "--expect" in core.explain_workload("unknown").remedy
    assert core.explain_workload("long").constraint == "reservation"
    assert core.is_round_due(1000 * S)
    core.retry_waiting(now_ns=1000 * S)
    assert core.workload("own").phase is WorkloadPhase.PLACED
    assert core.workload("long").phase is WorkloadPhase.PENDING
    core.cancel("own", now_ns=1500 * S)
    assert core.workload("long").phase is WorkloadPhase.PENDING
    assert core.is_round_due(2000 * S)
    core.retry_waiting(now_ns=2000 * S)
    assert core.workload("long").phase is WorkloadPhase.PLACED


def test_work_of_which_nothing_is_known_starts_until_a_day_before_a_reservation():
    core = build_core(build_node("a"))
    reserve(core, start_s=100_000, end_s=200_000, maintenance=True)
    assert submit(core, "early", 1, now_s=10).phase is WorkloadPhase.PLACED
    assert submit(core, "late", 1, now_s=20_000).reason.startswith("reservation: ")


def test_a_reservation_of_a_pool_and_a_queue_and_its_deletion():
    core = build_core(build_node("a", pool="x"), build_node("b", pool="y"))
    core.update_policy(replace(core.state.policy, queues=(Queue(name="q"), Queue(name="p"))), now_ns=1)
    reserve(core, start_s=0, node_names=(), pool="x", queue="q")
    placed = submit(core, "other", 2, 10.0, queue="p")
    assert {one.node_name for one in placed.placements} == {"b"}
    assert submit(core, "wide", 2, 10.0, queue="p").reason.startswith("reservation: ")
    assert {one.node_name for one in submit(core, "in", 2, 10.0, queue="q").placements} == {"a"}
    core.cancel("in", now_ns=2 * S)
    change(core, 3, reservations=())
    assert core.workload("wide").phase is WorkloadPhase.PLACED


def test_running_work_grows_and_leaves_drained_nodes_to_no_reserved_node():
    core = build_core(build_node("a"), build_node("b"), build_node("c"))
    reserve(core, start_s=0, node_names=("b", "c"), maintenance=True)
    submit(core, "s", 1, kind=WorkloadKind.INFERENCE_SERVICE, replicas=2)
    core.scale("s", 4, now_ns=2 * S)
    assert {one.node_name for one in core.workload("s").placements} == {"a"}
    core.cordon_node("a", drain=DrainTerms(), now_ns=3 * S)
    core.continue_drains(now_ns=4 * S)
    assert {one.node_name for one in core.workload("s").placements} == {"a"}


def test_a_reservation_that_contradicts_itself_is_refused():
    core = build_core(build_node("a"))
    held = Reservation(name="r", node_names=("a",), start_ns=1, end_ns=2)
    with pytest.raises(InvalidArgument, match="contradicts"):
        change(core, reservations=(held, held))
    problems = list(replace(held, end_ns=1, pool="x", maintenance=True, users=("u",)).violations())
    assert [one.field for one in problems] == ["end_ns", "node_names", "users"]


def test_only_changes_of_a_promise_are_events():
    core = build_blocked()
    for now_s in range(2, 20):
        assert drop_quotes(core.retry_waiting(now_ns=now_s * S).events) == []


def test_work_that_starts_in_the_round_of_its_own_submission_is_asked_nothing_more():
    """It would delay a promised start of lower priority; a job that is ready again brings the round that starts it."""
    core = build_core(build_node("a", gpus=4, runs_processes=True))
    submit = core.submit
    runs = {"process": ProcessSpec(argv=("true",), working_directory="/"), "mobility": Mobility.FIXED}
    retried = JobSchedule(retries_most=3)
    submit(build_request("running", gpus=2, expected_runtime_s=1000.0), now_ns=S)
    submit(build_request("retried", gpus=1, schedule=retried, **runs), now_ns=S)
    failed = AttemptStatus(
        workload_id="retried", attempt=1, replica=0, state=AttemptState.ENDED, started_ns=S, ended_ns=2 * S, exit_code=1
    )
    core.record_attempts("a", (failed,), now_ns=2 * S)
    submit(build_request("large", gpus=4, expected_runtime_s=10.0), now_ns=3 * S)
    assert core.workload("large").promise is not None
    urgent = build_request("urgent", gpus=1, priority=9, expected_runtime_s=5000.0)
    step = submit(urgent, now_ns=1000 * S)
    assert step.result == core.workload("urgent")
    assert step.result.phase is WorkloadPhase.PLACED


def test_a_start_that_moves_behind_work_of_higher_priority_causes_no_round_after_round():
    core = build_core(build_node(gpus=2))
    change(core, backfill=EASY)
    submit(core, "runs", 2, 100.0)
    submit(core, "late", 2, 50.0, priority=-1, deadline=JobDeadline(end_ns=1000 * S))
    submit(core, "head", 2, 40.0)
    settle(core, 1)
    core.retry_waiting(now_ns=2 * S)
    settle(core, 2)
    assert not core.is_round_due(2 * S)
    core.cancel("runs", now_ns=90 * S)
    core.cancel("head", now_ns=130 * S)
    assert core.workload("late").placed_ns == 130 * S


def test_work_that_goes_first_starts_though_it_delays_a_start_that_was_promised_before():
    core = build_core(build_node("a", gpus=2), build_node("b", gpus=2))
    change(core, backfill=EASY)
    submit(core, "one", 1, 100.0, cpu=60)
    submit(core, "other", 1, 100.0, cpu=60)
    assert submit(core, "big", 2, 50.0).promise is not None
    submit(core, "high", 1, 500.0, now_s=2, priority=5, replicas=2)
    assert core.workload("big").promise is None
    assert core.is_round_due(2 * S)
    core.retry_waiting(now_ns=2 * S)
    settle(core, 2)
    assert core.workload("high").phase is WorkloadPhase.PLACED
    assert not core.is_round_due(2 * S)


@pytest.mark.parametrize(
    ("is_cordoned", "constraint", "advice"),
    [(False, "reservation", "wait for or cancel"), (True, "unavailable", "eelctl uncordon a")],
)
def test_nothing_is_advised_on_nodes_that_a_reservation_closes(is_cordoned, constraint, advice):
    core = build_core(build_node("a", gpus=2, runs_processes=True))
    if is_cordoned:
        core.cordon_node("a", now_ns=S)
    else:
        submit(core, "runs", 2)
    repair = Reservation(name="repair", node_names=("a",), start_ns=2 * S, end_ns=1000 * S, maintenance=True)
    submit(core, "waits", 2, process=build_process(), mobility=Mobility.FIXED)
    assert advice in core.explain_workload("waits").remedy
    change(core, reservations=(repair,), now_s=2)
    settle(core, 2)
    found = core.explain_workload("waits")
    assert found.constraint == found.workload.reason.partition(":")[0] == constraint
    assert advice not in found.remedy


def test_no_model_is_advised_of_which_the_queue_has_no_quota():
    core = build_core(build_node("a", gpus=1), build_node("b", gpus=1, model="T4"))
    submit(core, "runs", 1, models=("G2",))
    submit(core, "waits", 1, models=("G2",))
    assert "allow T4" in core.explain_workload("waits").remedy
    quotas = tuple(QueueQuota(resource=f"gpu/{model}", nominal=most) for model, most in (("G2", 4000), ("T4", 0)))
    change(core, queues=(Queue(name="default", quotas=quotas),), now_s=2)
    assert "allow T4" not in core.explain_workload("waits").remedy
