"""Slowdowns of pairs of loads, measured from the progress of running jobs; and how operators see and adopt them."""

import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_controller.core import interference_estimates
from eelgrid_controller.core.interference_estimates import (
    JOBS_PER_PAIR_MOST,
    PAIRS_MOST,
    InterferenceEstimates,
)
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    GpuSharing,
    Interference,
    JobProgress,
    MeasuredInterference,
    Mobility,
    ProcessSpec,
    Workload,
    WorkloadPhase,
)

S = 10**9
WARM_UP_NS = interference_estimates.WARM_UP_NS


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """Jobs are as fast at once as later, but for the tests of their first minutes."""
    monkeypatch.setattr(interference_estimates, "WARM_UP_NS", 0)


class Fleet:
    """Jobs on shares of one node's GPUs, which report a step whenever a test lets time pass."""

    def __init__(self, gpus=1):
        self.core = build_core(build_node("n", gpus=gpus, runs_processes=True))
        self.now_s = 1.0
        # By job: its step, and the seconds that each takes.
        self.steps, self.step_s = {}, {}
        self.started_ns = {}

    def submit(self, key, load="", milli=300, replicas=1, step_s=1.0):
        process = ProcessSpec(argv=("true",), working_directory="/", grace_s=5.0)
        sharing = GpuSharing(load=load) if load else None
        request = build_request(
            key, milli=milli, replicas=replicas, process=process, mobility=Mobility.FIXED, gpu_sharing=sharing
        )
        self.core.submit(request, now_ns=int(self.now_s * S))
        assert self.core.state.workloads[key].phase is WorkloadPhase.PLACED
        self.steps[key], self.step_s[key] = 0, step_s
        self.start(key, *range(replicas))

    def start(self, key, *replicas):
        """The agent tells of processes that have begun."""
        self.started_ns[key] = int(self.now_s * S)
        attempt = self.core.state.workloads[key].attempt
        begun = AttemptStatus(
            workload_id=key, replica=0, attempt=attempt, state=AttemptState.RUNNING, started_ns=self.started_ns[key]
        )
        statuses = tuple(replace(begun, replica=replica) for replica in replicas)
        self.core.record_attempts("n", statuses, now_ns=self.started_ns[key])

    def report(self, key, step, *, total=0, state=AttemptState.RUNNING, exit_code=None, time_s=None):
        now_ns = int(self.now_s * S)
        progress = JobProgress(step=step, total=total, time_ns=now_ns if time_s is None else int(time_s * S))
        status = AttemptStatus(
            workload_id=key,
            replica=0,
            attempt=self.core.state.workloads[key].attempt,
            state=state,
            started_ns=self.started_ns[key],
            exit_code=exit_code,
            progress=progress,
        )
        return self.core.record_attempts("n", (status,), now_ns=now_ns)

    def run(self, seconds, *keys, every=1, **changes):
        """Lets steps of these jobs pass, all of equal length, and reports every so many."""
        for key in keys:
            self.step_s[key] = changes.get(key, self.step_s[key])
        (step_s,) = {self.step_s[key] for key in keys}
        for number in range(round(seconds / step_s)):
            self.now_s += step_s
            for key in keys:
                self.steps[key] += 1
                if number % every == every - 1:
                    self.report(key, self.steps[key])

    def end(self, key):
        self.report(key, self.steps[key], state=AttemptState.ENDED, exit_code=0)
        assert key not in {one for one, _ in self.core.state.nodes["n"].assignments}

    def measured(self):
        return {(one.load, one.beside): (one.slowdown, one.jobs) for one in self.core.list_interference()}


def begin_pair(alone_s=70, load="b", **fleet):
    """A job of the load `a` that was alone for a while, and then has company."""
    fleet = Fleet(**fleet)
    fleet.submit("job", "a")
    fleet.run(alone_s, "job")
    fleet.submit("other", load)
    return fleet


def test_pair_is_measured_from_the_paces_of_one_job():
    fleet = begin_pair()
    fleet.run(60, "job", job=1.25)
    assert fleet.measured() == {}, "too little was seen of the pair"
    fleet.run(20, "job")
    assert fleet.measured() == {("a", "b"): (pytest.approx(0.25), 1)}


def test_order_of_alone_and_beside_does_not_matter():
    fleet = Fleet()
    fleet.submit("other", "b", step_s=2.0)
    fleet.submit("job", "a")
    fleet.run(80, "job", job=1.25)
    assert fleet.measured() == {}
    fleet.end("other")
    fleet.run(70, "job", job=1.0)
    assert fleet.measured() == {("a", "b"): (pytest.approx(0.25), 1)}


