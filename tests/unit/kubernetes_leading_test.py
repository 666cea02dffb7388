"""The leader's label: on the pod that leads, on no other, through refusals and lives."""

import asyncio
import logging
import random
from contextlib import asynccontextmanager
from types import SimpleNamespace

from tests.builders.kubernetes import build_pod
from tests.fakes.kubernetes.cluster import FakeCluster

from eelgrid_controller.clock import Clock
from eelgrid_controller.engines.kubernetes.api.election import LeadershipTerm
from eelgrid_controller.engines.kubernetes.api.port import PODS
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import (
    ROLE_LABEL,
    ClusterContext,
    LeaderLabelReconciler,
)

TERM = LeadershipTerm(1, 1e9)


@asynccontextmanager
async def two_pods():
    async with FakeCluster() as fake:
        cluster = fake.client()
        for name in ("one", "two"):
            await cluster.create(PODS, build_pod(name), namespace="default")
        labels = [
            LeaderLabelReconciler(
                ClusterContext(
                    cluster=cluster,
                    elector=SimpleNamespace(term=lambda: None, holder="", add_listener=lambda _: None),
                    identity="test",
                    clock=Clock(),
                    rng=random.Random(1),
                    log=logging.getLogger("test"),
                ),
                name=name,
                namespace="default",
            )
            for name in ("one", "two", "away")
        ]
        tasks = [asyncio.create_task(label.run()) for label in labels]
        try:
            yield fake, cluster, labels
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def leaders(cluster):
    found = await cluster.list(PODS, namespace="default", labels=f"{ROLE_LABEL}=leader")
    return [one["metadata"]["name"] for one in found.items]


async def until(cluster, wanted):
    async with asyncio.timeout(10):
        while await leaders(cluster) != wanted:  # noqa: ASYNC110  # what a server says, asked as a Service would
            await asyncio.sleep(0.02)


async def test_the_label_is_where_the_term_is():
    async with two_pods() as (_, cluster, (one, two, _)):
        one.on_term(TERM)
        await until(cluster, ["one"])
        one.on_term(None)
        await until(cluster, [])
        two.on_term(TERM)
        await until(cluster, ["two"])


async def test_who_leads_takes_it_from_one_that_was_cut_off():
    async with two_pods() as (_, cluster, (one, two, _)):
        one.on_term(TERM)
        await until(cluster, ["one"])
        two.on_term(LeadershipTerm(2, 1e9))
        await until(cluster, ["two"])


async def test_a_write_that_fails_is_made_again():
    async with two_pods() as (fake, cluster, (one, _, _)):
        fake.knobs.add("refuse", times=1, verbs=("patch",))
        one.on_term(TERM)
        await until(cluster, ["one"])


async def test_outside_of_a_pod_nothing_is_written():
    async with two_pods() as (_, cluster, (_, _, away)):
        away.on_term(TERM)
        await asyncio.sleep(0.2)
        assert await leaders(cluster) == []
