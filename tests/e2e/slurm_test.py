"""A real Slurm and a real controller: jobs that opted in are held, placed and released; without us Slurm works as before.

Needs Debian's slurm-wlm and munge, and root (`make test-slurm` installs them).
"""

import contextlib
import json
import time
from pathlib import Path

import pytest
from tests.e2e.processes import Cluster
from tests.slurm_rig import GPUS, SlurmCluster, find_missing
from tests.waiting import poll_until

from eelgrid_protos import faults
from eelgrid_protos.messages import (
    EnforcementMode,
    GetWorkloadRequest,
    PoolMode,
    PreemptionReclaim,
    Queue,
    QueuePreemption,
    QueueQuota,
    WorkloadPhase,
)

MISSING = find_missing()
WATCHDOG = Path(__file__).parent.parent.parent / "deploy" / "slurm" / "release-held"
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no Slurm here: {MISSING}")
OPTIONS = ("--slurm-poll", "0.2", "--slurm-lease-seconds", "5", "--slurm-patience", "3")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A Slurm and a controller that steers it, for all tests that kill neither."""
    folder = tmp_path_factory.mktemp("steered")
    with SlurmCluster() as slurm, Cluster(folder) as cluster:
        start(cluster, slurm)
        yield slurm, cluster


@pytest.fixture
def slurm(shared):
    """Slurm, without a job and with every node open."""
    found, _ = shared
    yield found
    found.run("scancel", "--user=root")
    for name in found.names:
        if "DRAIN" in found.run("scontrol", "show", "node", name):
            found.run("scontrol", "update", f"NodeName={name}", "State=RESUME")
    poll_until(lambda: not found.run("squeue", "-h").strip(), "all jobs are gone")


@pytest.fixture
def cluster(shared):
    return shared[1]


@pytest.fixture
def lone(tmp_path):
    """A Slurm and a controller, not yet started, for a test that kills them."""
    with SlurmCluster() as slurm, Cluster(tmp_path) as cluster:
        yield slurm, cluster


def start(cluster, slurm):
    """A controller that steers; returns when it has looked once."""
    found = cluster.controller("--slurm", "--slurm-conf", str(slurm.conf), "--slurm-lease", str(slurm.lease), *OPTIONS)
    poll_until(lambda: is_leased(slurm), "the controller holds the lease")
    return found


def is_leased(slurm):
    with contextlib.suppress(FileNotFoundError):
        return int(slurm.lease.read_text()) > time.time()
    return False


def wait_running(slurm, *jobs):
    poll_until(lambda: all(slurm.state(job) == "RUNNING" for job in jobs), f"{jobs} run")


def workload(cluster, job):
    """The core's workload of a job; None if it has none."""
    try:
        found = cluster.operators.get_workload(GetWorkloadRequest(workload_id=f"slurm-{job}"), timeout=10.0)
    except faults.NotFound:
        return None
    return found.workload


def waits_in_core(cluster, job):
    found = workload(cluster, job)
    return found is not None and found.phase is WorkloadPhase.PENDING


def test_a_job_that_opted_in_runs_where_the_core_places_it_and_ends_there_too(slurm, cluster):
    others = slurm.submit("sleep 600", "--gres=gpu:a100:3", steered=False)
    wait_running(slurm, others)
    job = slurm.submit("sleep 600", "--gres=gpu:a100:2")
    wait_running(slurm, job)
    found = slurm.jobs()[job]
    (place,) = workload(cluster, job).placements
    assert found["required_nodes"] == found["nodes"] == place.node_name != slurm.jobs()[others]["nodes"]
    assert found["admin_comment"] == f"eelgrid:placed:{found['nodes']}"
    slurm.run("scancel", job)
    poll_until(lambda: workload(cluster, job).phase is WorkloadPhase.CANCELLED, "the core has ended it, too")