def test_both_loads_of_a_pair_are_measured_once_each_was_alone():
    fleet = begin_pair()
    fleet.run(80, "job", "other", job=1.25, other=1.25)
    fleet.end("job")
    fleet.run(70, "other", other=1.0)
    assert fleet.measured() == {("a", "b"): (pytest.approx(0.25), 1), ("b", "a"): (pytest.approx(0.25), 1)}


def test_job_beside_its_own_load_is_a_pair_as_well():
    fleet = begin_pair(load="a")
    fleet.run(80, "job", job=1.25)
    assert fleet.measured() == {("a", "a"): (pytest.approx(0.25), 1)}


def test_job_that_is_faster_beside_others_is_not_slowed_down():
    fleet = begin_pair()
    fleet.run(80, "job", job=0.5)
    assert fleet.measured() == {("a", "b"): (0.0, 1)}


def test_long_steps_need_twenty_of_each_pace():
    fleet = Fleet()
    fleet.submit("job", "a")
    fleet.run(300, "job", job=10.0)
    fleet.submit("other", "b")
    fleet.run(190, "job", job=10.0)
    assert fleet.measured() == {}
    fleet.run(100, "job", job=10.0)
    assert ("a", "b") in fleet.measured()


def test_neighbours_that_come_and_go_are_ignored_while_they_do():
    """With another neighbour at each report no interval counts, however slow the job is in it."""
    fleet = begin_pair()
    for number in range(200):
        fleet.end("other" if number == 0 else f"other{number}")
        fleet.submit(f"other{number + 1}", "b")
        fleet.run(5, "job", job=5.0)
    assert fleet.measured() == {}
    fleet.run(85, "job", job=1.25)
    assert fleet.measured() == {("a", "b"): (pytest.approx(0.25), 1)}


def test_interval_after_a_change_is_left_out():
    """The first report beside another load may be older than that load's start."""
    fleet = begin_pair()
    fleet.run(30, "job", job=30.0)
    fleet.run(30, "job", job=30.0)
    fleet.run(80, "job", job=1.25)
    assert fleet.measured() == {("a", "b"): (pytest.approx(0.25), 1)}


def test_three_on_a_gpu_are_ignored():
    fleet = begin_pair()
    fleet.submit("third", "c")
    fleet.run(200, "job", job=3.0)
    assert fleet.measured() == {}
    fleet.end("third")
    fleet.run(80, "job", job=1.25)
    assert fleet.measured() == {("a", "b"): (pytest.approx(0.25), 1)}


def test_other_gpus_of_the_node_do_not_matter():
    fleet = begin_pair(gpus=2)
    fleet.submit("big", "x", milli=900)
    fleet.run(80, "job", job=1.25)
    assert fleet.measured() == {("a", "b"): (pytest.approx(0.25), 1)}


@pytest.mark.parametrize("load", ["", "*"])
def test_loads_without_a_name_are_not_measured(load):
    fleet = begin_pair(load=load)
    fleet.run(200, "job", "other", job=2.0, other=2.0)
    fleet.end("job")
    fleet.run(200, "other", other=1.0)
    assert fleet.measured() == {}


def test_job_of_several_processes_is_not_measured():
    fleet = Fleet()
    fleet.submit("job", "a", replicas=2, milli=200)
    fleet.submit("other", "b")
    fleet.run(200, "job", job=2.0)
    fleet.end("other")
    fleet.run(200, "job", job=1.0)
    assert fleet.measured() == {}


def test_progress_that_goes_back_discards_what_was_observed():
    fleet = begin_pair()
    fleet.steps["job"] = 3
    fleet.run(100, "job", job=1.25)
    assert fleet.measured() == {}
    fleet.end("other")
    fleet.run(70, "job", job=1.0)
    assert fleet.measured() == {("a", "b"): (pytest.approx(0.25), 1)}


def test_another_total_or_an_earlier_time_is_another_count():
    for change in ({"total": 1000}, {"time_s": 2.0}):
        fleet = begin_pair()
        fleet.report("job", fleet.steps["job"], **change)
        fleet.run(200, "job", job=1.25)
        assert fleet.measured() == {}


def test_another_attempt_discards_what_was_observed_and_keeps_its_estimate():
    fleet = begin_pair()
    fleet.run(80, "job", job=1.25)
    fleet.core.requeue("job", now_ns=int(fleet.now_s * S))
    fleet.report("job", fleet.steps["job"], state=AttemptState.ENDED)
    assert fleet.core.state.workloads["job"].attempt == 2
    fleet.steps["job"] = 0
    fleet.run(400, "job", job=2.0)
    assert fleet.measured() == {("a", "b"): (pytest.approx(0.25), 1)}


