"""Nodes and GPUs on which one job after the other fails as soon as it starts are closed, and no others."""

import json
import math
import random

import pytest
from tests.builders.cluster import build_core, build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_controller.state.events import AttemptEnded, NodeCordoned, NodesRemoved, event_to_plain
from eelgrid_controller.state.failure_streaks import ODDS, FailureStreaks
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    Mobility,
    Placement,
    ProcessSpec,
    Workload,
    WorkloadPhase,
)

S = 10**9
PROCESS = ProcessSpec(argv=("python", "train.py"), working_directory="/home/ann")
BAD, GOOD = "T4", "G2"


class Jobs:
    """A node whose GPUs are of one model, where work fails as a test says, and some others, where it runs."""

    def __init__(self, *, others=3, gpus=1, **options):
        nodes = [build_node("bad", gpus=gpus, model=BAD), *(build_node(f"good{n}", gpus=1) for n in range(others))]
        self.core = build_core(*(self._with_processes(node) for node in nodes), **options)
        self.now_s, self.numbers = 100, 0

    @staticmethod
    def _with_processes(node):
        return type(node)(
            **{name: getattr(node, name) for name in node.__slots__} | {"runs_processes": True, "agent_version": "1"}
        )

    def begin(self, model=BAD, *, user="ann", name="", replicas=1, **spec):
        self.numbers += 1
        key = f"w{self.numbers}"
        spec = {"process": PROCESS, "mobility": Mobility.FIXED, "replicas": replicas, "models": (model,)} | spec
        self.core.submit(
            build_request(key, name=name or f"job-{self.numbers}", user=user, **spec), now_ns=self.now_s * S
        )
        assert self.core.workload(key).phase is WorkloadPhase.PLACED, self.core.workload(key).reason
        return key

    def end(self, key, *, ran_s=2, replica=0, code=1, **status):
        """Ends a process; returns the cordons that follow."""
        workload = self.core.workload(key)
        place = workload.placements[replica]
        begun_s, self.now_s = self.now_s, self.now_s + ran_s
        status = {
            "state": AttemptState.ENDED,
            "exit_code": code,
            "started_ns": begun_s * S,
            "ended_ns": self.now_s * S,
        } | status
        told = AttemptStatus(workload_id=key, replica=replica, attempt=workload.attempt, **status)
        step = self.core.record_attempts(place.node_name, (told,), now_ns=self.now_s * S)
        return [event for event in step.events if isinstance(event, NodeCordoned)]

    def fail(self, *, model=BAD, **known):
        job = {name: known.pop(name) for name in ("user", "name", "replicas") if name in known}
        return self.end(self.begin(model, **job), **known)

    def run_elsewhere(self, count):
        for _ in range(count):
            self.end(self.begin(GOOD), ran_s=1, code=0)

    def streak(self, node="bad"):
        return self.core.state.interruptions.streaks.find(node)


def test_a_node_on_which_nothing_starts_is_closed_and_the_next_job_goes_elsewhere():
    jobs = Jobs()
    jobs.run_elsewhere(200)
    # Nearly nothing fails at once elsewhere: the fourth is enough, at odds of 48 to 1 each.
    assert [jobs.fail() for _ in range(3)] == [[]] * 3
    (cordon,) = jobs.fail()
    assert (cordon.node_name, cordon.gpu_uuids, cordon.is_quarantine, cordon.drain) == ("bad", (), True, None)
    assert cordon.reason == (
        "quarantine: 4 different jobs in a row failed here within 60 s of their start, and nothing else ran; elsewhere 2 % do"
    )
    record = jobs.core.state.nodes["bad"]
    assert record.cordon_reason() == f"cordoned by eelgrid: {cordon.reason}"
    late = build_request("late", models=(BAD,), process=PROCESS, mobility=Mobility.FIXED)
    waits = jobs.core.submit(late, now_ns=jobs.now_s * S).result
    assert waits.phase is WorkloadPhase.PENDING
    assert "eelctl uncordon bad" in jobs.core.explain_workload("late").remedy
    # An operator has seen to it: the evidence is gone, and what waited starts.
    jobs.core.uncordon_node("bad", now_ns=jobs.now_s * S)
    assert jobs.core.workload("late").phase is WorkloadPhase.PLACED
    assert jobs.streak().groups == ()
    assert jobs.end("late") == []
    check_invariants(jobs.core.state)


def test_where_nothing_is_known_of_other_nodes_it_takes_longer():
    jobs = Jobs()
    cordons = [jobs.fail() for _ in range(19)]
    assert [len(one) for one in cordons] == [0] * 18 + [1]
    # Three in ten are presumed, with the error of ten ends.
    assert math.ceil(math.log(ODDS) / math.log(0.95 / (0.3 + math.sqrt(0.3 * 0.7 / 10)))) == 19


