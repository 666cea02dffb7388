"""The informer over the fake API server: every way in which a watch can go wrong."""

import asyncio
import contextlib
import logging
import random
import time

import pytest
from tests.builders.kubernetes import build_config_map
from tests.fakes.kubernetes import faults
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.resources import CONFIG_MAPS
from tests.waiting import wait_for

from eelgrid_controller.engines.kubernetes.api.client import RequestLimits
from eelgrid_controller.engines.kubernetes.api.informer import (
    Delta,
    DeltaType,
    Informer,
    InformerSelector,
    InformerTiming,
    ObjectStore,
    TooManyObjects,
)
from eelgrid_controller.engines.kubernetes.api.port import ObjectKey, Resource, WatchEvent, WatchEventType

PACE = InformerTiming(watch_s=60.0, silent_s=20.0, lived_s=0.0, first_wait_s=0.01, most_wait_s=0.05)
LOG = logging.getLogger("eelgrid.test")


class Watched:
    """A fake, a client of it and an informer that runs."""

    def __init__(self, fake, **how):
        self.fake = fake
        self.cluster = fake.client(bounds=RequestLimits(request_s=2.0))
        how = {"pace": PACE, **how}
        self.informer = Informer(
            self.cluster, CONFIG_MAPS, rng=random.Random(1), monotonic_s=time.monotonic, log=LOG, **how
        )
        self.deltas = []
        self.informer.add_listener(self.deltas.extend)

    async def add(self, name, labels=None, **data):
        return await self.cluster.create(CONFIG_MAPS, build_config_map(name, labels, namespace="default", **data))

    async def is_level(self):
        """Wait until what is held is what there is."""

        async def look():
            there = {ObjectKey(*key): record.object for key, record in self.fake.store.of(self.kind).items()}
            return there == dict(self.informer.objects)

        await wait_for(look)

    @property
    def kind(self):
        return self.fake.api.catalogue.find("", "v1", "configmaps")


@contextlib.asynccontextmanager
async def watching(**how):
    async with FakeCluster() as fake:
        watched = Watched(fake, **how)
        task = asyncio.create_task(watched.informer.run())
        try:
            await asyncio.wait_for(watched.informer.wait_synced(), 5.0)
            yield watched
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def told(deltas):
    return [(delta.what, delta.key.name) for delta in deltas]


async def test_changes_are_reported_in_their_order():
    async with watching() as watched:
        await watched.add("a", x="1")
        await watched.cluster.patch(CONFIG_MAPS, "a", {"data": {"x": "2"}}, namespace="default")
        await watched.cluster.delete(CONFIG_MAPS, "a", namespace="default")
        await wait_for(lambda: _when(len(watched.deltas) == 3))
        assert told(watched.deltas) == [(DeltaType.ADDED, "a"), (DeltaType.MODIFIED, "a"), (DeltaType.DELETED, "a")]
        assert (watched.deltas[1].old["data"], watched.deltas[1].new["data"]) == ({"x": "1"}, {"x": "2"})
        assert watched.informer.lists == 1


async def _when(is_so):
    return is_so


async def test_a_watch_that_is_cut_goes_on_where_it_was():
    async with watching() as watched:
        await watched.add("a")
        await watched.is_level()
        for name in "bcd":
            await wait_for(lambda: _when(len(watched.fake.server.watches) == 1))
            watched.fake.drop_watches()
            await watched.add(name)
            await watched.is_level()
        assert watched.informer.lists == 1
        assert watched.informer.watches >= 4
        assert told(watched.deltas) == [(DeltaType.ADDED, name) for name in "abcd"]