def test_report_that_is_told_again_counts_once():
    fleet = begin_pair()
    for _ in range(100):
        fleet.run(1.25, "job", job=1.25)
        fleet.report("job", fleet.steps["job"])
    assert fleet.measured() == {("a", "b"): (pytest.approx(0.25), 1)}


def test_seldom_reports_measure_the_same():
    fleet = Fleet()
    fleet.submit("job", "a")
    fleet.run(100, "job", every=10)
    fleet.submit("other", "b")
    fleet.run(150, "job", every=10, job=1.25)
    assert fleet.measured() == {("a", "b"): (pytest.approx(0.25), 1)}


def test_pair_has_the_median_of_its_jobs_which_stays_when_they_have_ended():
    fleet = Fleet()
    for number, step_s in enumerate((1.5, 1.25, 4.0)):
        key = f"job{number}"
        fleet.submit(key, "a")
        fleet.run(70, key)
        fleet.submit("other", "b")
        fleet.run(150, key, **{key: step_s})
        fleet.end(key)
        fleet.run(70, "other", other=1.0)
        fleet.core.cancel("other", now_ns=int(fleet.now_s * S))
        fleet.report("other", fleet.steps["other"], state=AttemptState.ENDED)
        fleet.core.state.workloads.pop("other")
    (pair,) = (one for one in fleet.core.list_interference() if one.load == "a")
    assert pair == MeasuredInterference(
        load="a", beside="b", slowdown=0.5, slowdown_least=0.25, slowdown_largest=3.0, jobs=3
    )


def test_numbers_of_jobs_pairs_and_estimates_are_bounded(monkeypatch):
    monkeypatch.setattr(interference_estimates, "JOBS_MOST", 2)
    monkeypatch.setattr(interference_estimates, "PAIRS_MOST", 3)
    fleet = Fleet(gpus=4)
    estimates = fleet.core._reports.interference
    for number in range(4):
        fleet.submit(f"job{number}", "a", milli=600)
        fleet.report(f"job{number}", 1)
    assert list(estimates._jobs) == ["job2", "job3"]
    for number in range(JOBS_PER_PAIR_MOST + 8):
        estimates._keep(("a", "b"), f"job{number}", number / 100)
    (pair,) = fleet.core.list_interference()
    assert (pair.jobs, pair.slowdown_least) == (JOBS_PER_PAIR_MOST, 0.08)
    for load in "cde":
        estimates._keep(("a", load), "job", 0.1)
    assert list(fleet.measured()) == [("a", "c"), ("a", "d"), ("a", "e")]


def test_work_on_whole_gpus_and_ended_jobs_are_not_kept():
    fleet = begin_pair()
    estimates = fleet.core._reports.interference
    assert list(estimates._jobs) == ["job"]
    fleet.end("job")
    assert not estimates._jobs
    whole = Fleet()
    whole.submit("job", milli=1000)
    whole.run(5, "job")
    assert not whole.core._reports.interference._jobs


def test_measuring_changes_nothing_in_the_state():
    fleet = begin_pair()
    before = fleet.core.state.policy
    fleet.run(80, "job", job=1.25)
    assert fleet.measured()
    assert fleet.core.state.policy == before


# What operators see of it.

TOLD = (
    Interference(load="resnet-50", beside="*", slowdown=0.3),
    Interference(load="whisper", beside="resnet-50", slowdown=0.18),
)


def build_measured(load, beside, slowdown, jobs=1, least=None, largest=None):
    least, largest = slowdown if least is None else least, slowdown if largest is None else largest
    return MeasuredInterference(
        load=load, beside=beside, slowdown=slowdown, slowdown_least=least, slowdown_largest=largest, jobs=jobs
    )


@pytest.fixture
def measured(fake):
    fake.policy = replace(fake.policy, interference=TOLD)
    fake.promised.interference += [
        build_measured("resnet-50", "whisper", 0.05),
        build_measured("whisper", "resnet-50", 0.21004, 5, 0.15, 0.3),
    ]
    return fake


