"""Whatever happens to server and network, in the end the informer holds what the server holds, and its deltas say so."""

import asyncio
import logging
import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.kubernetes import faults
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.resources import CONFIG_MAPS
from tests.waiting import wait_for

from eelgrid_controller.engines.kubernetes.api.client import RequestLimits
from eelgrid_controller.engines.kubernetes.api.informer import DeltaType, Informer, InformerTiming
from eelgrid_controller.engines.kubernetes.api.port import ObjectKey, uid_of

NAMES = st.sampled_from("abcde")
STEPS = st.one_of(
    st.tuples(st.sampled_from(["write", "write", "delete"]), NAMES),
    st.tuples(st.sampled_from(["drop", "compact", "restart", "refuse", "busy", "breathe", "breathe"]), st.just("")),
)
PACE = InformerTiming(watch_s=30.0, silent_s=10.0, lived_s=0.0, first_wait_s=0.001, most_wait_s=0.01)


class Mirror:
    """What deltas alone make of the world; each must fit onto those before it."""

    def __init__(self):
        self.objects = {}

    def hear(self, deltas):
        for delta in deltas:
            assert self.objects.get(delta.key) == delta.old
            if delta.what is DeltaType.DELETED:
                assert delta.old is not None
                del self.objects[delta.key]
                continue
            assert (delta.what is DeltaType.ADDED) == (delta.old is None)
            assert delta.old is None or uid_of(delta.old) == uid_of(delta.new)
            self.objects[delta.key] = delta.new


async def play(steps):
    async with FakeCluster() as fake:
        kind = fake.api.catalogue.find("", "v1", "configmaps")
        informer = Informer(
            fake.client(bounds=RequestLimits(request_s=1.0)),
            CONFIG_MAPS,
            rng=random.Random(1),
            monotonic_s=time.monotonic,
            log=logging.getLogger("eelgrid.test"),
            pace=PACE,
        )
        mirror = Mirror()
        informer.add_listener(mirror.hear)
        task = asyncio.create_task(informer.run())
        for number, (what, name) in enumerate(steps):
            await step(fake, kind, what, name, number)
        fake.knobs.end()

        async def is_level():
            if task.done():
                task.result()
            there = {ObjectKey(*key): record.object for key, record in fake.store.of(kind).items()}
            return informer.is_synced and there == dict(informer.objects)

        await wait_for(is_level)
        assert mirror.objects == dict(informer.objects)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def step(fake, kind, what, name, number):
    found = fake.store.find(kind, "default", name) if name else None
    match what:
        case "write" if found is None:
            fake.api.create(kind, "default", {"metadata": {"name": name}, "data": {"x": str(number)}})
        case "write":
            body = {"data": {"x": str(number)}}
            fake.api.patch(kind, "default", name, "", body, "application/merge-patch+json")
        case "delete" if found is not None:
            fake.api.delete(kind, "default", name)
        case "drop":
            fake.drop_watches()
        case "compact":
            fake.store.compact()
        case "restart":
            await fake.restart(is_log_lost=number % 2 == 0)
        case "refuse":
            fake.knobs.add("refuse", times=2, verbs={"list", "watch"}, fault=faults.server_error)
        case "busy":
            fake.knobs.add("refuse", times=1, verbs={"list", "watch"}, fault=lambda: faults.too_many(0))
        case "breathe":
            await asyncio.sleep(0.01)


@given(st.lists(STEPS, max_size=25))
@settings(max_examples=40, deadline=None)
def test_what_is_held_is_what_there_is_in_the_end(steps):
    asyncio.run(play(steps))
