"""A real Slurm and a real agent: the limit that a plan has for a job is on the GPU that Slurm gives it before the job begins.

Needs Debian's slurm-wlm and munge, and root (`make test-slurm` installs them).
"""

import asyncio
import json
import sys

import pytest
from tests.fake_controller import EACH_SECOND, serving
from tests.slurm_rig import GPUS, SlurmCluster, find_missing, write_handover
from tests.waiting import wait_until

from eelgrid_protos.messages import (
    Acknowledgement,
    Assignment,
    GpuSetting,
    Hello,
    NodePlan,
    PlanApplied,
    SampleBatch,
    Welcome,
)

MISSING = find_missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no Slurm here: {MISSING}")
# One step of the guard's below the 700 W of an H100.
PLANNED_W = 600.0
NODE = {
    "name": "n0",
    "cpu_milli": 16_000,
    "memory_bytes": 2**36,
    "gpus": [{"product": "h100-sxm5-80gb", "count": GPUS}],
}


@pytest.fixture
def handed(tmp_path):
    folder, lines = write_handover(tmp_path)
    with SlurmCluster(types=("h100",), extra=lines) as slurm:
        yield slurm, folder


def plan_for(epoch, **limits):
    """A plan for the node: by workload a GPU and its limit."""
    return NodePlan(
        node_name="n0",
        epoch=epoch,
        lease_s=600.0,
        enforce=True,
        assignments=tuple(
            Assignment(workload_id=key, replica=0, gpu_uuids=(uuid,), gpu_milli=1000)
            for key, (uuid, _) in limits.items()
        ),
        gpu_settings=tuple(GpuSetting(gpu_uuid=uuid, power_limit_w=limit_w) for uuid, limit_w in limits.values()),
    )


async def test_a_job_or_task_begins_with_its_planned_limit_on_the_gpu_that_slurm_chose(handed, tmp_path):
    slurm, folder = handed
    (tmp_path / "fleet.json").write_text(json.dumps({"nodes": [NODE]}))
    replies = []

    async def script(number, messages, reply):
        async for message in messages:
            match message:
                case Hello():
                    reply(Welcome(acknowledged_sequence=0, cadence=EACH_SECOND))
                    replies.append(reply)
                case SampleBatch():
                    reply(Acknowledgement(sequence=message.sequence))

    words = ["--simulate", str(tmp_path / "fleet.json"), "--slurm-folder", str(folder), "--listen", "127.0.0.1:0"]
    words += ["--metrics", "127.0.0.1:0"]
    async with serving(script) as controller:
        agent = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "eelgrid_agent", "--controller", f"127.0.0.1:{controller.port}", *words
        )
        try:
            await wait_until(lambda: replies and controller.of(Hello), within_s=60.0)
            gpus = sorted(controller.of(Hello)[0].inventory.gpus, key=lambda gpu: gpu.index)
            first, last = gpus[0].uuid, gpus[-1].uuid
            # What the job sees as its first act: the agent's answer to the prolog.
            shows = f"cat {folder}/answer-$SLURM_JOB_ID; sleep 600"
            job = slurm.submit(shows, "--hold", "--gres=gpu:h100:1", steered=False)
            array = slurm.submit(shows, "--hold", "--array=5", "--gres=gpu:h100:1", steered=False)
            # The plan expects both at the far end of the node; Slurm begins at the other.
            planned = {f"slurm-{job}": (last, PLANNED_W), f"slurm-{array}_5": (gpus[2].uuid, PLANNED_W)}
            replies[-1](plan_for(1, **planned))
            await wait_until(
                lambda: {path.name for path in folder.iterdir()} >= {f"plan-{job}", f"plan-{array}_5"}, within_s=60.0
            )
            for number, uuid in ((job, first), (array, gpus[1].uuid)):
                slurm.run("scontrol", "release", number)
                await wait_until(lambda number=number: "power limit" in slurm.output(number), within_s=60.0)
                # In force before the first line of the script, which prints it.
                assert f"{uuid}: power limit {PLANNED_W:g} W" in slurm.output(number)
            slurm.run("scancel", job, array)
            await wait_until(lambda: not list(folder.glob("job-*")), within_s=60.0)
            replies[-1](plan_for(2))
            await wait_until(lambda: not list(folder.glob("plan-*")), within_s=60.0)
            await wait_until(lambda: controller.of(PlanApplied)[-1].epoch == 2, within_s=60.0)
        finally:
            agent.terminate()
            await agent.wait()
    assert agent.returncode == 0
