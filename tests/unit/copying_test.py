"""A copy in slices is the state of one moment, whatever was committed while it was taken."""

import asyncio
import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_node, build_request
from tests.builders.server import run_controller
from tests.state_invariants import check_invariants

from eelgrid_controller.clock import Clock
from eelgrid_controller.server.grpc import whatif_runner
from eelgrid_controller.server.grpc.whatif_runner import run_on_copy
from eelgrid_protos.faults import Unavailable
from eelgrid_protos.messages import CancelWorkloadRequest, Move, ReplicaMove


def away(core, key):
    """A move to another node: it changes two nodes at once."""
    (source,) = core.workload(key).placements
    for number in range(5):
        record = core.state.nodes[f"n{number}"]
        free = [gpu for gpu in record.inventory.gpus if record.gpu_milli.get(gpu.uuid, 0) <= 700]
        if free and f"n{number}" != source.node_name:
            gpu = free[-1]
            target = replace(source, node_name=f"n{number}", gpu_uuids=(gpu.uuid,), gpu_indexes=(gpu.index,))
            return Move(workload_id=key, replicas=(ReplicaMove(source=source, target=target),))
    raise AssertionError("nowhere is room")


async def test_what_changes_between_the_slices_is_in_the_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(whatif_runner, "_SLICE", 1)
    async with run_controller(tmp_path) as rig:
        await rig.join(*(build_node(f"n{number}") for number in range(6)))
        loop = rig.controller.loop
        moved = []

        async def busy():
            for number in range(30):
                await loop.submit(build_request(f"k{number}", milli=300))
                if number % 3 == 2:
                    await loop.cancel(f"k{number - 1}")
                if number % 2:
                    moved.append(await loop.apply_moves((away(loop.core, f"k{number}"),)))
                if number == 10:
                    await loop.mark_gpu_lost("n5", "GPU-n5-1")
                if number == 15:
                    await loop.register_node(build_node("n9"))
                await asyncio.sleep(0)

        work = asyncio.create_task(busy())
        for _ in range(12):
            (live, twin), held_s = await run_on_copy(
                loop, Clock(), lambda core, state: (json.dumps(core.state.dump()), state)
            )
            assert json.dumps(twin.dump()) == live
            check_invariants(twin)
            assert held_s > 0.0
        await work
        assert sum(moved) == 15
        listeners = len(loop.listeners)
        (live, twin), _ = await run_on_copy(loop, Clock(), lambda core, state: (core.state, state))
        assert len(loop.listeners) == listeners
        assert twin.dump() == live.dump()
        for name, record in live.nodes.items():
            assert twin.nodes[name] is not record
            assert twin.nodes[name].assignments is not record.assignments
        await rig.operators.cancel_workload(CancelWorkloadRequest(workload_id="k0"))
        assert "k0" in twin.workloads
        check_invariants(twin)


async def test_a_state_that_is_put_back_is_copied_again(tmp_path, monkeypatch):
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node("n1"))
        loop = rig.controller.loop
        slices = whatif_runner._records
        replaced = []

        async def put_back_once(*arguments):
            found = await slices(*arguments)
            if not replaced:
                replaced.append(loop._core)
                loop._core = loop.make_core(loop.core.state.copy())
            return found

        monkeypatch.setattr(whatif_runner, "_records", put_back_once)
        state, _ = await run_on_copy(loop, Clock(), lambda core, state: core.state)
        assert replaced[0].state is not state

        async def put_back_always(*arguments):
            found = await slices(*arguments)
            loop._core = loop.make_core(loop.core.state.copy())
            return found

        monkeypatch.setattr(whatif_runner, "_records", put_back_always)
        with pytest.raises(Unavailable):
            await run_on_copy(loop, Clock(), lambda core, state: state)
