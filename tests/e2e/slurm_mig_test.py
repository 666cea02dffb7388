"""A real Slurm with a dynamic node whose MIG layout changes while other nodes work, and while the agent is killed at each step.

Needs Debian's slurm-wlm and munge, and root (`make test-slurm` installs them).
"""

import contextlib
import itertools
import re

import pytest
from tests.builders.partition import build_slice_points, build_sliced_service
from tests.e2e.processes import Cluster
from tests.slurm_mig_rig import GPUS, GRES, HALVES, MIXED, NODE, WITHIN_S, DynamicNode, format_cluster_settings
from tests.slurm_rig import SlurmCluster, find_missing
from tests.waiting import poll_until

from eelgrid_protos.messages import GetInventoryRequest, RecordPointsRequest

MISSING = find_missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no Slurm here: {MISSING}")
# Commands of the agent, by a word of theirs, at which it is killed; before the command has run, or after.
CRASHES = [
    (when, step) for step in ("State=DRAIN", "bin/stop", "delete NodeName", "bin/start") for when in ("before", "after")
]


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with SlurmCluster(types=("a100", "a100"), extra=format_cluster_settings()) as slurm:
        node = DynamicNode(slurm, tmp_path_factory.mktemp("dynamic"))
        node.resume()
        node.assert_in_service(GRES[HALVES])
        yield node


@pytest.fixture(autouse=True)
def end_jobs(node):
    """Each test begins without the jobs that one before it left, as it does where it has failed."""
    node.slurm.end_jobs(within_s=WITHIN_S)


@contextlib.contextmanager
def replace_node(node, spec, folder):
    """Another dynamic node, to which an agent belongs, while this one is out of the cluster.

    The port of all dynamic nodes is one, and so is their address here.
    """
    node.slurm.kill("slurmd.d0", 15)
    node.slurm.run("scontrol", "delete", "NodeName=d0")
    try:
        yield DynamicNode(node.slurm, folder, spec)
    finally:
        node.slurm.end_jobs(within_s=WITHIN_S)
        node.slurm.kill(f"slurmd.{spec['name']}", 15)
        node.slurm.run("scontrol", "delete", f"NodeName={spec['name']}")
        node.resume()
        node.assert_in_service()


def wait_state(node, job, *states):
    poll_until(lambda: node.slurm.state(job) in states, f"{job} is {states}", within_s=WITHIN_S)


def start_beating(node):
    """A job on another node that writes as long as it runs."""
    beat = node.slurm.submit("while :; do date +%s.%N; sleep 0.05; done", "--nodelist=n0", steered=False)
    poll_until(lambda: node.slurm.output(beat), "it beats", within_s=WITHIN_S)
    return beat, node.slurm.jobs()[beat]


def test_a_layout_changes_in_about_a_second_and_other_jobs_run_on(node):
    beat, before = start_beating(node)
    if node.layout() == GRES[MIXED]:
        node.apply(HALVES)
    flow = [node.slurm.submit("true", "--nodelist=n1", steered=False) for _ in range(10)]
    for layout in (MIXED, HALVES, MIXED):
        said = node.apply(layout)
        (out_s,) = (float(one) for one in re.findall(r"out of service in Slurm for ([0-9.]+) s", said))
        print(f"{layout}: out of service for {out_s:.2f} s")
        # About a second on an idle machine; tests share theirs.
        assert out_s < 10.0
        node.assert_in_service(GRES[layout])
    # Slices of the new layout are given to jobs, each to one; each holds its own until all have one.
    met = node.folder / "met"
    met.mkdir()
    jobs = [
        node.slurm.submit(
            f"touch {met}/$SLURM_JOB_ID; while [ $(ls {met} | wc -l) -lt 4 ]; do sleep 0.05; done; "
            "srun sh -c 'echo uuid=$CUDA_VISIBLE_DEVICES'",
            "--partition=mig",
            "--gres=gpu:1g.10gb:1",
            "--cpus-per-task=1",
            steered=False,
        )
        for _ in range(4)
    ]
    for job in jobs + flow:
        wait_state(node, job, "COMPLETED")
    assert {node.slurm.jobs()[job]["nodes"] for job in jobs} == {"d0"}
    # Each has a slice of its own, in a step by its UUID.
    uuids = [node.slurm.output(job).rpartition("uuid=")[2].strip() for job in jobs]
    assert len(set(uuids)) == len(jobs)
    assert set(uuids) == set(node.uuids("1g.10gb"))
    assert_untouched(node, beat, before)