@pytest.mark.parametrize(
    ("script", "phase", "reason", "code"),
    [
        ("true", WorkloadPhase.SUCCEEDED, "", 0),
        ("exit 3", WorkloadPhase.FAILED, "exited with 3", 3),
        ("kill -9 $$", WorkloadPhase.FAILED, "ended by SIGKILL", 137),
    ],
    ids=["succeeded", "exit code", "signal"],
)
def test_a_job_ends_in_the_core_as_it_ended_in_slurm(slurm, cluster, script, phase, reason, code):
    job = slurm.submit(script, "--gres=gpu:a100:1")
    poll_until(lambda: (found := workload(cluster, job)) and found.phase.is_ended, "it has ended here")
    found = workload(cluster, job)
    assert (found.phase, found.reason, found.exit_code) == (phase, reason, code)
    assert slurm.jobs()[job]["start_time"] * 10**9 == found.attempts[0].started_ns
    shown = cluster.eelctl("jobs", "--all").stdout
    assert [line.split()[3] for line in shown.splitlines() if line.startswith(f"slurm-{job} ")] == [phase.name.lower()]
    assert reason in cluster.eelctl("get", f"slurm-{job}").stdout


def test_the_ends_that_slurm_makes_are_named_and_what_it_has_forgotten_is_lost(lone):
    slurm, cluster = lone
    controller = start(cluster, slurm)
    # Without a shell, which may end by itself with 143 when its child is terminated.
    late = slurm.submit("exec sleep 600", "--gres=gpu:a100:1")
    on_lost_node = slurm.submit("sleep 600", "--gres=gpu:h100:1", "--no-requeue")
    forgotten = slurm.submit("sleep 600", "--gres=gpu:a100:1")
    wait_running(slurm, late, on_lost_node, forgotten)
    slurm.run("scontrol", "update", f"JobId={late}", "TimeLimit=0:01")
    slurm.kill("slurmd.n2")
    slurm.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=broken")
    poll_until(lambda: workload(cluster, on_lost_node).phase.is_ended, "the core knows of the node")
    assert workload(cluster, on_lost_node).reason == "lost: its node failed"
    poll_until(lambda: workload(cluster, late).phase.is_ended, "the time limit is over", within_s=150.0)
    assert workload(cluster, late).reason == "ended by SIGTERM: its time limit was over"
    controller.kill()
    slurm.run("scancel", forgotten)
    slurm.forget_ended()
    start(cluster, slurm)
    poll_until(lambda: workload(cluster, forgotten).phase.is_ended, "it is gone")
    found = workload(cluster, forgotten)
    assert found.phase is WorkloadPhase.FAILED
    assert found.reason == "lost: Slurm has forgotten the job, so nobody knows how it ended"


def test_the_core_learns_which_gpus_slurm_has_chosen(lone):
    slurm, cluster = lone
    first = slurm.submit("sleep 600", "--gres=gpu:h100:1", steered=False)
    wait_running(slurm, first)
    start(cluster, slurm)
    second = slurm.submit("sleep 600", "--gres=gpu:h100:2")
    wait_running(slurm, second)
    slurm.run("scancel", first)
    third = slurm.submit("sleep 600", "--gres=gpu:h100:1")
    wait_running(slurm, third)

    def known():
        held = {}
        for job in (second, third):
            for place in workload(cluster, job).placements:
                held.update({(place.node_name, index): [job] for index in place.gpu_indexes})
        return held

    poll_until(lambda: known() == slurm.devices(), f"{known()} is {slurm.devices()}")


def test_jobs_wait_for_capacity_in_the_core_and_start_in_order_of_submission(slurm, cluster):
    full = [slurm.submit("sleep 600", f"--gres=gpu:{kind}:{GPUS}") for kind in slurm.types]
    wait_running(slurm, *full)
    first, second = (slurm.submit("sleep 600", "--gres=gpu:a100:4") for _ in range(2))
    poll_until(lambda: waits_in_core(cluster, second), "they wait here")
    assert {slurm.jobs()[job]["state_reason"] for job in (first, second)} == {"JobHeldUser"}
    slurm.run("scancel", full[0])
    wait_running(slurm, first)
    assert slurm.state(second) == "PENDING"