async def test_after_a_restart_that_lost_the_log_all_is_listed_and_what_went_is_reported():
    async with watching() as watched:
        for name in "abc":
            await watched.add(name, x="1")
        await watched.is_level()
        del watched.deltas[:]
        await watched.fake.stop()
        kind, store = watched.kind, watched.fake.store
        store.remove(kind, "default", "a")
        changed = dict(store.find(kind, "default", "b").object)
        store.put(kind, {**changed, "metadata": dict(changed["metadata"]), "data": {"x": "2"}})
        store.remove(kind, "default", "c")
        watched.fake.api.create(kind, "default", build_config_map("c", namespace="default", x="1"))
        store.compact()
        await watched.fake.start()
        await watched.is_level()
        assert watched.informer.lists == 2
        assert told(watched.deltas) == [
            (DeltaType.DELETED, "a"),
            (DeltaType.MODIFIED, "b"),
            (DeltaType.DELETED, "c"),
            (DeltaType.ADDED, "c"),
        ]


async def test_bookmarks_carry_a_quiet_watch_over_a_compaction():
    async with watching(selection=InformerSelector(labels="x=1"), pace=PACE) as watched:
        watched.fake.knobs.bookmark_every_s = 0.05
        watched.fake.drop_watches()
        for name in "abc":
            await watched.add(name)
        version = str(watched.fake.store.version)
        await wait_for(lambda: _when(watched.informer.version == version))
        watched.fake.store.compact()
        watched.fake.drop_watches()
        await watched.add("d", {"x": "1"})
        await wait_for(lambda: _when(len(watched.deltas) == 1))
        assert watched.informer.lists == 1


async def test_a_watch_that_is_silent_for_too_long_is_begun_again():
    pace = InformerTiming(watch_s=60.0, silent_s=0.2, lived_s=0.0, first_wait_s=0.01, most_wait_s=0.05)
    async with watching(pace=pace) as watched:
        watched.fake.knobs.is_mute = True
        await watched.add("a")
        await watched.is_level()
        assert watched.informer.lists >= 2
        assert "silent" in str(watched.informer.last_error)


async def test_a_watch_that_speaks_now_and_then_lives_on():
    pace = InformerTiming(watch_s=60.0, silent_s=1.0, lived_s=0.0, first_wait_s=0.01, most_wait_s=0.05)
    async with watching(pace=pace) as watched:
        for index in range(12):
            await watched.add(f"a{index}")
            await asyncio.sleep(0.2)
        await watched.is_level()
        assert (watched.informer.lists, watched.informer.watches) == (1, 1)


async def test_a_burst_is_reported_whole_and_in_order():
    async with watching() as watched:
        await watched.add("first")
        await wait_for(lambda: _when(len(watched.deltas) == 1))
        names = [f"b{index:03d}" for index in range(200)]
        for name in names:
            await watched.add(name)
        await watched.is_level()
        assert [delta.key.name for delta in watched.deltas] == ["first", *names]
        assert watched.informer.watches == 1


async def test_a_server_that_went_back_in_time_is_believed():
    pace = InformerTiming(watch_s=60.0, silent_s=0.3, lived_s=0.0, first_wait_s=0.01, most_wait_s=0.05)
    async with watching(pace=pace) as watched:
        await watched.add("a", x="1")
        await watched.is_level()
        await watched.fake.stop()
        store, kind = watched.fake.store, watched.kind
        store.restored(10)
        found = dict(store.find(kind, "default", "a").object)
        store.put(kind, {**found, "metadata": dict(found["metadata"]), "data": {"x": "0"}})
        await watched.fake.start()
        await watched.add("b")
        await watched.is_level()
        assert watched.informer.objects[ObjectKey("default", "a")]["data"] == {"x": "0"}
        assert int(watched.informer.version) < 1_000


@pytest.mark.parametrize("fault", [faults.server_error, faults.too_many, faults.unauthorized])
async def test_a_server_in_trouble_is_waited_for(fault):
    async with watching() as watched:
        await watched.add("a")
        await watched.is_level()
        fault = (lambda: faults.too_many(0)) if fault is faults.too_many else fault
        trouble = watched.fake.knobs.add("refuse", times=4, verbs={"watch", "list"}, fault=fault)
        watched.fake.drop_watches()
        await watched.add("b")
        await watched.is_level()
        assert trouble.met == 4
        assert watched.informer.lists == 1
        assert watched.informer.failures >= 4