def test_nobody_closes_a_node_to_others():
    """Where two users have ever had work, failures of one count for no more than those of all others together."""
    jobs = Jobs()
    jobs.run_elsewhere(200)
    jobs.end(jobs.begin(GOOD, user="bob"), code=0)
    assert [jobs.fail() for _ in range(30)] == [[]] * 30
    assert [len(jobs.fail(user=user)) for user in ("bob", "ann", "ann", "cid")] == [0, 0, 0, 1]


def test_what_works_once_begins_anew():
    jobs = Jobs()
    jobs.run_elsewhere(200)
    for _ in range(5):
        assert [jobs.fail() for _ in range(3)] == [[]] * 3
        assert jobs.end(jobs.begin(), code=0) == []
    # What fails late has run.
    for _ in range(5):
        assert [jobs.fail() for _ in range(3)] == [[]] * 3
        assert jobs.fail(ran_s=61) == []


@pytest.mark.parametrize(
    ("same", "count"),
    [
        ({"user": "ann", "name": "sweep"}, 40),
        ({"code": None, "state": AttemptState.LOST}, 10),
        ({"node_fault": "GPU 0: it was lost"}, 10),
        ({"code": None, "gpu_held": True}, 10),
        ({"code": None, "signal": 9, "reason": "time limit"}, 10),
    ],
    ids=["one array", "lost", "a known fault", "held", "time limit"],
)
def test_what_says_nothing_of_the_node_is_no_evidence(same, count):
    jobs = Jobs()
    jobs.run_elsewhere(200)
    for _ in range(count):
        workload = None
        assert jobs.fail(**same) == [], workload
        # What returned to the queue, to be run again, is out of the way.
        for key in list(jobs.core.state.live_ids):
            jobs.core.cancel(key, now_ns=jobs.now_s * S, is_immediate=True)
    assert jobs.core.state.nodes["bad"].cordon is None


def test_a_process_that_cannot_be_started_counts():
    jobs = Jobs()
    jobs.run_elsewhere(200)
    known = {"code": None, "started_ns": 0, "reason": "cannot start: No such file or directory"}
    assert [len(jobs.fail(**known)) for _ in range(4)] == [0, 0, 0, 1]


@pytest.mark.parametrize(("code", "count"), [(126, 1), (127, 1), (1, 0)])
def test_what_its_launcher_cannot_run_counts_and_other_ends_with_a_reason_do_not(code, count):
    jobs = Jobs()
    jobs.run_elsewhere(200)
    cordons = [jobs.fail(code=code, reason="cannot enter /home/ann: No such file or directory") for _ in range(4)]
    assert sum(map(len, cordons)) == count


def test_what_ran_for_long_is_no_evidence_though_its_exit_code_is_unknown():
    """As Ray tells of some jobs."""
    jobs = Jobs()
    jobs.run_elsewhere(200)
    assert [jobs.fail(code=None, reason="failed in Ray", ran_s=120) for _ in range(6)] == [[]] * 6
    assert [len(jobs.fail(code=None, reason="failed in Ray")) for _ in range(4)] == [0, 0, 0, 1]


def tell_running(jobs, key):
    workload = jobs.core.workload(key)
    (place,) = workload.placements
    status = AttemptStatus(
        workload_id=key,
        replica=0,
        attempt=workload.attempt,
        state=AttemptState.RUNNING,
        started_ns=jobs.now_s * S,
    )
    jobs.core.record_attempts(place.node_name, (status,), now_ns=jobs.now_s * S)


def test_where_a_job_runs_for_long_its_gpu_and_node_stay_open():
    jobs = Jobs(gpus=3)
    jobs.run_elsewhere(200)
    for _ in range(2):
        tell_running(jobs, jobs.begin())
    jobs.now_s += 3600
    cordons = [one for _ in range(4) for one in jobs.fail()]
    (free,) = {gpu.uuid for gpu in jobs.core.state.nodes["bad"].inventory.gpus} - {
        uuid for item in jobs.core.state.nodes["bad"].assignments.values() for uuid in item.gpu_uuids
    }
    assert [one.gpu_uuids for one in cordons] == [(free,)]
    check_invariants(jobs.core.state)