def test_short_jobs_are_released_ahead_and_each_ends_here_as_it_did_there(slurm, cluster):
    array = slurm.submit("sleep 0.3; exit $((SLURM_ARRAY_TASK_ID % 2 * 3))", "--gres=gpu:1", "--array=0-79")
    tasks = [f"{array}_{number}" for number in range(80)]
    poll_until(
        lambda: all((found := workload(cluster, task)) and found.phase.is_ended for task in tasks),
        "all have ended here",
        within_s=120.0,
    )
    assert [workload(cluster, task).exit_code for task in tasks] == [0, 3] * 40
    (log,) = cluster.folder.glob("*controller*.log")
    assert "slurm=ahead released=" in log.read_text()


def test_arrays_start_task_by_task_and_a_job_of_two_nodes_on_two(slurm, cluster):
    array = slurm.submit("sleep 600", "--gres=gpu:a100:1", "--array=0-2")
    gang = slurm.submit("sleep 600", "--gres=gpu:a100:1", "--nodes=2")
    wait_running(slurm, gang)
    poll_until(
        lambda: (
            sum(job["array_job_id"] == int(array) and job["job_state"] == "RUNNING" for job in slurm.jobs().values())
            == 3
        )
    )
    assert slurm.jobs()[gang]["nodes"] == "n[0-1]"
    assert {one.node_name for one in workload(cluster, gang).placements} == {"n0", "n1"}
    assert workload(cluster, f"{array}_1").phase is WorkloadPhase.PLACED
    assert all(len(jobs) == 1 for jobs in slurm.devices().values())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--exclusive",), "wants its nodes for itself alone"),
        (("--nodelist=n1",), "has named its nodes"),
        (("--constraint=[rack0|rack1]",), "more than features joined by &"),
        (("--gres=gpu:h100:4", "--nodes=1", "--mem=63G", "--constraint=rack1"), "refused"),
    ],
    ids=["exclusive", "named", "alternatives", "impossible"],
)
def test_what_cannot_be_steered_is_left_to_slurm_with_the_reason(slurm, cluster, options, reason):
    job = slurm.submit("true", *options)
    poll_until(lambda: slurm.jobs()[job]["admin_comment"].startswith("eelgrid:left"), "it is let go")
    poll_until(lambda: slurm.jobs()[job]["priority"] != 0, "it is released")
    found = slurm.jobs()[job]
    assert reason in found["admin_comment"]
    assert found["required_nodes"] in ("", "n1")


SAVES = """
trap 'echo $step > $SAVED; exit 0' TERM
SAVED=$PWD/saved-$SLURM_JOB_ID; step=$(cat $SAVED 2>/dev/null || echo 0)
echo begun $step restart ${SLURM_RESTART_COUNT:-0}
while true; do sleep 0.1 & wait $!; step=$((step + 1)); done
"""


def own_queues(cluster, **nominal):
    """Queues with quotas of so many GPUs, which take back what is theirs; the pool is enforced."""
    rules = QueuePreemption(reclaim=PreemptionReclaim.NOMINAL)
    queues = [
        Queue(name=name, parent="all", quotas=(QueueQuota(resource="gpu", nominal=1000 * gpus),), preemption=rules)
        for name, gpus in nominal.items()
    ]
    pools = (PoolMode(pool="default", mode=EnforcementMode.ENFORCE),)
    cluster.set_policy(queues=(Queue(name="all"), *queues), pools=pools)