async def test_lists_come_in_pages_and_a_page_too_late_begins_again():
    async with FakeCluster() as fake:
        kind = fake.api.catalogue.find("", "v1", "configmaps")
        for index in range(1_200):
            fake.api.create(kind, "default", build_config_map(f"c{index:04}", namespace="default"))
        watched = Watched(fake)
        slow = fake.knobs.add("slow", verbs={"list"}, delay_s=0.05)
        task = asyncio.create_task(watched.informer.run())
        await wait_for(lambda: _when(slow.met == 2))
        fake.store.compact()
        await asyncio.wait_for(watched.informer.wait_synced(), 10.0)
        assert len(watched.informer.objects) == 1_200
        assert slow.met >= 5, "two pages, one too late, three pages"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_more_objects_than_may_be_held_are_an_error():
    async with FakeCluster() as fake:
        watched = Watched(fake, most=2)
        task = asyncio.create_task(watched.informer.run())
        await watched.informer.wait_synced()
        for name in "abc":
            await watched.add(name)
        with pytest.raises(TooManyObjects):
            await asyncio.wait_for(task, 5.0)


async def test_a_kind_that_is_not_served_is_asked_for_seldom():
    waits = []

    async def sleep(wait_s):
        waits.append(wait_s)
        await asyncio.sleep(0.0 if len(waits) < 3 else 3600.0)

    async with FakeCluster() as fake:
        things = Resource("x.io", "v1", "things", "Thing")
        informer = Informer(
            fake.client(), things, rng=random.Random(1), monotonic_s=time.monotonic, log=LOG, sleep=sleep
        )
        task = asyncio.create_task(informer.run())
        await wait_for(lambda: _when(len(waits) == 3))
        assert waits == [30.0, 30.0, 30.0]
        assert not informer.is_synced
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_is_not_needed_is_not_kept():
    def keep(found):
        metadata = {key: found["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
        return {"metadata": metadata}

    async with watching(keep=keep) as watched:
        await watched.add("a", x="1")
        await wait_for(lambda: _when(len(watched.informer.objects) == 1))
        assert watched.informer.objects[ObjectKey("default", "a")].keys() == {"metadata"}
        assert watched.informer.age_s() < 5.0


def test_an_event_that_is_older_than_what_is_held_changes_nothing():
    held = ObjectStore(most=10)
    found = {"metadata": {"name": "a", "namespace": "n", "uid": "u", "resourceVersion": "7"}}
    old = {"metadata": {**found["metadata"], "resourceVersion": "5"}}
    assert held.replace([found]) == [Delta(DeltaType.ADDED, ObjectKey("n", "a"), None, found)]
    assert held.apply_change(WatchEvent(WatchEventType.MODIFIED, old)) == []
    assert held.apply_change(WatchEvent(WatchEventType.DELETED, old)) == []
    assert held.objects[ObjectKey("n", "a")] is found
    assert held.replace([old]) == [Delta(DeltaType.MODIFIED, ObjectKey("n", "a"), found, old)], "a list is right"


async def test_a_list_from_now_on_reports_what_a_mute_watch_did_not():
    async with watching() as watched:
        await watched.add("a")
        await watched.is_level()
        watched.fake.knobs.is_mute = True
        await watched.add("b")
        lists = watched.informer.lists
        async with asyncio.timeout(10.0):
            await watched.informer.wait_listed_since(time.monotonic())
        assert ObjectKey("default", "b") in watched.informer.objects
        assert watched.informer.lists == lists + 1
        assert watched.informer.failures == 0
        await watched.informer.wait_listed_since(0.0)
        assert watched.informer.lists == lists + 1, "one that began later will do"
        watched.fake.knobs.is_mute = False
        watched.fake.drop_watches()
        await watched.add("c")
        await watched.is_level()
