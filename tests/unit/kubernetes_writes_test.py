"""Writes at the API server: what is refused, and what may have been done though nobody said so."""

import asyncio
import logging
import random

from tests.builders.kubernetes import build_node, build_pod
from tests.fakes.kubernetes.cluster import FakeCluster

from eelgrid_controller.clock import Clock
from eelgrid_controller.engines.kubernetes.api.client import RequestLimits
from eelgrid_controller.engines.kubernetes.api.port import NODES, PODS, ObjectKey
from eelgrid_controller.engines.kubernetes.model.pod_group import PodKey
from eelgrid_controller.engines.kubernetes.pods.gate_events import (
    AnnotateFailed,
    AnnotatePod,
    DeleteFailed,
    PatchFailed,
    RecreatePod,
    UngatePod,
    WriteFailure,
)
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import ClusterContext, Reconciler
from eelgrid_controller.engines.kubernetes.reconcilers.writers import PodWriter

KEY = PodKey("default", "p")
LOG = logging.getLogger("eelgrid.test")


class Writing(Reconciler[str]):
    """Decides nothing; `leads` says whether a write may be sent."""

    def __init__(self, context, leads):
        super().__init__(context, "test")
        self.leads = leads

    async def reconcile(self, key):
        raise NotImplementedError


async def play(act, *, leads=lambda _: True):
    """An act on one gated pod and what is fed back; `act` gets the writes, the pod and the fake."""
    fed = []
    async with FakeCluster() as fake:
        cluster = fake.client(bounds=RequestLimits(request_s=0.5))
        await cluster.create(NODES, build_node("n"))
        held = await cluster.create(PODS, build_pod("p"))
        context = ClusterContext(
            cluster=cluster, elector=None, identity="me", clock=Clock(), rng=random.Random(1), log=LOG
        )
        writes = PodWriter(Writing(context, leads), pods=lambda: {ObjectKey(*KEY): held}, feed=fed.append)
        await act(writes, held, fake)
        return fed, await cluster.get(PODS, "p", namespace="default")


def head(found):
    return found["metadata"]["uid"], found["metadata"]["resourceVersion"]


def test_what_was_sent_before_the_term_was_over_may_arrive_yet():
    terms = iter([True, False])

    async def act(writes, held, fake):
        fake.knobs.add("lose", times=1, verbs=("patch",))
        uid, version = head(held)
        await writes.ungate(UngatePod(uid, KEY, version, "n", "{}", 1))

    fed, found = asyncio.run(play(act, leads=lambda _: next(terms)))
    assert not found["spec"].get("schedulingGates"), "it was carried out"
    assert [(type(one), one.failure) for one in fed] == [(PatchFailed, WriteFailure.BUSY)]


def test_what_was_never_sent_is_known_not_to_arrive():
    async def act(writes, held, fake):
        uid, version = head(held)
        await writes.ungate(UngatePod(uid, KEY, version, "n", "{}", 1))
        await writes.annotate_pod(AnnotatePod(uid, KEY, version, 1, {"eelgrid.io/fence": "1/1"}))

    fed, found = asyncio.run(play(act, leads=lambda _: False))
    assert found["spec"]["schedulingGates"]
    assert [(type(one), one.failure) for one in fed] == [
        (PatchFailed, WriteFailure.STALE),
        (AnnotateFailed, WriteFailure.STALE),
    ]


def test_a_fence_changes_the_version_so_that_what_was_made_against_it_is_refused():
    async def act(writes, held, fake):
        uid, version = head(held)
        await writes.annotate_pod(AnnotatePod(uid, KEY, version, 2, {"eelgrid.io/fence": f"2/{version}"}))
        await writes.ungate(UngatePod(uid, KEY, version, "n", "{}", 1))

    fed, found = asyncio.run(play(act))
    assert found["spec"]["schedulingGates"]
    assert found["metadata"]["annotations"]["eelgrid.io/fence"].startswith("2/")
    assert [(type(one), one.failure) for one in fed] == [(PatchFailed, WriteFailure.CONFLICT)]


def test_a_pod_that_is_another_by_now_is_not_deleted():
    async def act(writes, held, fake):
        uid, version = head(held)
        await writes.annotate_pod(AnnotatePod(uid, KEY, version, 1, {"eelgrid.io/fence": "1"}))
        await writes.delete_for_recreation(RecreatePod(uid, KEY, 1, "why", version))

    fed, found = asyncio.run(play(act))
    assert found["metadata"]["name"] == "p"
    assert [(type(one), one.failure) for one in fed] == [(DeleteFailed, WriteFailure.CONFLICT)]