def test_a_job_makes_room_for_a_queue_with_a_right_to_it_and_goes_on_from_its_checkpoint(lone):
    slurm, cluster = lone
    start(cluster, slurm)
    own_queues(cluster, owners=12, guests=0)
    fixed = [slurm.submit("sleep 600", f"--gres=gpu:{GPUS}", "--account=guests", "--no-requeue") for _ in range(2)]
    guest = slurm.submit(SAVES, f"--gres=gpu:{GPUS}", "--account=guests")
    wait_running(slurm, *fixed, guest)
    before = workload(cluster, guest)
    poll_until(lambda: "begun 0 restart 0" in slurm.output(guest), "it has begun")
    time.sleep(1.0)  # steps, of which it saves the last
    owner = slurm.submit("sleep 600", f"--gres=gpu:{GPUS}", "--account=owners")
    wait_running(slurm, owner)
    # Who may not be requeued runs on, and the guest waits under its id, in its place, with Slurm's restart count.
    assert [slurm.state(job) for job in fixed] == ["RUNNING", "RUNNING"]
    poll_until(lambda: waits_in_core(cluster, guest), "the guest waits")
    found = workload(cluster, guest)
    assert (found.submitted_ns, found.preemptions) == (before.submitted_ns, 1)
    assert found.reason.startswith("quota: queue all has too little gpu quota left")
    assert (slurm.jobs()[guest]["restart_cnt"], slurm.jobs()[guest]["state_reason"]) == (1, "JobHeldUser")
    saved = int((slurm.folder / f"saved-{guest}").read_text())
    assert saved > 0
    slurm.run("scancel", owner)
    wait_running(slurm, guest)
    # Slurm alone would wait for a minute, until the credentials of the first run are void.
    poll_until(lambda: f"begun {saved} restart 1" in slurm.output(guest), "it goes on", within_s=20.0)
    again = workload(cluster, guest)
    assert (again.workload_id, again.phase) == (f"slurm-{guest}", WorkloadPhase.PLACED)
    assert slurm.jobs()[guest]["nodes"] == again.placements[0].node_name
    slurm.run("scancel", guest)
    poll_until(lambda: workload(cluster, guest).phase is WorkloadPhase.CANCELLED, "the core has ended it, too")
    assert all(len(jobs) == 1 for jobs in slurm.devices().values())


def weights(slurm):
    return {node["name"]: node["weight"] for node in json.loads(slurm.run("sinfo", "--json"))["nodes"]}


def test_advice_holds_nothing_and_has_slurm_prefer_nodes_by_weights_that_are_put_back(lone):
    slurm, cluster = lone
    busy = slurm.submit("sleep 600", "--gres=gpu:a100:2", "--nodelist=n1", steered=False)
    wait_running(slurm, busy)
    slurm.lease.unlink(missing_ok=True)
    options = ("--slurm-conf", str(slurm.conf), "--slurm-lease", str(slurm.lease), "--slurm-mode", "advise", *OPTIONS)
    controller = cluster.controller("--slurm", *options)
    # Kinds of jobs that were there: the next of them are expected.
    known = slurm.submit("true", "--gres=gpu:a100:2")
    poll_until(lambda: slurm.state(known) == "COMPLETED", "nothing is held")
    assert slurm.jobs()[known]["admin_comment"] == ""
    assert not slurm.lease.exists()
    # n1 is in use already: one GPU node less draws idle power.
    advised = {"n0": 1_000_001, "n1": 1, "n2": 1_000_001}
    poll_until(lambda: weights(slurm) == advised, f"n1 is preferred: {weights(slurm)}")
    job = slurm.submit("sleep 600", "--gres=gpu:a100:2")
    wait_running(slurm, job)
    assert slurm.jobs()[job]["nodes"] == "n1"
    slurm.run("scancel", job)
    # slurmctld forgets weights.
    slurm.wait_saved()
    slurm.kill("slurmctld")
    slurm.start_controller()
    poll_until(lambda: weights(slurm) == advised, "they are written again", within_s=60.0)
    controller.signal(15)
    controller.process.wait(30)
    assert set(weights(slurm).values()) == {1}


def priorities(slurm):
    """By job that waits its priority, and how much of it is its site factor."""
    lines = slurm.run("sprio", "-h", "-o", "%i %Y %S").splitlines()
    return {job: (int(priority), int(site)) for job, priority, site in map(str.split, lines)}