def test_list_shows_what_was_measured_beside_what_the_policy_says(eelctl, measured):
    lines = eelctl("interference", "list").stdout.splitlines()
    assert [line.split(maxsplit=2) for line in lines[:4]] == [
        ["LOAD", "BESIDE", "SLOWDOWN             MEASURED  JOBS"],
        ["resnet-50", "whisper", "-                  5 %     1"],
        ["resnet-50", "*", "30 %                    -     -"],
        ["whisper", "resnet-50", "18 %  21 % (15 % to 30 %)     5"],
    ]
    plain = json.loads(eelctl("interference", "list", "-o", "json").stdout)
    assert [one["load"] for one in plain["interference"]] == ["resnet-50", "whisper"]
    assert [one["jobs"] for one in plain["measured"]] == [1, 5]


def test_list_has_no_further_columns_where_nothing_was_measured(eelctl, fake):
    fake.policy = replace(fake.policy, interference=TOLD)
    assert eelctl("interference", "list").stdout.splitlines()[0].split() == ["LOAD", "BESIDE", "SLOWDOWN"]


def test_adopt_puts_all_measured_pairs_into_the_policy(eelctl, measured):
    lines = ["resnet-50 beside whisper: not set -> 5 % (1 job)", "whisper beside resnet-50: 18 % -> 21 % (5 jobs)"]
    before = measured.policy
    told = eelctl("interference", "adopt", "--dry-run").stdout.splitlines()
    assert told == ["dry run: nothing was changed", *lines]
    assert measured.policy is before
    assert eelctl("interference", "adopt").stdout.splitlines() == lines
    assert [(one.load, one.beside, one.slowdown) for one in measured.policy.interference] == [
        ("resnet-50", "whisper", 0.05),
        ("resnet-50", "*", 0.3),
        ("whisper", "resnet-50", 0.21),
    ]
    calls = measured.calls.count("update_policy")
    assert eelctl("interference", "adopt").stdout == "no pair changes: the policy has what was measured\n"
    assert measured.calls.count("update_policy") == calls


def test_adopt_of_one_pair_leaves_the_others(eelctl, measured):
    plain = json.loads(eelctl("interference", "adopt", "resnet-50", "whisper", "-o", "json").stdout)
    assert plain["adopted"] == [{"load": "resnet-50", "beside": "whisper", "slowdown": 0.05, "before": None, "jobs": 1}]
    assert {one.slowdown for one in measured.policy.interference} == {0.05, 0.3, 0.18}


def test_adopt_says_what_to_do_where_nothing_was_measured(eelctl, fake):
    for arguments, code in (((), 5), (("a", "b"), 4)):
        result = eelctl("interference", "adopt", *arguments, code=code)
        assert "eelgrid.progress" in result.stderr
    assert "both loads" in eelctl("interference", "adopt", "a", code=2).stderr


def test_nobody_pushes_out_or_outvotes_what_others_measured():
    estimates = InterferenceEstimates(ClusterState())

    def keep(pair, key, user, slowdown):
        spec = build_request(key, user=user).spec
        estimates._state.workloads[key] = Workload(workload_id=key, spec=spec, phase=WorkloadPhase.PLACED)
        estimates._keep(pair, key, slowdown)

    for number, user in enumerate(("ann", "bob")):
        keep(("a", "b"), f"honest-{number}", user, 0.5)
    for number in range(2 * PAIRS_MOST):
        keep(("a", "b") if number % 2 else (f"x{number}", "y"), f"evil-{number}", "eve", 9.0)
    found = {(one.load, one.beside): one for one in estimates.list_measured()}
    assert len(found) == PAIRS_MOST
    pair = found["a", "b"]
    assert (pair.jobs, pair.slowdown, pair.slowdown_least, pair.slowdown_largest) == (JOBS_PER_PAIR_MOST, 0.5, 0.5, 9.0)


def test_the_first_minutes_of_a_job_are_left_out(monkeypatch):
    monkeypatch.setattr(interference_estimates, "WARM_UP_NS", WARM_UP_NS)
    fleet = Fleet()
    fleet.submit("job", "a", step_s=5.0)
    # It compiles, and takes five times as long for a step.
    fleet.run(120, "job")
    fleet.run(70, "job", job=1.0)
    fleet.submit("other", "b")
    # So does its neighbour, which is no load yet.
    fleet.run(120, "job", job=1.0)
    assert fleet.measured() == {}
    fleet.run(75, "job", job=1.5)
    assert fleet.measured() == {("a", "b"): (pytest.approx(0.5), 1)}


def test_a_neighbour_whose_process_has_not_begun_measures_nothing():
    fleet = Fleet()
    fleet.submit("job", "a")
    fleet.run(70, "job")
    fleet.start = lambda *_: None
    fleet.submit("other", "b")
    fleet.run(100, "job", job=1.25)
    assert fleet.measured() == {}
