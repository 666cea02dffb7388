"""The base of the reconcilers: its queue, terms, retries, restarts, Events and writes, without a cluster."""

import asyncio
import contextlib
import logging
import random
from types import SimpleNamespace

import pytest
from tests.waiting import wait_until

from eelgrid_controller.clock import Clock
from eelgrid_controller.engines.kubernetes.api.election import LeadershipTerm
from eelgrid_controller.engines.kubernetes.api.errors import ClusterUnreachable, Conflict, StaleTerm
from eelgrid_controller.engines.kubernetes.model.objects import Pod
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable
from eelgrid_controller.engines.kubernetes.model.status_reporting import EventReference
from eelgrid_controller.engines.kubernetes.reconcilers import reconciler
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import (
    ClusterContext,
    EventInbox,
    EventRecorder,
    ParseCache,
    Reconciler,
    Result,
    WorkQueue,
)
from eelgrid_controller.engines.kubernetes.reconcilers.writers import MoveWriter

LOG = logging.getLogger("eelgrid.test")


class FakeEvents:
    """A cluster that takes Events, and refuses them while `is_refusing`."""

    def __init__(self):
        self.created = []
        self.is_refusing = False

    async def create(self, resource, body, *, namespace=""):
        if self.is_refusing:
            raise Conflict("no", "none")
        self.created.append((resource.kind, namespace, body["note"]))
        return body


class Follower(Reconciler[str]):
    """Notes what it is called for; `act` says what a reconcile does."""

    ready_poll_s = 0.01

    def __init__(self, context, act=lambda key: None, **options):
        super().__init__(context, "test", **options)
        self.act = act
        self.seen, self.terms = [], []
        self.starts = self.resets = self.stops = self.resyncs = 0

    async def start(self, group):
        self.starts += 1

    def reset(self):
        self.resets += 1

    def stop(self):
        self.stops += 1

    def resync(self):
        self.resyncs += 1

    async def begin_term(self, epoch):
        self.terms.append(epoch)

    async def reconcile(self, key):
        self.seen.append(key)
        return self.act(key)


class World:
    """A term that the test turns, and a context with it."""

    def __init__(self):
        self.term = LeadershipTerm(1, 1e12)
        self.cluster = FakeEvents()
        elector = SimpleNamespace(term=lambda: self.term, holder="", hear=lambda _: None)
        self.context = ClusterContext(
            cluster=self.cluster,
            elector=elector,
            identity="test",
            clock=Clock(),
            rng=random.Random(1),
            log=LOG,
        )