def assert_untouched(node, beat, before):
    """A job that beats has run on since it was looked at, without a pause, and then it is ended."""
    after = node.slurm.jobs()[beat]
    assert (after["job_state"], after["restart_cnt"], after["start_time"]) == ("RUNNING", 0, before["start_time"])
    beats = [float(line) for line in node.slurm.output(beat).split()]
    assert max(later - sooner for sooner, later in itertools.pairwise(beats)) < 5.0
    node.slurm.run("scancel", beat)


def test_a_node_with_a_job_is_refused_or_drained_and_the_job_runs_to_its_end(node):
    job = node.slurm.submit("sleep 600", "--partition=mig", "--nodelist=d0", steered=False)
    wait_state(node, job, "RUNNING")
    before, other = node.layout(), node.other()
    assert f"jobs of Slurm run on the node ({job})" in node.apply(other, code=1)
    assert "DRAIN" not in node.gres()[1]
    assert node.layout() == before
    node.slurm.run("scancel", job)
    wait_state(node, job, "CANCELLED")
    job = node.slurm.submit("sleep 8", "--partition=mig", "--nodelist=d0", steered=False)
    wait_state(node, job, "RUNNING")
    assert "out of service" in node.apply(other, "--drain-wait", "60")
    assert node.slurm.state(job) == "COMPLETED"
    node.assert_in_service(GRES[other])


@pytest.mark.parametrize(("when", "step"), CRASHES)
def test_an_agent_killed_at_a_step_leaves_the_old_or_the_new_layout_and_the_node_comes_back(node, when, step):
    beat, before = start_beating(node)
    node.apply(node.other(), code=-9, CRASH_WHEN=when, CRASH_AT=step)
    node.resume()
    node.assert_in_service()
    assert_untouched(node, beat, before)


@pytest.mark.parametrize("line", ["destroy GPU instance", "create 1g.10gb at", "create compute instance"])
def test_an_agent_killed_in_the_change_of_a_layout_leaves_one_of_the_two_layouts(node, line):
    beat, before = start_beating(node)
    if node.layout() == GRES[MIXED]:
        node.apply(HALVES)
    node.kill_at(MIXED, line)
    assert node.show() == {}
    assert node.layout() not in GRES.values()
    # Each GPU by itself is finished, undone or not begun.
    node.resume()
    node.assert_in_service()
    assert_untouched(node, beat, before)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_drain_that_a_killed_agent_left_is_taken_back_whoever_is_killed_doing_it(node, when):
    before = node.layout()
    node.apply(node.other(), code=-9, CRASH_WHEN="after", CRASH_AT="State=DRAIN")
    assert node.gres() == (before, {"IDLE", "DRAIN"})
    assert "eelgrid:" in node.show()["Reason"]
    node.mig("resume", "--slurm", node.file, code=-9, CRASH_WHEN=when, CRASH_AT="State=RESUME")
    node.resume()
    node.assert_in_service(before)


def test_a_drain_of_somebody_else_is_given_back(node):
    node.slurm.run("scontrol", "update", "NodeName=d0", "State=DRAIN", "Reason=the fan rattles")
    goal = node.other()
    node.apply(goal)
    assert node.gres() == (GRES[goal], {"IDLE", "DRAIN"})
    assert "Reason=the fan rattles" in node.slurm.run("scontrol", "show", "node", "d0")
    node.slurm.run("scontrol", "update", "NodeName=d0", "State=RESUME")
    node.assert_in_service(GRES[goal])