def test_advice_has_slurm_try_jobs_in_the_order_of_their_queues_and_gives_their_priorities_back(tmp_path):
    factors = "PriorityType=priority/multifactor\nPriorityWeightPartition=1000"
    with SlurmCluster(types=("a100",), extra=factors) as slurm, Cluster(tmp_path) as cluster:
        running = slurm.submit("sleep 600", f"--gres=gpu:{GPUS}", "--account=guests")
        wait_running(slurm, running)
        first, second = (slurm.submit("sleep 600", f"--gres=gpu:{GPUS}", "--account=guests") for _ in range(2))
        owner = slurm.submit("sleep 600", f"--gres=gpu:{GPUS}", "--account=owners")
        stranger = slurm.submit("sleep 600", f"--gres=gpu:{GPUS}", "--account=owners", steered=False)
        before = priorities(slurm)
        assert {site for _, site in before.values()} == {0}
        options = (
            "--slurm-conf",
            str(slurm.conf),
            "--slurm-lease",
            str(slurm.lease),
            "--slurm-mode",
            "advise",
            *OPTIONS,
        )
        controller = cluster.controller("--slurm", *options)
        own_queues(cluster, owners=4, guests=4)

        def order():
            found = priorities(slurm)
            assert found[stranger] == before[stranger]
            return sorted((first, second, owner), key=lambda job: -found[job][0])

        # Guests have the GPUs, so that it is the others' turn.
        poll_until(lambda: order() == [owner, first, second], "the jobs are ordered", within_s=60.0)
        assert all(priority <= before[job][0] for job, (priority, _) in priorities(slurm).items())
        slurm.run("scancel", stranger)
        slurm.run("scancel", running)
        wait_running(slurm, owner)
        # Now the owners have them.
        assert {slurm.state(first), slurm.state(second)} == {"PENDING"}
        controller.signal(15)
        controller.process.wait(30)
        assert {job: site for job, (_, site) in priorities(slurm).items()} == {first: 0, second: 0}


def test_dependencies_and_begin_times_are_waited_for_before_anything_is_placed(slurm, cluster):
    first = slurm.submit("sleep 600", "--gres=gpu:a100:1")
    wait_running(slurm, first)
    second = slurm.submit("sleep 600", "--gres=gpu:a100:1", f"--dependency=afterany:{first}")
    later = slurm.submit("sleep 600", "--gres=gpu:a100:1", "--begin=now+1hour")
    third = slurm.submit("sleep 600", "--gres=gpu:a100:1")
    wait_running(slurm, third)
    assert [workload(cluster, job) for job in (second, later)] == [None, None]
    slurm.run("scancel", first)
    wait_running(slurm, second)


def test_without_a_controller_nothing_is_held_and_held_jobs_go_on_with_the_next(lone):
    slurm, cluster = lone
    early = slurm.submit("sleep 600", "--gres=gpu:a100:1")
    wait_running(slurm, early)
    controller = start(cluster, slurm)
    full = [slurm.submit("sleep 600", f"--gres=gpu:{kind}:{GPUS - (kind == 'a100')}") for kind in slurm.types]
    poll_until(lambda: sum(slurm.state(job) == "RUNNING" for job in full) >= 2)
    held = slurm.submit("sleep 600", "--gres=gpu:a100:4")
    poll_until(lambda: slurm.jobs()[held]["state_reason"] == "JobHeldUser")
    controller.kill()
    poll_until(lambda: not is_leased(slurm), "the lease is over")
    free = slurm.submit("sleep 600")
    assert slurm.jobs()[free]["admin_comment"] == ""
    wait_running(slurm, free)
    assert slurm.jobs()[held]["state_reason"] == "JobHeldUser"
    before = {job: slurm.jobs()[job]["nodes"] for job in full}
    start(cluster, slurm)
    slurm.run("scancel", early, *full[:2])
    wait_running(slurm, held)
    assert slurm.jobs()[full[2]]["nodes"] == before[full[2]]
    assert all(len(jobs) == 1 for jobs in slurm.devices().values())


