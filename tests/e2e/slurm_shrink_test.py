"""A real Slurm and a real controller: jobs of several nodes that opted in give nodes back, are told before, and run on.

Needs Debian's slurm-wlm and munge, and root (`make test-slurm` installs them); with a database also slurmdbd and MariaDB.
"""

import pytest
from tests.e2e.processes import Cluster
from tests.e2e.slurm_test import start, wait_running, workload
from tests.slurm_rig import GPUS, SlurmCluster, find_missing
from tests.waiting import poll_until

MISSING = find_missing()
NO_DATABASE = find_missing(database=True)
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no Slurm here: {MISSING}")
# A step on each node, as an application has them. Told, it reads which nodes it keeps, and ends its steps on the others.
STEPS = """
for node in $(scontrol show hostnames); do
  srun --nodes=1 --ntasks=1 --nodelist=$node --exact --gres=gpu:1 sleep 600 & echo $! > $PWD/step-$SLURM_JOB_ID-$node
done
echo begun
"""
LEAVES = """
leave() {
  kept=$(squeue --noheader --jobs=$SLURM_JOB_ID --Format=admin_comment:200 | tr -d ' ')
  echo told $kept
  for node in $(scontrol show hostnames); do
    case ,${kept#eelgrid:placed:}, in *,$node,*) ;; *) kill -INT $(cat $PWD/step-$SLURM_JOB_ID-$node); kill -INT $(cat $PWD/step-$SLURM_JOB_ID-$node);; esac
  done
}
trap leave USR2
"""
DEAF = "trap 'echo told' USR2"
WAITS = "while true; do sleep 0.2; done"
ELASTIC = ("--nodes=3", "--ntasks-per-node=1", "--gres=gpu:1")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with SlurmCluster() as slurm, Cluster(tmp_path_factory.mktemp("shrunk")) as cluster:
        yield slurm, cluster, start(cluster, slurm)


@pytest.fixture
def world(shared):
    slurm, cluster, controller = shared
    yield slurm, cluster, controller
    slurm.run("scancel", "--user=root")
    poll_until(lambda: not slurm.run("squeue", "-h").strip(), "all jobs are gone")


def submit(slurm, *lines, comment="eelgrid eelgrid-nodes=1"):
    return slurm.submit("\n".join(lines), f"--comment={comment}", *ELASTIC, steered=False)


def begin(slurm, cluster, job):
    """Waits until a job has begun its steps, and the core has it where it runs."""
    wait_running(slurm, job)
    poll_until(lambda: "begun" in slurm.output(job), f"{job} has begun")
    poll_until(lambda: step_nodes(slurm, job) == set(slurm.names), "its steps run")
    poll_until(lambda: (found := workload(cluster, job)) and found.attempts, "the core knows")


def step_nodes(slurm, job):
    lines = slurm.run("squeue", "--steps", "-h", "-j", job, "-o", "%i %N").splitlines()
    return {line.split()[1] for line in lines if line.split() and not line.split()[0].endswith(".batch")}


def nodes(slurm, job):
    """By scontrol alone: the nodes whose GPUs a job holds."""
    return {name for (name, _), jobs in slurm.devices().items() if job in jobs}


def places(cluster, job):
    return {place.node_name for place in workload(cluster, job).placements}


def scale(cluster, job, replicas):
    cluster.eelctl("scale", f"slurm-{job}", str(replicas), "--yes")


def test_a_job_is_told_leaves_the_node_by_itself_and_another_job_gets_it(world):
    slurm, cluster, controller = world
    job = submit(slurm, LEAVES, STEPS, WAITS)
    begin(slurm, cluster, job)
    waits = slurm.submit("sleep 600", f"--gres=gpu:{GPUS}")
    poll_until(lambda: workload(cluster, waits) is not None, "the core has the other job")
    scale(cluster, job, 2)
    poll_until(lambda: len(nodes(slurm, job)) == 2, "Slurm has taken a node from it", within_s=60.0)
    wait_running(slurm, waits)
    kept = nodes(slurm, job)
    # The node of its batch script stays, the core has it where it is, and what is free is used.
    assert "n0" in kept
    poll_until(lambda: places(cluster, job) == kept, "the core has it there")
    assert nodes(slurm, waits) == places(cluster, waits) == set(slurm.names) - kept
    assert f"told eelgrid:placed:{','.join(sorted(kept))}" in slurm.output(job)
    # Nothing of it was killed: its steps there had ended before.
    assert "Killed" not in slurm.output(job)
    assert f"job={job} shrinks=yes keeps={','.join(sorted(kept))} overdue=False" in controller.text()
    assert slurm.state(job) == "RUNNING"
    assert step_nodes(slurm, job) == kept