def test_all_gpus_of_a_node_are_closed_though_jobs_without_gpus_run_there():
    jobs = Jobs(gpus=2)
    jobs.run_elsewhere(200)
    cordons, failed = [], 0
    while len(cordons) < 2:
        key = jobs.begin()
        cordons += jobs.end(key)
        failed += 1
        assert failed <= 20
        # A process without GPUs succeeds on the node, as far as its streak tells.
        jobs.core.state.interruptions.streaks._streaks.pop(("bad", ""), None)
    assert {len(one.gpu_uuids) for one in cordons} == {1}
    late = build_request("late", models=(BAD,), process=PROCESS, mobility=Mobility.FIXED)
    assert jobs.core.submit(late, now_ns=jobs.now_s * S).result.phase is WorkloadPhase.PENDING


def test_a_gpu_that_came_to_another_node_begins_anew():
    streaks = FailureStreaks()

    def end(node, gpu, count, code):
        for number in range(count):
            status = AttemptStatus(
                workload_id="w",
                replica=0,
                attempt=1,
                state=AttemptState.ENDED,
                exit_code=code,
                started_ns=S,
                ended_ns=2 * S,
            )
            workload = Workload(
                workload_id="w",
                spec=build_request("w", name=f"{node}-{gpu}-{number}").spec,
                phase=WorkloadPhase.PLACED,
                placements=(Placement(replica=0, node_name=node, gpu_uuids=(gpu,)),),
                attempts=(status,),
            )
            streaks.observe(AttemptEnded(time_ns=2 * S, workload_id="w", status=status), {"w": workload})

    end("b", "GPU-b", 20, 0)
    end("a", "GPU-g", 1, 1)
    end("a", "GPU-a", 18, 0)
    end("b", "GPU-g", 1, 1)
    assert streaks.find("b", "GPU-g").ended_before == 19
    assert not streaks.is_bad("b", "GPU-g", now_ns=2 * S)
    streaks.observe(NodesRemoved(time_ns=2 * S, node_names=("a", "b")), {})
    twin = FailureStreaks.load(json.loads(json.dumps(streaks.dump())))
    assert twin.dump() == streaks.dump()
    assert set(streaks.dump()) == {"all", "users"}
    end("b", "GPU-g", 3, 1)
    assert len(streaks.find("b", "GPU-g").groups) == 3
    assert not streaks.is_bad("b", now_ns=2 * S)


def test_what_its_user_stops_is_no_evidence():
    jobs = Jobs()
    jobs.run_elsewhere(200)
    for _ in range(6):
        key = jobs.begin()
        jobs.core.cancel(key, now_ns=jobs.now_s * S)
        assert jobs.end(key, code=None, signal=15, reason="stopped") == []
    assert jobs.streak().groups == ()


def test_replicas_that_are_stopped_since_another_failed_are_no_evidence():
    jobs = Jobs(others=2, gpus=2)
    jobs.run_elsewhere(200)
    key = jobs.begin(replicas=2)
    assert jobs.end(key, replica=0) == []
    assert jobs.end(key, replica=1) == []
    assert len(jobs.streak().groups) == 1


def test_one_broken_gpu_of_a_node_is_closed_alone():
    jobs = Jobs(gpus=2)
    jobs.run_elsewhere(200)
    uuids = [gpu.uuid for gpu in jobs.core.state.nodes["bad"].inventory.gpus]
    long = jobs.begin()
    used = jobs.core.workload(long).placements[0].gpu_uuids
    (broken,) = set(uuids) - set(used)
    cordons = []
    for _ in range(4):
        cordons += jobs.fail()
        if not cordons:
            # The other GPU works.
            jobs.end(long, code=0)
            long = jobs.begin()
            while jobs.core.workload(long).placements[0].gpu_uuids == (broken,):
                jobs.core.cancel(long, now_ns=jobs.now_s * S, is_immediate=True)
                hold = jobs.begin()
                long = hold if jobs.core.workload(hold).placements[0].gpu_uuids != (broken,) else long
    assert [(one.node_name, one.gpu_uuids) for one in cordons] == [("bad", (broken,))]
    assert jobs.core.state.nodes["bad"].cordon is None


def test_where_work_fails_everywhere_no_node_is_closed_until_it_is_one_alone():
    """A file server is away for a while, on a cluster where nothing failed; one node does not find it again."""
    jobs = Jobs(others=8)
    jobs.run_elsewhere(200)
    for _ in range(30):
        assert jobs.fail(model=GOOD) == []
        assert jobs.fail() == []
    assert len(jobs.streak().groups) == 30
    jobs.now_s += 3600
    jobs.run_elsewhere(20)
    assert [one.node_name for one in jobs.fail()] == ["bad"]