def test_the_watchdog_releases_what_is_held_when_the_lease_is_over_and_not_before(lone):
    slurm, _ = lone
    slurm.lease.write_text(str(int(time.time()) + 1000))
    jobs = [slurm.submit("sleep 600"), slurm.submit("sleep 600", "--array=0-1")]
    assert slurm.run(str(WATCHDOG), str(slurm.lease)) == ""
    assert {job["state_reason"] for job in slurm.jobs().values()} == {"JobHeldUser"}
    slurm.lease.write_text(str(int(time.time()) - 1))
    assert len(slurm.run(str(WATCHDOG), str(slurm.lease)).splitlines()) == 3
    poll_until(lambda: [job["job_state"] for job in slurm.jobs().values()] == ["RUNNING"] * 3, "they run")
    assert jobs[0] in slurm.jobs()
    # What has made room, and what the controller had just placed when it went away, is released as well.
    slurm.run("scontrol", "update", f"JobId={jobs[0]}", "AdminComment=eelgrid:requeued/0@1")
    slurm.run("scontrol", "requeuehold", jobs[0])
    placed = slurm.submit("sleep 600", "--hold")
    slurm.run("scontrol", "update", f"JobId={placed}", "AdminComment=eelgrid:placed:n1", "ReqNodeList=n1")
    # Its restart is counted while its processes still end; held it is only after that.
    poll_until(
        lambda: (slurm.jobs()[jobs[0]]["restart_cnt"], slurm.state(jobs[0])) == (1, "PENDING"),
        "it is requeued and held",
    )
    assert slurm.run(str(WATCHDOG), str(slurm.lease)).split() == ["released", jobs[0], "released", placed]
    wait_running(slurm, placed)


def test_a_job_that_an_operator_cancels_here_is_cancelled_in_slurm(slurm, cluster):
    full = [slurm.submit("sleep 600", f"--gres=gpu:{kind}:{GPUS}") for kind in slurm.types]
    wait_running(slurm, *full)
    job = slurm.submit("sleep 600", "--gres=gpu:a100:1")
    poll_until(lambda: waits_in_core(cluster, job))
    cluster.eelctl("cancel", f"slurm-{job}")
    poll_until(lambda: slurm.state(job) == "CANCELLED", "it is cancelled")
    slurm.run("scancel", full[0])
    running = slurm.submit("sleep 600", "--gres=gpu:a100:1")
    wait_running(slurm, running)
    cluster.eelctl("cancel", f"slurm-{running}")
    poll_until(lambda: slurm.state(running) == "CANCELLED", "it is cancelled while it runs")


def test_slurmctld_killed_and_restarted_loses_no_job_and_the_controller_goes_on(lone):
    slurm, cluster = lone
    start(cluster, slurm)
    running = slurm.submit("sleep 600", "--gres=gpu:a100:1")
    wait_running(slurm, running)
    # Until its next save, slurmctld itself would forget that the job runs.
    slurm.wait_saved()
    slurm.kill("slurmctld")
    poll_until(lambda: not is_leased(slurm), "the lease is not renewed")
    slurm.start_controller()
    poll_until(lambda: is_leased(slurm), "it is again", within_s=60.0)
    job = slurm.submit("sleep 600", "--gres=gpu:a100:1")
    wait_running(slurm, running, job)
    assert workload(cluster, running).phase is WorkloadPhase.PLACED


def test_a_node_that_is_drained_gets_nothing_new_and_says_why(slurm, cluster):
    for name in ("n0", "n1"):
        slurm.run("scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=broken fan")
    wanted = ("sleep 600", "--gres=gpu:a100:1")
    jobs = [slurm.submit(*wanted)]

    def says_why():
        if waits_in_core(cluster, jobs[-1]):
            return "let node n0 accept work again" in cluster.eelctl("explain", f"slurm-{jobs[-1]}").stdout
        found = workload(cluster, jobs[-1])
        if found is not None and found.phase is WorkloadPhase.CANCELLED:
            # Placed before the core had read of the drain, refused by Slurm, and let go.
            slurm.run("scancel", jobs[-1])
            jobs.append(slurm.submit(*wanted))
        return False

    poll_until(says_why, "a job waits for a node that is drained", within_s=120.0)
    job = jobs[-1]
    slurm.run("scontrol", "update", "NodeName=n1", "State=RESUME")
    wait_running(slurm, job)
    assert slurm.jobs()[job]["nodes"] == "n1"