def test_a_job_that_does_not_leave_is_shrunk_when_its_time_is_over_and_once_without_a_database(world):
    slurm, cluster, controller = world
    job = submit(slurm, DEAF, STEPS, WAITS)
    begin(slurm, cluster, job)
    scale(cluster, job, 2)
    poll_until(lambda: len(nodes(slurm, job)) == 2, "Slurm has taken a node from it", within_s=60.0)
    poll_until(lambda: f"job={job} shrinks=yes" in controller.text(), "the controller says so")
    assert "overdue=True" in controller.text()
    poll_until(lambda: "told" in slurm.output(job), "it was told")
    poll_until(lambda: len(step_nodes(slurm, job)) == 2, "Slurm has ended its step there")
    kept = nodes(slurm, job)
    # 22.05 without slurmdbd updates no job that was resized: it keeps what it has, and the core takes it so.
    scale(cluster, job, 1)
    poll_until(lambda: f"job={job} shrinks=no rule=no-database" in controller.text(), "it is refused", within_s=60.0)
    poll_until(lambda: places(cluster, job) == kept, "the core has it where it runs")
    assert nodes(slurm, job) == kept
    assert slurm.state(job) == "RUNNING"
    # It can be ended as any other.
    cluster.eelctl("cancel", f"slurm-{job}", "--yes")
    poll_until(lambda: slurm.state(job) == "CANCELLED", "it is cancelled in Slurm, too")


@pytest.mark.parametrize(
    ("comment", "rule"), [("eelgrid", "not-elastic"), ("eelgrid eelgrid-nodes=3", "too-small")], ids=["never", "least"]
)
def test_a_job_that_did_not_opt_in_for_so_few_nodes_keeps_them_and_the_core_takes_it_so(world, comment, rule):
    slurm, cluster, controller = world
    job = submit(slurm, DEAF, STEPS, WAITS, comment=comment)
    begin(slurm, cluster, job)
    scale(cluster, job, 2)
    poll_until(lambda: f"job={job} shrinks=no rule={rule}" in controller.text(), "it is refused")
    poll_until(lambda: places(cluster, job) == set(slurm.names), "the core has it where it runs")
    assert nodes(slurm, job) == set(slurm.names)
    assert "told" not in slurm.output(job)


@pytest.mark.skipif(bool(NO_DATABASE), reason=f"no slurmdbd here: {NO_DATABASE}")
def test_with_a_database_a_job_is_shrunk_again_and_can_be_changed_further(tmp_path):
    with SlurmCluster(database=True) as slurm, Cluster(tmp_path) as cluster:
        controller = start(cluster, slurm)
        job = submit(slurm, DEAF, STEPS, WAITS)
        begin(slurm, cluster, job)
        for count in (2, 1):
            scale(cluster, job, count)
            poll_until(lambda count=count: len(nodes(slurm, job)) == count, "Slurm has taken a node", within_s=60.0)
            kept = nodes(slurm, job)
            poll_until(lambda kept=kept: places(cluster, job) == kept, "the core has it there")
        assert kept == {"n0"}
        assert controller.text().count(f"job={job} shrinks=yes") == 2
        assert "shrinks=no" not in controller.text()
        assert slurm.output(job).count("told") == 2
        # It may be changed further, and Slurm's accounting has each stretch of it.
        slurm.run("scontrol", "update", f"JobId={job}", "Comment=changed")
        assert slurm.jobs()[job]["comment"] == "changed"
        listed = ["sacct", "-nPX", "--duplicates", "-j", job, "--format=state,nnodes"]
        stretches = {"RESIZING|3", "RESIZING|2", "RUNNING|1"}
        poll_until(lambda: set(slurm.run(*listed).split()) == stretches, "the database has each stretch of it")