def test_the_only_node_and_more_than_a_tenth_of_the_nodes_are_not_closed():
    alone = Jobs(others=0)
    assert [alone.fail() for _ in range(20)] == [[]] * 20
    many = Jobs(others=1)
    many.core.cordon_node("good0", now_ns=many.now_s * S)
    assert [many.fail() for _ in range(20)] == [[]] * 20
    engine = Jobs(others=1)
    engine.core.update_external_usage("good0", ExternalUsage(closed="drained in Slurm"), now_ns=engine.now_s * S)
    assert [engine.fail() for _ in range(20)] == [[]] * 20


def test_a_cordon_of_somebody_who_is_called_as_the_controller_is_is_no_quarantine():
    jobs = Jobs()
    jobs.run_elsewhere(200)
    jobs.core.cordon_node("good0", user="eelgrid", reason="fan", now_ns=jobs.now_s * S)
    assert not jobs.core.state.nodes["good0"].cordon.is_quarantine
    # What an operator closes, earlier versions can read.
    assert "is_quarantine" not in event_to_plain(NodeCordoned(time_ns=1, node_name="good0"))[1]
    assert [len(jobs.fail()) for _ in range(4)] == [0, 0, 0, 1]
    state = ClusterState.load(json.loads(json.dumps(jobs.core.state.dump())))
    assert [state.nodes[name].cordon.is_quarantine for name in ("good0", "bad")] == [False, True]


def test_an_operator_may_switch_it_off():
    jobs = Jobs(quarantines=False)
    jobs.run_elsewhere(200)
    assert [jobs.fail() for _ in range(20)] == [[]] * 20


def test_evidence_outlives_a_restart_and_a_removed_node():
    jobs = Jobs()
    jobs.run_elsewhere(200)
    for _ in range(3):
        jobs.fail()
    plain = json.loads(json.dumps(jobs.core.state.dump()))
    state = ClusterState.load(plain)
    assert state.digest() == jobs.core.state.digest()
    jobs.core = build_core(state=state)
    assert len(jobs.fail()) == 1
    assert jobs.core.state.copy().interruptions.streaks.find("bad") == jobs.streak()


class Fleet:
    """Ends of one-GPU jobs of many users on nodes of a fleet, where a share fails at once, and on one node all do."""

    def __init__(self, seed, *, nodes=20, share=0.05, users=200):
        self.random, self.share, self.users = random.Random(seed), share, users
        self.nodes, self.streaks, self.now_ns = [f"n{n}" for n in range(nodes)], FailureStreaks(), 10_000 * S

    def end(self, node, *, is_bad=False):
        """Lets a job end; returns whether its node is found to be bad."""
        self.now_ns += int(self.random.expovariate(1.0) * S)
        has_failed = is_bad or self.random.random() < self.share
        name = f"job-{self.random.randrange(self.users)}"
        status = AttemptStatus(
            workload_id="w",
            replica=0,
            attempt=1,
            state=AttemptState.ENDED,
            exit_code=int(has_failed),
            started_ns=self.now_ns - (S if has_failed else 900 * S),
            ended_ns=self.now_ns,
        )
        workload = Workload(
            workload_id="w",
            spec=build_request("w", name=name, user=name).spec,
            phase=WorkloadPhase.PLACED,
            placements=(Placement(replica=0, node_name=node, gpu_uuids=(f"{node}-gpu",)),),
            attempts=(status,),
        )
        self.streaks.observe(AttemptEnded(time_ns=self.now_ns, workload_id="w", status=status), {"w": workload})
        return any(self.streaks.is_bad(node, uuid, now_ns=self.now_ns) for uuid in ("", f"{node}-gpu"))


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.6, 0.95])
def test_good_nodes_are_not_found_to_be_bad_however_often_work_fails(share):
    for seed in range(5):
        fleet = Fleet(seed, share=share)
        assert not any(fleet.end(fleet.random.choice(fleet.nodes)) for _ in range(2000)), seed


@pytest.mark.parametrize(("share", "most"), [(0.0, 4), (0.05, 7), (0.3, 20), (0.6, 80)])
def test_a_bad_node_is_found_soon_though_it_takes_most_of_the_work(share, most):
    """It ends ten jobs where each other node ends one."""
    for seed in range(5):
        fleet = Fleet(seed, share=share)
        for _ in range(500):
            fleet.end(fleet.random.choice(fleet.nodes[1:]))
        found = 0
        for count in range(1, 200):
            if fleet.end("n0", is_bad=True):
                found = count
                break
            if count % 10 == 0:
                for node in fleet.nodes[1:]:
                    fleet.end(node)
        assert 4 <= found <= most, (seed, found)
