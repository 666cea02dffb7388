"""Job arrays in the core: submitted whole or not at all, at most N elements at once, changed and depended on as one."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_request, drop_quotes
from tests.state_invariants import check_invariants
from tests.unit.attempts_test import PROCESS, ended, job, kinds, node, report
from tests.unit.scaling_test import service

from eelgrid_controller.cli.job_control import build_rerun
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.job_arrays import ElementChange
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    ArraySubmitted,
    WorkloadPlaced,
    WorkloadSubmitted,
    event_from_plain,
    event_to_plain,
)
from eelgrid_protos import catalogue
from eelgrid_protos.faults import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from eelgrid_protos.messages import (
    ArrayElement,
    DependencyCondition,
    JobArrayRequest,
    JobDependency,
    JobSchedule,
    Policy,
    Queue,
    WorkloadPhase,
)
from eelgrid_protos.schema import is_valid_message, list_violations

PENDING, PLACED, CANCELLED, SUCCEEDED, FAILED = (
    WorkloadPhase.PENDING,
    WorkloadPhase.PLACED,
    WorkloadPhase.CANCELLED,
    WorkloadPhase.SUCCEEDED,
    WorkloadPhase.FAILED,
)
SWEEP = replace(PROCESS, argv=("python", "train.py", "--lr={lr}", "{other}"))
FULL = "array: its array runs as many elements at once as it may"


def after(key, condition=DependencyCondition.SUCCEEDED, *, each=False):
    return JobSchedule(after=(JobDependency(workload_id=key, condition=condition, each=each),))


def submit(core, key, indexes="", *parameters, hold=False, now_ns=3, rerun_of="", dry_run=False, **spec):
    array = JobArrayRequest(indexes=indexes, parameters=parameters, rerun_of=rerun_of)
    request = replace(job(key, **spec), array=array, hold=hold, dry_run=dry_run)
    step = core.submit(request, now_ns=now_ns)
    check_invariants(core.state)
    return step


def phases(core, key):
    return [core.workload(one).phase for one in core.state.arrays.list_elements(key)]


def finish(core, key, code=0, now_ns=50):
    workload = core.workload(key)
    return report(core, ended(key, code, attempt=workload.attempt), now_ns=now_ns)


def reload(core):
    state = ClusterState.load(core.state.dump())
    assert state.digest() == core.state.digest()
    again = Core(state, catalogue.load_catalogue())
    again.retry_waiting(now_ns=60)
    return again


def test_an_array_is_one_event_and_its_elements_are_workloads_of_their_own():
    core = build_core(node(gpus=2))
    step = submit(core, "", "2-4", now_ns=7)
    assert kinds(step.events)[0] is ArraySubmitted
    assert WorkloadSubmitted not in kinds(step.events)
    assert core.state.arrays.list_elements("w-1") == ("w-1_2", "w-1_3", "w-1_4")
    assert phases(core, "w-1") == [PLACED, PLACED, PENDING]
    assert [core.workload(f"w-1_{n}").submitted_ns for n in (2, 3, 4)] == [7, 8, 9]
    second = core.workload("w-1_3")
    assert second.spec.array == ArrayElement(array_id="w-1", index=3, size=3)
    assert second.spec.process.argv == PROCESS.argv
    assert second.spec.process.element_variables == {
        "EELGRID_ARRAY_ID": "w-1",
        "EELGRID_ARRAY_INDEX": "3",
        "EELGRID_ARRAY_COUNT": "3",
    }
    assert list(list_violations(second)) == []
    assert core.workload("w-1_4").reason.startswith("gpu_count: ")
    assert core.state.next_number == 2
    processes = {item.workload_id: item.process for item in core.node_plan("a").assignments}
    assert processes["w-1_2"].element_variables["EELGRID_ARRAY_INDEX"] == "2"


def test_a_sweep_substitutes_parameters_in_the_command_and_sets_them_as_variables():
    core = build_core(node(gpus=8))
    submit(core, "s", "%3", "lr=0.1,0.01", "seed=0-1", process=SWEEP)
    found = [core.workload(f"s_{n}").spec.process for n in range(4)]
    assert [one.argv[2] for one in found] == ["--lr=0.1", "--lr=0.1", "--lr=0.01", "--lr=0.01"]
    assert {one.argv[3] for one in found} == {"{other}"}
    assert [one.element_variables["EELGRID_PARAM_SEED"] for one in found] == ["0", "1", "0", "1"]
    assert found[3].element_variables["EELGRID_PARAM_LR"] == "0.01"


def test_an_array_as_a_whole_counts_its_elements_and_ends_as_the_worst_of_them():
    core = build_core(node(gpus=2))
    whole = submit(core, "a", "0-2%2").result
    assert (whole.workload_id, whole.phase, whole.reason) == ("a", PLACED, FULL)
    assert (whole.array.size, whole.array.placed, whole.array.pending, whole.array.running_most) == (3, 2, 1, 2)
    finish(core, "a_0", 3)
    finish(core, "a_2", 7)
    assert core.workload_or_array("a").phase is PLACED
    finish(core, "a_1", 0)
    whole = core.workload_or_array("a")
    assert (whole.phase, whole.exit_code, whole.array.failed, whole.array.succeeded) == (FAILED, 7, 2, 1)
    assert whole.reason == "2 of 3 elements, such as a_2"
    assert is_valid_message(whole)
    with pytest.raises(FailedPrecondition, match="a is an array; name an element of it, such as a_0"):
        core.workload("a")
    with pytest.raises(NotFound):
        core.workload_or_array("b")


def test_the_same_submission_again_changes_nothing_and_another_of_the_id_is_refused():
    core = build_core(node(gpus=1))
    submit(core, "a", "0-3%2")
    before = core.state.revision
    again = submit(core, "a", "0-3%2", now_ns=9)
    assert (again.events, again.result.workload_id, core.state.revision) == ((), "a", before)
    for indexes in ("0-4%2", "0-3%3", "0-3", "1-3%2"):
        with pytest.raises(AlreadyExists, match="array a exists with other elements"):
            submit(core, "a", indexes)
    with pytest.raises(AlreadyExists, match="an array has the id a"):
        core.submit(job("a"), now_ns=9)
    with pytest.raises(AlreadyExists, match="exists with another spec"):
        core.submit(job("a_1"), now_ns=9)
    core.submit(job("b_2"), now_ns=9)
    with pytest.raises(AlreadyExists, match="b_2 of an element"):
        submit(core, "b", "0-3")
    core.submit(job("c"), now_ns=9)
    with pytest.raises(AlreadyExists, match="a workload has the id c"):
        submit(core, "c", "0-3")


LONG = f"x={'y' * 40_000}"


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"indexes": "0-999999"}, "array.indexes", "makes 1000000 elements"),
        ({"parameters": ("a=0-999", "b=0-999")}, "array.parameters", "makes 1000000 elements"),
        ({"parameters": ("lr=1",), "process": None}, "array.parameters", "without a command"),
        ({"parameters": (LONG,)}, "spec.process.element_variables[EELGRID_PARAM_X]", "40000"),
        ({"parameters": ("lr=,1",), "process": replace(PROCESS, argv=("{lr}",))}, "spec.process.argv", "is empty"),
        ({"parameters": ("lr=1-9999", f"x={'y' * 1000}")}, "array.parameters", "characters together"),
        ({"indexes": "0-3", "gpus": 9}, "spec.request.gpu_count", "9"),
        ({"indexes": "0", "schedule": after("nobody")}, "spec.schedule.after[0].workload_id", "no such workload"),
        ({"rerun_of": "nobody"}, "array.rerun_of", "no such array"),
    ],
)
def test_what_refuses_one_element_refuses_the_array_with_its_field(changes, field, problem):
    core = build_core(node(gpus=2))
    before = core.state.digest()
    spec = dict(changes)
    indexes, parameters = spec.pop("indexes", ""), spec.pop("parameters", ())
    for dry_run in (True, False):
        with pytest.raises(InvalidArgument) as caught:
            submit(core, "", indexes, *parameters, dry_run=dry_run, **spec)
        found = caught.value.violations[0]
        assert found.field == field
        assert problem in found.problem
        assert found.remedy
    assert core.state.digest() == before


def test_an_array_that_would_exceed_the_limit_of_live_work_is_refused_whole():
    core = Core(ClusterState(), catalogue.load_catalogue(), live_most=5)
    core.submit(build_request("one"), now_ns=1)
    with pytest.raises(ResourceExhausted, match="1 workloads wait or run, and 5 more are above the limit of 5"):
        submit(core, "a", "0-4")
    assert submit(core, "a", "0-3").result.array.pending == 4


def test_a_dry_run_shows_the_array_and_changes_nothing():
    core = build_core(node(gpus=2))
    step = submit(core, "", "0-9%2", dry_run=True)
    assert (step.events, step.result.array.pending, step.result.workload_id) == ((), 10, "w-1")
    assert not core.state.workloads


@pytest.mark.parametrize("queues", [(), (Queue(name="default"),)])
def test_at_most_n_elements_run_and_rounds_meet_no_more_than_have_a_slot(queues):
    core = build_core(node(gpus=8))
    core.update_policy(replace(core.state.policy, queues=queues), now_ns=2)
    submit(core, "a", "0-99%3")
    assert phases(core, "a") == [PLACED] * 3 + [PENDING] * 97
    assert core.state.pending.next_tickets(None, 99) == []
    assert {core.workload(f"a_{n}").reason for n in range(3, 100)} == {FULL}
    step = finish(core, "a_1")
    assert [one.workload_id for one in step.events if isinstance(one, WorkloadPlaced)] == ["a_3"]
    core = reload(core)
    assert [n for n in range(100) if core.workload(f"a_{n}").phase is PLACED] == [0, 2, 3]
    assert core.explain_workload("a_50").constraint == "array"
    assert core.explain_workload("a").workload.workload_id == "a_4"
    assert core.submit(job("other"), now_ns=61).result.phase is PLACED


@pytest.mark.parametrize("queues", [(), (Queue(name="default"),)])
def test_the_reason_of_an_array_is_not_that_of_equal_work_behind_it(queues):
    core = build_core(node(gpus=1))
    core.update_policy(replace(core.state.policy, queues=queues), now_ns=2)
    submit(core, "a", "0-3%1")
    assert core.submit(job("other"), now_ns=4).result.reason.startswith("gpu_count: ")
    submit(core, "b", "0-3%2")
    while core.has_backlog:
        core.retry(now_ns=5)
    assert [core.workload(f"b_{n}").reason.partition(":")[0] for n in range(4)] == ["gpu_count"] * 2 + ["array"] * 2
    # An element that has a slot now has the reason of the others that have one.
    core.cancel("b_0", now_ns=6)
    assert [core.workload(f"b_{n}").reason.partition(":")[0] for n in (1, 2, 3)] == ["gpu_count"] * 2 + ["array"]


def test_a_held_element_gives_its_slot_to_the_next_and_gets_none_back_before_one_is_free():
    core = build_core(node(gpus=1))
    core.submit(job("first"), now_ns=2)
    submit(core, "a", "0-2%1")
    core.hold("a_0", user="ann", now_ns=5)
    finish(core, "first")
    assert phases(core, "a") == [PENDING, PLACED, PENDING]
    core.release("a_0", now_ns=6)
    assert core.workload("a_0").reason == FULL
    finish(core, "a_1", now_ns=60)
    assert phases(core, "a") == [PLACED, SUCCEEDED, PENDING]


def test_an_element_that_waits_to_be_retried_gives_its_slot_to_the_next():
    core = build_core(node(gpus=1))
    submit(core, "a", "0-1%1", schedule=JobSchedule(retries_most=1))
    finish(core, "a_0", 1)
    assert phases(core, "a") == [PENDING, PLACED]
    core.retry_waiting(now_ns=20 * 10**9)
    assert core.workload("a_0").reason == FULL
    finish(core, "a_1", now_ns=21 * 10**9)
    assert phases(core, "a") == [PLACED, SUCCEEDED]


def test_an_array_that_is_requeued_and_held_waits_as_a_whole():
    """Elements that wait do not start in the places of those that are stopped."""
    core = build_core(node(gpus=2))
    submit(core, "a", "0-4%2")
    assert phases(core, "a") == [PLACED] * 2 + [PENDING] * 3
    ids = core.state.arrays.list_elements("a")
    assert core.change_elements(ElementChange.REQUEUE, ids[:1], " by ann", now_ns=3).result == 1
    assert core.change_elements(ElementChange.REQUEUE, ids, " by ann", held_by="ann", now_ns=4).result == 5
    assert core.change_elements(ElementChange.REQUEUE, ids, " by ann", held_by="ann", now_ns=4).result == 0
    finish(core, "a_0", 1)
    finish(core, "a_1", 1)
    assert phases(core, "a") == [PENDING] * 5
    assert {core.workload(key).held_by for key in ids} == {"ann"}
    assert core.change_elements(ElementChange.RELEASE, ids, now_ns=90).result == 5
    assert phases(core, "a") == [PLACED] * 2 + [PENDING] * 3


def test_an_array_is_held_released_moved_and_cancelled_as_one():
    core = build_core(node(gpus=2))
    core.update_policy(replace(Policy(), queues=(Queue(name="default"), Queue(name="late"))), now_ns=1)
    whole = submit(core, "a", "0-4%2", hold=True, user="ann").result
    assert (whole.phase, whole.reason, whole.held_by) == (PENDING, "held: by ann", "ann")
    ids = core.state.arrays.list_elements("a")
    assert core.change_elements(ElementChange.MOVE, ids, "late", now_ns=4).result == 5
    assert {core.workload(key).spec.queue for key in ids} == {"late"}
    assert core.change_elements(ElementChange.RELEASE, ids, now_ns=5).result == 5
    assert phases(core, "a") == [PLACED] * 2 + [PENDING] * 3
    assert core.change_elements(ElementChange.HOLD, ids, "bo", now_ns=6).result == 3
    assert core.workload("a_4").reason == "held: by bo"
    assert core.change_elements(ElementChange.HOLD, ids, "bo", now_ns=6).result == 0
    assert core.change_elements(ElementChange.CANCEL, ids, now_ns=7).result == 5
    assert phases(core, "a") == [PLACED] * 2 + [CANCELLED] * 3
    assert core.workload_or_array("a").stopping_ns == 7
    finish(core, "a_0", 1)
    finish(core, "a_1", 1)
    assert core.workload_or_array("a").phase is CANCELLED
    check_invariants(core.state)


def test_work_after_an_array_starts_once_all_of_it_has_succeeded_and_is_cancelled_if_one_did_not():
    core = build_core(node(gpus=8))
    submit(core, "a", "0-1")
    core.submit(job("good", schedule=after("a")), now_ns=4)
    core.submit(job("any", schedule=after("a", DependencyCondition.ENDED)), now_ns=4)
    core.submit(job("bad", schedule=after("a", DependencyCondition.NOT_SUCCEEDED)), now_ns=4)
    submit(core, "b", "0-2", schedule=after("a"))
    assert core.workload("good").reason == "dependency: waits for a to end"
    assert core.workload("b_1").reason == "dependency: waits for a to end"
    finish(core, "a_0", 1)
    assert core.workload("bad").phase is PENDING
    finish(core, "a_1")
    assert core.workload("good").phase is CANCELLED
    assert core.workload("good").reason == "dependency_failed: a failed, and this starts only if it succeeds"
    assert (core.workload("any").phase, core.workload("bad").phase) == (PLACED, PLACED)
    assert core.workload_or_array("b").phase is CANCELLED


def test_each_element_after_an_array_waits_for_the_one_with_its_index():
    core = build_core(node(gpus=8))
    submit(core, "a", "2,5")
    submit(core, "b", "2,5", schedule=after("a", each=True))
    assert core.workload("b_2").reason == "dependency: waits for a_2 to end"
    assert core.workload("b_5").reason == "dependency: waits for a_5 to end"
    finish(core, "a_5")
    assert phases(core, "b") == [PENDING, PLACED]
    finish(core, "a_2", 1)
    assert phases(core, "b") == [CANCELLED, PLACED]
    check_invariants(core.state)


def test_pairs_need_arrays_of_the_same_indexes_and_an_array_cannot_wait_for_itself():
    core = build_core(node(gpus=1))
    submit(core, "a", "0-3")
    core.submit(job("one"), now_ns=4)
    for key, indexes in (("a", "0-4"), ("a", "1-4"), ("one", "0-3")):
        with pytest.raises(InvalidArgument) as caught:
            submit(core, "b", indexes, schedule=after(key, each=True))
        assert caught.value.violations[0].field == "spec.schedule.after[0].each"
    with pytest.raises(InvalidArgument, match="a dependency cannot be met"):
        core.submit(job("x", schedule=after("a", each=True)), now_ns=5)
    for key in ("c", "c_0"):
        with pytest.raises(InvalidArgument, match="a dependency cannot be met"):
            submit(core, "c", "0-3", schedule=after(key))


def test_ended_elements_are_kept_while_their_array_is_live_or_depended_on():
    core = Core(ClusterState(ended_most=0), catalogue.load_catalogue())
    core.register_node(node(gpus=2), now_ns=1)
    submit(core, "a", "0-2")
    core.submit(job("child", schedule=after("a"), priority=-1), now_ns=4)
    finish(core, "a_0")
    finish(core, "a_1")
    check_invariants(core.state)
    assert phases(core, "a") == [SUCCEEDED, SUCCEEDED, PLACED]
    core = reload(core)
    finish(core, "a_2", now_ns=70)
    assert core.workload("child").phase is PLACED
    check_invariants(core.state)
    finish(core, "child", now_ns=80)
    assert not core.state.workloads
    assert "a" not in core.state.arrays


def test_elements_of_an_ended_array_run_again_with_the_commands_and_variables_they_had():
    core = build_core(node(gpus=8))
    submit(core, "a", "", "lr=1,2,3", process=SWEEP)
    with pytest.raises(FailedPrecondition, match="a_0 has not ended"):
        submit(core, "b", rerun_of="a")
    for n, code in enumerate((0, 1, 2)):
        finish(core, f"a_{n}", code)
    with pytest.raises(InvalidArgument, match="cannot be submitted"):
        submit(core, "b", "1,7", rerun_of="a")
    submit(core, "b", "1-2%1", rerun_of="a")
    assert core.state.arrays.list_elements("b") == ("b_1", "b_2")
    again = core.workload("b_2").spec.process
    assert again.argv[2] == "--lr=3"
    assert again.element_variables == {
        "EELGRID_ARRAY_ID": "b",
        "EELGRID_ARRAY_INDEX": "2",
        "EELGRID_ARRAY_COUNT": "3",
        "EELGRID_PARAM_LR": "3",
    }
    assert phases(core, "b") == [PLACED, PENDING]
    submit(core, "c", rerun_of="a")
    assert phases(core, "c") == [PLACED] * 3


def test_events_of_arrays_are_read_back_and_a_replay_is_the_same_state():
    core, replayed = build_core(node(gpus=2)), build_core(node(gpus=2)).state
    steps = [submit(core, "a", "%1", "lr=1-5", process=SWEEP)]
    steps += [finish(core, "a_0"), core.hold("a_4", now_ns=60), core.cancel("a_3", now_ns=61)]
    for step in steps:
        for event in step.events:
            again = event_from_plain(*event_to_plain(event))
            assert again == event
            replayed.apply(again)
    assert replayed.digest() == core.state.digest()


def test_single_work_is_written_to_the_journal_as_before_there_were_arrays():
    core = build_core(node(gpus=1))
    core.submit(job("p"), now_ns=2)
    step = core.submit(job("j", schedule=after("p")), now_ns=3)
    kind, body = event_to_plain(drop_quotes(step.events)[0])
    assert kind == "workload_submitted"
    assert "array" not in body["spec"]
    assert "element_variables" not in body["spec"]["process"]
    assert body["spec"]["schedule"]["after"] == [{"workload_id": "p", "condition": "succeeded"}]
    with pytest.raises(InvalidArgument) as caught:
        core.submit(job("k", array=ArrayElement(array_id="k")), now_ns=4)
    assert caught.value.violations[0].field == "spec.array"


def test_an_array_of_work_without_a_process_has_slots_as_any_other():
    core = build_core(node(gpus=8))
    request = replace(build_request("a", gpus=1), array=JobArrayRequest(indexes="0-3%1"))
    core.submit(request, now_ns=3)
    assert phases(core, "a") == [PLACED, PENDING, PENDING, PENDING]
    assert core.workload("a_0").spec.process is None
    core.cancel("a_0", now_ns=4)
    assert phases(core, "a") == [CANCELLED, PLACED, PENDING, PENDING]
    core.change_elements(ElementChange.CANCEL, core.state.arrays.list_elements("a")[::-1], now_ns=5)
    assert phases(core, "a") == [CANCELLED] * 4
    with pytest.raises(InvalidArgument) as caught:
        core.submit(replace(request, workload_id="b", spec=replace(request.spec, service=service())), now_ns=6)
    assert caught.value.violations[0].field == "spec.service"


def test_an_element_that_ran_can_be_run_again_alone_with_its_variables():
    core = build_core(node(gpus=8))
    submit(core, "a", "", "lr=1,2", process=SWEEP)
    finish(core, "a_1", 1)
    again = core.submit(build_rerun(core.workload("a_1")), now_ns=60).result
    assert again.spec.array is None
    assert again.spec.process == core.workload("a_1").spec.process
    assert again.phase is PLACED
