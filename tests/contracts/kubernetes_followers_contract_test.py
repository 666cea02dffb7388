"""The informer and the elector, over the fake and over a real API server: the same answers make them do the same."""

import asyncio
import contextlib
import logging
import random
import time

import pytest
from tests.builders.kubernetes import build_pod
from tests.kubernetes_api_rig import WAYS, open_rig
from tests.waiting import wait_for

from eelgrid_controller.clock import Clock
from eelgrid_controller.engines.kubernetes.api.election import Elector, Timing
from eelgrid_controller.engines.kubernetes.api.informer import Informer, InformerSelector, InformerTiming
from eelgrid_controller.engines.kubernetes.api.port import LEASES, PODS, ObjectKey

LOG = logging.getLogger("eelgrid.test")
TIMING = Timing(lease_s=3.0, renew_s=2.0, retry_s=0.4)


@pytest.fixture(params=WAYS)
async def rig(request):
    async with open_rig(request.param) as made:
        yield made


@contextlib.asynccontextmanager
async def running(*runners):
    tasks = [asyncio.create_task(one.run()) for one in runners]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_informer_holds_what_there_is_also_over_watches_that_end(rig):
    pace = InformerTiming(watch_s=1.0, lived_s=0.5, first_wait_s=0.01, most_wait_s=0.1)
    informer = Informer(
        rig.cluster,
        PODS,
        rng=random.Random(1),
        monotonic_s=time.monotonic,
        log=LOG,
        selection=InformerSelector(namespace=rig.space),
        pace=pace,
    )
    await rig.add(PODS, build_pod("first"))
    async with running(informer):
        await informer.wait_synced()
        for index in range(20):
            await rig.add(PODS, build_pod(f"p{index}"))
            await rig.cluster.patch(PODS, f"p{index}", {"metadata": {"labels": {"x": "1"}}}, namespace=rig.space)
            if index % 2:
                await rig.cluster.delete(PODS, f"p{index}", namespace=rig.space)
            await asyncio.sleep(0.1)

        async def is_level():
            there = (await rig.cluster.list(PODS, namespace=rig.space)).items
            return {ObjectKey(rig.space, one["metadata"]["name"]): one for one in there} == dict(informer.objects)

        await wait_for(is_level)
        assert informer.lists == 1
        assert informer.watches >= 2
        assert len(informer.objects) == 11


async def test_a_standby_follows_a_leader_that_died_within_two_leases(rig):
    def candidate(who):
        how = {"namespace": rig.space, "name": "eelgrid", "clock": Clock(), "log": LOG, "timing": TIMING}
        return Elector(rig.cluster, identity=who, **how)

    first, second = candidate("a"), candidate("b")
    async with running(first) as (task,):
        await wait_for(lambda: _leads(first))
        async with running(second) as (other,):
            await asyncio.sleep(1.0)
            assert second.term() is None
            task.cancel()
            died_s = time.monotonic()
            await wait_for(lambda: _leads(second), within_s=4.0 * TIMING.lease_s)
            assert second.term().epoch == 2
            assert time.monotonic() - died_s > TIMING.lease_s - 1.0, "nobody takes a lease that is not over"
            second.stop()
            await asyncio.wait_for(other, 10.0)
            found = await rig.cluster.get(LEASES, "eelgrid", namespace=rig.space)
            assert "holderIdentity" not in found["spec"]


async def _leads(elector):
    return elector.term() is not None
