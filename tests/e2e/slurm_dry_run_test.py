"""What can never run is refused at submission exactly where a real Slurm's own dry run refuses it.

The same nodes in both, and requests of random sizes around what a node has; asked of `sbatch --test-only`, which submits
nothing, and of a dry run here. Needs Debian's slurm-wlm and munge, and root (`make test-slurm` installs them).
"""

import random
import subprocess
from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request
from tests.slurm_rig import CPUS, GPUS, MEMORY_MIB, SlurmCluster, find_missing

from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import WorkloadPhase
from eelgrid_protos.quantities import MIB

MISSING = find_missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no Slurm here: {MISSING}")
TYPES = ("a100", "a100", "h100")
MODELS = {"a100": "A100-SXM4-80GB", "h100": "H100-SXM5-80GB", "v100": "V100-SXM2-32GB"}
ASKED = 150


@pytest.fixture
def slurm():
    with SlurmCluster(types=TYPES) as found:
        yield found


def build_same():
    return build_core(
        *(
            build_node(f"n{number}", gpus=GPUS, model=MODELS[kind], cpu=CPUS, memory_bytes=MEMORY_MIB * MIB)
            for number, kind in enumerate(TYPES)
        )
    )


def draw(rng):
    """Nodes, GPUs and their type, CPUs and MiB of one request; of several nodes each fills more than half of one."""
    nodes = rng.choice((1, 1, 1, 2, 3, 4))
    gpus = rng.randint(GPUS // 2 + 1, GPUS + 1) if nodes > 1 else rng.randint(0, GPUS + 2)
    kind = rng.choice(("", "", *MODELS)) if gpus else ""
    return nodes, gpus, kind, rng.randint(1, CPUS + 4), rng.choice((100, 1000, MEMORY_MIB, MEMORY_MIB + 1))


def may_run_in_slurm(slurm, nodes, gpus, kind, cpus, memory_mib):
    """What `sbatch --test-only` says; for another reason than the nodes it must not refuse."""
    gres = (f"--gres=gpu:{kind}:{gpus}" if kind else f"--gres=gpu:{gpus}",) if gpus else ()
    sizes = (f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cpus}")
    done = subprocess.run(
        ("sbatch", "--test-only", *sizes, f"--mem={memory_mib}M", *gres, "--wrap=true"),
        env=slurm.environment, cwd=slurm.folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    reasons = ("node configuration is not available", "Node count specification invalid", "Invalid generic resource")
    assert done.returncode == 0 or any(reason in done.stderr for reason in reasons), done.stderr
    return done.returncode == 0


def may_run_here(core, nodes, gpus, kind, cpus, memory_mib):
    asked = build_request(gpus=gpus, cpu=cpus, models=(MODELS[kind],) if kind else (), replicas=nodes, dry_run=True)
    request = replace(asked.spec.request, memory_bytes=memory_mib * MIB)
    try:
        core.submit(replace(asked, spec=replace(asked.spec, request=request)), now_ns=9)
    except InvalidArgument:
        return False
    return True


def test_what_slurm_says_can_never_run_is_refused_and_nothing_else(slurm):
    core, rng = build_same(), random.Random(7)
    counts = {True: 0, False: 0}
    for number in range(ASKED):
        asked = draw(rng)
        theirs = may_run_in_slurm(slurm, *asked)
        assert may_run_here(core, *asked) == theirs, asked
        counts[theirs] += 1
        if number == ASKED // 2:
            # What is full becomes free again: neither refuses work for it.
            slurm.submit("sleep 600", "--nodes=2", f"--gres=gpu:{GPUS}", steered=False)
            core.submit(build_request("full", gpus=GPUS, replicas=2), now_ns=10)
    assert min(counts.values()) > ASKED // 5


def test_work_for_a_node_out_of_service_waits_in_both(slurm):
    """Slurm's dry run looks at now and has no time for it; its submission takes it, as ours does."""
    core = build_same()
    slurm.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    core.cordon_node("n2", now_ns=10)
    job = slurm.submit("true", "--gres=gpu:h100:1", steered=False)
    core.submit(build_request("job", models=(MODELS["h100"],)), now_ns=11)
    assert slurm.state(job) == "PENDING"
    assert core.workload("job").phase is WorkloadPhase.PENDING
    assert core.workload("job").reason.startswith("unavailable:")