def test_a_node_in_a_reservation_is_refused_and_the_reservation_keeps_it(node):
    before, words = node.layout(), ("Reservation=keep", "Nodes=d0", "StartTime=now+3600", "Duration=60", "Users=root")
    node.slurm.run("scontrol", "create", "reservation", *words)
    assert "in a reservation of Slurm (keep)" in node.apply(node.other(), code=1)
    assert "Nodes=d0 " in node.slurm.run("scontrol", "show", "reservation", "keep")
    node.assert_in_service(before)
    node.slurm.run("scontrol", "delete", "Reservation=keep")


def test_a_change_while_slurmctld_is_away_is_refused_or_ended_later_and_a_node_that_it_forgot_comes_back(node):
    before, goal = node.layout(), node.other()
    # It would forget that jobs of the tests before have ended, and run them again here.
    node.slurm.wait_saved()
    node.slurm.kill("slurmctld")
    assert "the node stays in service" in node.apply(goal, code=1)
    assert node.layout() == before
    restart_slurmctld(node)
    # One that was killed may have forgotten the node.
    node.resume()
    node.assert_in_service(before)
    node.apply(goal, code=-9, CRASH_WHEN="after", CRASH_AT="delete NodeName")
    node.slurm.kill("slurmctld")
    restart_slurmctld(node)
    node.resume()
    node.assert_in_service()


def restart_slurmctld(node):
    """Starts slurmctld; returns when the nodes that are in slurm.conf have answered it."""
    node.slurm.start_controller()
    words = ("sinfo", "-h", "-p", "main", "-o", "%T")
    poll_until(lambda: "unknown" not in node.slurm.run(*words), "its nodes have answered", within_s=WITHIN_S)


def test_a_whole_gpu_beside_a_cut_one_is_given_by_its_uuid(node):
    node.mig("apply", "--yes", "--slurm", node.file, "-l", "0=off", "-l", "1=2x1g.10gb")
    assert node.gres()[0] == "gpu:1g.10gb:2,gpu:h100-sxm5-80gb:1"
    found = {}
    for kind in ("h100-sxm5-80gb", "1g.10gb"):
        job = node.slurm.submit(
            "srun printenv CUDA_VISIBLE_DEVICES", "--partition=mig", f"--gres=gpu:{kind}:1", steered=False
        )
        wait_state(node, job, "COMPLETED")
        found[kind] = node.slurm.output(job).split()[-1]
    assert found["h100-sxm5-80gb"].startswith("GPU-")
    assert found["1g.10gb"] in node.uuids("1g.10gb")
    node.apply(HALVES)


def test_a_job_that_opted_in_is_placed_on_slices_before_and_after_a_change(node, tmp_path):
    slurm = node.slurm
    with Cluster(tmp_path) as cluster:
        cluster.controller(
            "--slurm", "--slurm-conf", str(slurm.conf), "--slurm-lease", str(slurm.lease), "--slurm-poll", "0.2"
        )
        poll_until(slurm.lease.exists, "the controller steers", within_s=WITHIN_S)
        for layout, kind in ((HALVES, "3g.40gb"), (MIXED, "1g.10gb")):
            node.apply(layout)
            node.assert_in_service(GRES[layout])
            job = slurm.submit("true", "--partition=mig", f"--gres=gpu:{kind}:1", "--cpus-per-task=1")
            wait_state(node, job, "COMPLETED")
            assert slurm.jobs()[job]["admin_comment"].startswith("eelgrid:placed:d0")