@contextlib.asynccontextmanager
async def running(follower):
    task = asyncio.create_task(follower.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_key_that_is_added_twice_is_served_once_and_the_earliest_due_time_counts():
    now_s = 100.0
    queue = WorkQueue(lambda: now_s)
    queue.add("late", 5.0)
    queue.add("a")
    queue.add("b")
    queue.add("a", 3.0)
    assert [await queue.get(), await queue.get()] == ["a", "b"]
    assert len(queue) == 1
    queue.add("late")
    assert await queue.get() == "late"
    assert len(queue) == 0
    now_s = 200.0
    assert len(queue) == 0, "the due time that was replaced is forgotten"


async def test_a_key_rests_however_often_it_is_added():
    now_s = 100.0
    queue = WorkQueue(lambda: now_s)
    queue.add("a")
    queue.rest("a", 2.0)
    queue.add("a")
    queue.add("b")
    assert await queue.get() == "b"
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    now_s = 102.0
    queue.add("c")
    assert await waiting == "a"


async def test_a_due_time_wakes_who_waits():
    queue = WorkQueue(Clock().monotonic_s)
    queue.add("a", 0.05)
    assert await asyncio.wait_for(queue.get(), 10.0) == "a"


def test_an_inbox_wakes_once_for_many_events_and_keeps_their_order():
    wakes = []
    inbox = EventInbox(lambda: wakes.append(1))
    for number in range(3):
        inbox.put(number)
    assert (inbox.drain(), inbox.drain(), len(wakes)) == ([0, 1, 2], [], 1)
    inbox.put(3)
    assert len(wakes) == 2


def test_an_object_is_parsed_once_for_each_version_and_forgotten_with_its_key():
    parsed = []

    def parse(found):
        parsed.append(found["value"])
        if found["value"] == "bad":
            raise KubernetesUnreadable("value", "is bad", "write another")
        return found["value"]

    cache = ParseCache(parse)
    first = {"metadata": {"resourceVersion": "1"}, "value": "a"}
    assert [cache.get("k", first), cache.get("k", first)] == ["a", "a"]
    assert cache.get("k", {"metadata": {"resourceVersion": "2"}, "value": "bad"}) is None
    assert cache.get("k", {"metadata": {"resourceVersion": "2"}, "value": "bad"}) is None
    assert parsed == ["a", "bad"]
    cache.retain([])
    assert cache.get("k", first) == "a"
    assert parsed == ["a", "bad", "a"]


async def test_keys_wait_while_another_leads_and_each_term_is_begun_once():
    world = World()
    world.term = None
    follower = Follower(world.context)
    async with running(follower):
        follower.queue.add("a")
        await asyncio.sleep(0.05)
        assert (follower.seen, follower.terms, follower.starts) == ([], [], 1)
        world.term = LeadershipTerm(4, 1e12)
        await wait_until(lambda: follower.seen == ["a"])
        follower.queue.add("b")
        await wait_until(lambda: follower.seen == ["a", "b"])
        world.term = LeadershipTerm(6, 1e12)
        follower.queue.add("c")
        await wait_until(lambda: follower.seen == ["a", "b", "c"])
        assert follower.terms == [4, 6]


async def test_a_key_that_failed_comes_back_and_others_go_on():
    world = World()

    def act(key):
        if key == "bad" and follower.seen.count("bad") < 2:
            raise ClusterUnreachable("away", is_sent=False)
        return

    follower = Follower(world.context, act)
    async with running(follower):
        follower.queue.add("bad")
        follower.queue.add("good")
        await wait_until(lambda: follower.seen == ["bad", "good", "bad"])
        assert (follower.failures, follower.starts) == (1, 1)


async def test_a_result_brings_the_key_back():
    world = World()
    follower = Follower(world.context, lambda key: Result(0.01) if len(follower.seen) < 3 else None)
    async with running(follower):
        follower.queue.add("a")
        await wait_until(lambda: follower.seen == ["a"] * 3)
        await asyncio.sleep(0.05)
        assert follower.seen == ["a"] * 3


async def test_an_unexpected_error_begins_again_from_lists_and_ends_background_tasks(monkeypatch, caplog):
    monkeypatch.setattr(reconciler, "RESTART_S", 0.02)
    caplog.set_level(logging.CRITICAL)
    world, ended = World(), []

    async def background():
        try:
            await asyncio.sleep(3600.0)
        finally:
            ended.append(1)

    def act(key):
        if len(follower.seen) == 1:
            raise ValueError(key)

    follower = Follower(world.context, act)
    async with running(follower):
        follower.tasks.start_task(background())
        follower.queue.add("a")
        await wait_until(lambda: follower.starts == 2)
        follower.queue.add("b")
        await wait_until(lambda: follower.seen == ["a", "b"])
        assert (follower.failures, follower.resets, follower.stops, ended) == (1, 1, 1, [1])
        assert follower.terms == [1, 1], "what was known of the term is forgotten with the rest"
    assert follower.stops == 2


async def test_resyncs_come_from_the_beginning_also_while_the_start_waits():
    world = World()

    class Waiting(Follower):
        resync_s = 0.01

        async def start(self, group):
            await asyncio.sleep(3600.0)

    follower = Waiting(world.context)
    async with running(follower):
        follower.queue.add("a")
        await wait_until(lambda: follower.resyncs > 2)
        assert follower.seen == [], "keys wait until the start is over"


async def test_a_write_is_repeated_while_its_term_lasts_and_not_sent_after_it():
    world = World()
    follower, calls = Follower(world.context), []

    async def call():
        calls.append(1)
        if len(calls) == 1:
            raise ClusterUnreachable("away", is_sent=True)
        if len(calls) == 3:
            world.term = LeadershipTerm(2, 1e12)
            raise ClusterUnreachable("away", is_sent=True)
        return "done"

    assert await follower.write(call, epoch=1) == "done"
    with pytest.raises(StaleTerm):
        await follower.write(call, epoch=1)
    assert len(calls) == 3
    assert await follower.write(call) == "done", "without an epoch the term that runs will do"
    world.term = None
    with pytest.raises(StaleTerm):
        await follower.write(call)
    assert len(calls) == 4


async def test_an_eviction_that_is_not_sent_since_the_term_is_over_does_not_count_as_done():
    world = World()
    world.term = None
    writer = MoveWriter(Follower(world.context))
    pod = Pod(uid="u", namespace="x", name="p", labels={}, annotations={})
    with pytest.raises(StaleTerm):
        await writer.evict([pod])
    assert writer.forbidden == 0


async def test_events_are_sent_in_order_and_the_oldest_is_dropped_when_too_many_wait(monkeypatch):
    monkeypatch.setattr(reconciler, "_MAX_QUEUED_EVENTS", 3)
    monkeypatch.setattr(reconciler, "_EVENT_INTERVAL_S", 0.0)
    cluster = FakeEvents()
    recorder = EventRecorder(cluster, identity="test", clock=Clock(), log=LOG)
    about = EventReference("v1", "Node", "", "n", "n")
    for number in range(5):
        recorder.record(about, str(number), is_warning=False, reason="R", action="A")
    task = asyncio.create_task(recorder.run())
    await wait_until(lambda: recorder.sent == 3)
    cluster.is_refusing = True
    recorder.record(about, "5", is_warning=False, reason="R", action="A")
    await wait_until(lambda: recorder.dropped == 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert cluster.created == [("Event", "default", str(number)) for number in (2, 3, 4)]


async def test_routine_events_wait_for_all_others_and_displace_none(monkeypatch):
    monkeypatch.setattr(reconciler, "_MAX_QUEUED_EVENTS", 3)
    monkeypatch.setattr(reconciler, "_EVENT_INTERVAL_S", 0.0)
    cluster = FakeEvents()
    recorder = EventRecorder(cluster, identity="test", clock=Clock(), log=LOG)
    about = EventReference("v1", "Node", "", "n", "n")
    for number in range(3):
        recorder.record(about, str(number), is_warning=True, reason="R", action="A")
    for number in range(3, 8):
        recorder.record(about, str(number), is_warning=False, reason="R", action="A", is_routine=True)
    recorder.record(about, "8", is_warning=True, reason="R", action="A")
    task = asyncio.create_task(recorder.run())
    await wait_until(lambda: recorder.sent == 6)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert cluster.created == [("Event", "default", str(number)) for number in (1, 2, 8, 5, 6, 7)]
    assert recorder.dropped == 3
