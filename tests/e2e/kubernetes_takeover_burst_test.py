"""A leader that ends in the middle of a burst, and one with another journal that takes over: nothing twice, nobody stuck.

Whole controllers over HTTP, with the Lease, at the API server in memory whose scheduler binds by what
nodes have. What a killed process would leave behind is left behind: its Lease, and writes under way.
"""

import asyncio
import shutil

import pytest
from bench.kubernetes.checker import judge
from tests.builders.cluster import build_node as build_inventory
from tests.builders.kubernetes import build_node, build_pod
from tests.builders.server import run_controller
from tests.e2e.kubernetes_gate_test import config, until
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.faults import too_many
from tests.fakes.kubernetes.scheduler import Scheduler
from tests.state_invariants import check_invariants

from eelgrid_controller.engines.kubernetes.api.port import NODES, PODS
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_PLAN

NODE_NAMES = [f"n{index}" for index in range(6)]
GPUS, BURST = 8, 45


def planned(pods):
    return [one for one in pods if ANNOTATION_PLAN in (one["metadata"].get("annotations") or {})]


async def burst(cluster, pods=range(BURST)):
    for index in pods:
        await cluster.create(PODS, build_pod(f"p{index:02d}"))


async def judged(cluster):
    nodes = (await cluster.list(NODES)).items
    return judge((await cluster.list(PODS)).items, nodes)


async def all_bound(cluster):
    """All are bound in time, and nothing is given twice at any look."""

    def check(pods):
        return len(pods) == BURST and all(one["spec"].get("nodeName") for one in pods)

    await until(cluster, check, within_s=60.0)
    found = await judged(cluster)
    assert found.is_safe, found
    assert not found.unbound


def frozen(rig):
    """From now on the leader renews nothing and writes nothing, and does not say so: as a killed process."""
    placing = rig.controller.placing
    placing.elector.stop = lambda: None
    for task in asyncio.all_tasks():
        frame = getattr(task.get_coro(), "cr_frame", None)
        if frame is not None and frame.f_locals.get("self") in (placing.elector, placing.engine):
            task.cancel()


async def in_a_burst(fake, tmp_path, *, agents=False, journal="empty"):
    """A leader dies when some of a burst are planned; another takes over."""
    cluster = fake.client()
    for name in NODE_NAMES:
        await cluster.create(NODES, build_node(name, gpus=GPUS))
    await fake.add(Scheduler(fake))
    async with run_controller(tmp_path / "first", kubernetes=config(fake, tmp_path)) as rig:
        if agents:
            await rig.join(*(build_inventory(name, gpus=GPUS, agent_version="1") for name in NODE_NAMES))
        if journal == "older":
            shutil.copytree(tmp_path / "first", tmp_path / "second", ignore=shutil.ignore_patterns("*lock*", "energy*"))
        making = asyncio.create_task(burst(cluster, range(BURST // 2)))
        await until(cluster, lambda pods: len(planned(pods)) >= BURST // 3)
        frozen(rig)
        async with run_controller(tmp_path / "second", kubernetes=config(fake, tmp_path)) as second:
            await making
            await burst(cluster, range(BURST // 2, BURST))
            if agents:
                # They reach the new leader when it leads, as by a Service: what it planned by then was by index.
                await until(cluster, lambda pods: len(planned(pods)) > BURST // 2)
                await second.join(*(build_inventory(name, gpus=GPUS, agent_version="1") for name in NODE_NAMES))
            await all_bound(cluster)
            state = second.controller.loop.core.state
            async with asyncio.timeout(30.0):
                while any(record.others.gpu_count for record in state.nodes.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            check_invariants(state)
            assert sum(len(record.gpu_milli) for record in state.nodes.values()) == BURST


@pytest.mark.parametrize("journal", ["empty", "older"])
def test_a_leader_that_is_killed_in_a_burst_is_followed_without_a_device_given_twice(tmp_path, journal):
    async def play():
        async with FakeCluster() as fake:
            await in_a_burst(fake, tmp_path, journal=journal)

    asyncio.run(play())


def test_agents_that_reach_the_new_leader_after_it_has_planned_change_no_device(tmp_path):
    async def play():
        async with FakeCluster() as fake:
            await in_a_burst(fake, tmp_path, agents=True)

    asyncio.run(play())


def test_a_new_leader_that_begins_while_the_api_server_is_away_takes_nothing_that_runs_for_free(tmp_path):
    async def play():
        async with FakeCluster() as fake:
            cluster = fake.client()
            for name in NODE_NAMES:
                await cluster.create(NODES, build_node(name, gpus=GPUS))
            await fake.add(Scheduler(fake))
            how = config(fake, tmp_path)
            async with (
                run_controller(tmp_path / "first", kubernetes=how) as rig,
                run_controller(tmp_path / "standby", kubernetes=how),
            ):
                making = asyncio.create_task(burst(cluster))
                await until(cluster, lambda pods: len(planned(pods)) >= BURST // 3)
                fake.drop_watches()
                frozen(rig)
                await making
                await fake.restart()
                await all_bound(cluster)

    asyncio.run(play())


def test_a_leader_whose_watch_is_behind_sees_what_the_one_before_has_written_before_it_decides(tmp_path):
    async def play():
        async with FakeCluster() as fake:
            cluster = fake.client()
            for name in NODE_NAMES:
                await cluster.create(NODES, build_node(name, gpus=GPUS))
            how = config(fake, tmp_path)
            async with (
                run_controller(tmp_path / "first", kubernetes=how) as rig,
                run_controller(tmp_path / "standby", kubernetes=how) as standby,
            ):
                refused = fake.knobs.add("refuse", verbs=("patch",), part="/pods/", fault=too_many)
                # Ten that go again, so that the leader has other places for the rest than one that begins now.
                for index in range(10):
                    await cluster.create(PODS, build_pod(f"gone{index}"))
                await burst(cluster)
                state = rig.controller.loop.core.state
                await until(cluster, lambda _: state.live_workloads == BURST + 10)
                for index in range(10):
                    await cluster.delete(PODS, f"gone{index}", namespace="default", grace_s=0)
                gate = standby.controller.placing.engine.gate
                await until(cluster, lambda _: state.live_workloads == BURST == len(gate.units))
                # From here on the standby hears nothing of what the leader pins: ten pods of all.
                fake.knobs.is_mute = True
                for tens in "1234":
                    fake.knobs.add("refuse", verbs=("patch",), part=f"/pods/p{tens}", fault=too_many)
                fake.knobs.end(refused)
                await until(cluster, lambda pods: len(planned(pods)) >= 10)
                frozen(rig)
                fake.knobs.end()
                await until(cluster, lambda _: standby.controller.placing.elector.term() is not None)
                fake.knobs.is_mute = False
                fake.drop_watches()
                await fake.add(Scheduler(fake))
                await all_bound(cluster)

    asyncio.run(play())