def test_an_agent_takes_its_node_out_for_a_plan_once_its_jobs_have_ended(node, tmp_path):
    spec = {**NODE, "name": "d1", "pool": "mig", "gpus": [{"product": "a100-sxm4-40gb", "count": GPUS, "mig": []}]}
    with replace_node(node, spec, tmp_path) as sliced, Cluster(tmp_path) as cluster:
        cluster.controller()
        agent = cluster.agent(sliced.fleet, "--slurm-node", str(sliced.file))
        cluster.until_ready(1)
        cluster.eelctl("policy", "set", "--yes", "--pool-mode", "mig=enforce", "--partition", "mig=on")
        cluster.operators.record_points(RecordPointsRequest(points=tuple(build_slice_points())), timeout=10.0)

        def offered():
            """What the agent has cut, as GRES."""
            inventory = cluster.node_api(agent).get_inventory(GetInventoryRequest(), timeout=10.0).inventory
            found = [one.profile for gpu in inventory.gpus for one in gpu.gpu_instances]
            return ",".join(f"gpu:{name}:{found.count(name)}" for name in sorted(set(found)))

        cluster.operators.submit_workload(build_sliced_service("bert", 30.0), timeout=10.0)
        cluster.eelctl("partition", "apply", "--yes", "--wait", 30)
        first = poll_until(offered, "the agent has cut its GPUs", within_s=WITHIN_S)
        poll_until(lambda: sliced.gres() == (offered(), {"IDLE"}), "Slurm has the node", within_s=WITHIN_S)
        job = node.slurm.submit("sleep 600", "--partition=mig", "--nodelist=d1", steered=False)
        wait_state(node, job, "RUNNING")
        cluster.operators.submit_workload(build_sliced_service("t5", 60.0), timeout=10.0)
        cluster.eelctl("partition", "apply", "--yes")
        poll_until(
            lambda: f"({job})" in cluster.eelctl("partition", "show").stdout, "the job keeps it", within_s=WITHIN_S
        )
        assert (node.slurm.state(job), offered()) == ("RUNNING", first)
        node.slurm.run("scancel", job)
        poll_until(lambda: offered() != first, "the layout has changed", within_s=WITHIN_S)
        poll_until(lambda: sliced.gres() == (offered(), {"IDLE"}), "Slurm has its GRES", within_s=WITHIN_S)


def test_an_idle_node_is_cut_into_the_slices_that_jobs_wait_for(node, tmp_path):
    """First for one that opted in, which Slurm would refuse as it is, then for those that wait behind a node that is full."""
    spec = {**NODE, "name": "d2", "pool": "mig", "gpus": [{"product": "h100-sxm5-80gb", "count": GPUS}]}
    slurm = node.slurm
    with replace_node(node, spec, tmp_path) as sliced, Cluster(tmp_path) as cluster:
        controller = cluster.controller(
            "--slurm", "--slurm-conf", str(slurm.conf), "--slurm-lease", str(slurm.lease), "--slurm-poll", "0.2",
            "--slurm-mig-layouts",
        )  # fmt: skip
        cluster.agent(sliced.fleet, "--slurm-node", str(sliced.file))
        cluster.until_ready(3)
        cluster.eelctl("policy", "set", "--yes", "--pool-mode", "mig=enforce", "--partition", "mig=on")
        poll_until(slurm.lease.exists, "the controller steers", within_s=WITHIN_S)
        small = ("--partition=mig", "--cpus-per-task=1", "--gres=gpu:1g.10gb:1")
        first = slurm.submit("sleep 600", *small)
        wait_state(node, first, "RUNNING")
        assert "slices of a node with an agent" in slurm.jobs()[first]["admin_comment"]
        # The first GPU is full of them, and the other stays whole.
        assert sliced.gres()[0] == "gpu:1g.10gb:7,gpu:h100-sxm5-80gb:1"
        # While a job runs the node stays as it is, whatever waits.
        half = slurm.submit("sleep 600", "--partition=mig", "--cpus-per-task=1", "--gres=gpu:3g.40gb:1")
        also = [slurm.submit("sleep 600", *small, steered=False) for _ in range(2)]
        for job in also:
            wait_state(node, job, "RUNNING")
        assert sliced.gres()[0] == "gpu:1g.10gb:7,gpu:h100-sxm5-80gb:1"
        slurm.run("scancel", first, *also)
        wait_state(node, half, "RUNNING")
        assert "gpu:3g.40gb:2" in sliced.gres()[0]
        assert controller.text().count("slurm=cut node=d2") == 2
        slurm.run("scancel", half)
        wait_state(node, half, "CANCELLED")
