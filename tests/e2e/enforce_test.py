"""An agent that really runs takes a plan over its stream, changes its devices, and tells what it read back."""

import asyncio
import json
import sys

from tests.fake_controller import EACH_SECOND, serving
from tests.waiting import wait_until

from eelgrid_protos.messages import (
    Acknowledgement,
    ApplyStatus,
    GpuLayout,
    GpuSetting,
    Hello,
    Inventory,
    NodeEvent,
    NodeEventKind,
    NodePlan,
    PlanApplied,
    SampleBatch,
    WantedInstance,
    Welcome,
)

GPUS = [{"product": "h100-sxm5-80gb"}, {"product": "h100-sxm5-80gb"}]
FLEET = {"nodes": [{"name": "gpu-7", "cpu_milli": 1000, "memory_bytes": 2**30, "gpus": GPUS}]}
HALVES = (WantedInstance(profile="4g.40gb", start=0), WantedInstance(profile="3g.40gb", start=4))


async def test_limits_and_a_layout_are_set_read_back_and_reported_over_the_stream(tmp_path):
    (tmp_path / "fleet.json").write_text(json.dumps(FLEET))

    async def script(number, messages, reply):
        async for message in messages:
            match message:
                case Hello():
                    reply(Welcome(acknowledged_sequence=0, cadence=EACH_SECOND))
                    one, other = (gpu.uuid for gpu in message.inventory.gpus)
                    settings = tuple(
                        GpuSetting(gpu_uuid=uuid, power_limit_w=watts) for uuid, watts in ((one, 500.0), (other, 5.0))
                    )
                    layout = GpuLayout(gpu_uuid=one, mig_enabled=True, instances=HALVES)
                    reply(
                        NodePlan(
                            node_name="gpu-7",
                            epoch=1,
                            lease_s=600.0,
                            enforce=True,
                            gpu_settings=settings,
                            gpu_layouts=(layout,),
                        )
                    )
                case SampleBatch():
                    reply(Acknowledgement(sequence=message.sequence))

    async with serving(script) as controller:
        agent = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "eelgrid_agent",
            "--simulate",
            str(tmp_path / "fleet.json"),
            "--controller",
            f"127.0.0.1:{controller.port}",
            "--listen",
            "127.0.0.1:0",
            "--metrics",
            "127.0.0.1:0",
            stderr=asyncio.subprocess.PIPE,
        )
        try:

            def settled():
                answers = controller.of(PlanApplied)
                return answers and answers[-1].status is ApplyStatus.APPLIED and controller.of(Inventory)

            await wait_until(settled, within_s=30.0)
            one, other = (gpu.uuid for gpu in controller.of(Hello)[0].inventory.gpus)
            results = {}
            for result in controller.of(PlanApplied)[-1].results:
                results.setdefault(result.subject, []).append(result)
            # A wish under what the part takes is clamped to it, and the answer says by which rule.
            assert {result.power_limit_w for result in results[one]} >= {500.0}
            (clamped,) = results[other]
            assert (clamped.power_limit_w, clamped.detail) == (
                200.0,
                "constraints: 5 W requested, the devices accept 200 W",
            )
            gpu = controller.of(Inventory)[-1].gpus[0]
            assert [(instance.profile, instance.start) for instance in gpu.gpu_instances] == [
                ("4g.40gb", 0),
                ("3g.40gb", 4),
            ]
            assert NodeEventKind.LAYOUT_CHANGED in {event.kind for event in controller.of(NodeEvent)}
        finally:
            agent.terminate()
            _, said = await agent.communicate()
    assert agent.returncode == 0
    assert b"event=stopped" in said
