"""The ability `policies` over the fake API server and a controller's own loop: in force, told, put back."""

import asyncio
import contextlib
import logging
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import yaml
from tests.builders.server import LOG, MemoryJournal
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.resources import CUSTOM_RESOURCE_DEFINITIONS
from tests.waiting import wait_for

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.core import Core
from eelgrid_controller.engines.kubernetes.api.election import LeadershipTerm
from eelgrid_controller.engines.kubernetes.api.port import EVENTS, POWER_POLICIES, ObjectKey
from eelgrid_controller.engines.kubernetes.model.power_policy import PlacePower, PolicyRecords
from eelgrid_controller.engines.kubernetes.model.status_reporting import ConditionSet
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import ReconcilerContext
from eelgrid_controller.engines.kubernetes.reconcilers.power_policies import (
    FILE_NAME,
    FormerValuesFile,
    PowerPolicyReconciler,
)
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import CLUSTER_KEY
from eelgrid_controller.errors import JournalFull
from eelgrid_controller.runtime.config import ControllerConfig
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.telemetry import DeviceReports
from eelgrid_protos import catalogue
from eelgrid_protos.messages import BudgetScope, PowerBudget

CRD = Path(__file__).parents[2] / "deploy/helm/eelgrid/files/crds/powerpolicies.yaml"
CLUSTER = {"scope": "Cluster", "limitWatts": 1000}


class World:
    """One controller's loop and the part, over a fake cluster."""

    def __init__(self, fake, loop, folder, journal):
        self.fake, self.loop, self.journal = fake, loop, journal
        self.cluster = fake.client()
        self.term = LeadershipTerm(1, 1e12)
        self.draws = {}
        self.nodes = {ObjectKey("", "n1"): {"metadata": {"labels": {"rack": "r1"}}}}
        engine = SimpleNamespace(nodes=SimpleNamespace(is_synced=True, objects=self.nodes))
        self.around = ReconcilerContext(
            cluster=self.cluster,
            loop=loop,
            elector=SimpleNamespace(term=lambda: self.term),
            engine=engine,
            devices=DeviceReports(monotonic_s=Clock().monotonic_s),
            identity="test",
            data=folder,
            draws=lambda: self.draws,
            clock=Clock(),
            rng=random.Random(1),
            log=LOG,
        )
        self.task = None

    def begin(self):
        self.part = PowerPolicyReconciler(self.around, every_s=0.05, status_s=0.05, failed_s=0.05)
        self.task = asyncio.create_task(self.part.run())

    async def end(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def put(self, name, spec):
        try:
            found = await self.cluster.get(POWER_POLICIES, name)
        except Exception:  # noqa: BLE001  # it is not there yet
            return await self.cluster.create(POWER_POLICIES, {"metadata": {"name": name}, "spec": spec})
        return await self.cluster.replace(POWER_POLICIES, {**found, "spec": spec})

    @property
    def budgets(self):
        return {f"{one.scope.name} {one.name}".strip(): one.limit_w for one in self.loop.core.state.policy.budgets}

    async def has(self, **budgets):
        async def look():
            return self.budgets == budgets

        await wait_for(look)

    async def says(self, name, type_, status, reason):
        async def look():
            found = await self.cluster.get(POWER_POLICIES, name)
            one = ConditionSet.from_json((found.get("status") or {}).get("conditions")).get(type_)
            return found["status"] if one and (one.status, one.reason) == (status, reason) else None

        return await wait_for(look)


@contextlib.asynccontextmanager
async def going(folder, journal=None, fake=None):
    async with contextlib.AsyncExitStack() as stack:
        if fake is None:
            fake = await stack.enter_async_context(FakeCluster())
            await fake.client().create(CUSTOM_RESOURCE_DEFINITIONS, yaml.safe_load(CRD.read_text()))
        journal = journal or MemoryJournal()
        loop = ControllerLoop(
            journal=journal,
            fresh_state=ClusterState,
            make_core=lambda state: Core(state, catalogue.load_catalogue()),
            config=ControllerConfig(data=folder),
            clock=Clock(),
            log=LOG,
        )
        await loop.start()
        world = World(fake, loop, folder, journal)
        world.begin()
        try:
            yield world
        finally:
            await world.end()
            await loop.stop()


async def test_an_object_is_in_force_says_so_and_is_put_back(tmp_path):
    async with going(tmp_path) as world:
        operators = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=5000.0)
        policy = world.loop.core.state.policy
        await world.loop.update_policy(replace(policy, budgets=(operators,), lease_s=44.0))
        spec = {
            "budgets": [CLUSTER, {"scope": "Node", "nodeSelector": {"matchLabels": {"rack": "r1"}}, "limitWatts": 300}]
        }
        await world.put("a", spec)
        await world.has(**{"CLUSTER": 1000.0, "NODE n1": 300.0})
        status = await world.says("a", "InForce", True, "Whole")
        assert status["observedGeneration"] == 1
        assert status["revision"] == world.loop.core.state.policy.revision
        world.draws = {"cluster": PlacePower(400.0), "node/n1": PlacePower(310.0)}
        status = await world.says("a", "WithinBudget", False, "Passed")
        assert (status["powerWatts"], status["headroomWatts"]) == (400, 600)

        async def told():
            found = await world.cluster.list(EVENTS, namespace="default")
            return [one["note"] for one in found.items if one["regarding"]["name"] == "a"]

        assert await wait_for(told) == ["node n1 draws 310 W of 300 W"]
        await world.cluster.delete(POWER_POLICIES, "a")
        await world.has(CLUSTER=5000.0)
        assert world.loop.core.state.policy.lease_s == 44.0


async def test_after_a_restart_former_values_come_from_the_file_and_without_it_the_objects_are_the_truth(tmp_path):
    async with going(tmp_path) as world:
        policy = world.loop.core.state.policy
        operators = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=5000.0)
        await world.loop.update_policy(replace(policy, budgets=(operators,)))
        await world.put("a", {"budgets": [CLUSTER]})
        await world.put("b", {"objective": "energy"})
        await world.says("a", "InForce", True, "Whole")
        await world.says("b", "InForce", True, "Whole")
        await world.end()
        await world.cluster.delete(POWER_POLICIES, "a")  # while nobody looks
        async with going(tmp_path, world.journal, world.fake) as again:
            await again.has(CLUSTER=5000.0)
            assert again.loop.core.state.policy.objective == "energy"
        # Another leader, whose journal is empty.
        other = tmp_path / "other"
        other.mkdir()
        async with going(other, None, world.fake) as another:

            async def look():
                return another.loop.core.state.policy.objective == "energy"

            await wait_for(look)
            await another.cluster.delete(POWER_POLICIES, "b")

            async def gone():
                return another.loop.core.state.policy.objective == "balanced"

            await wait_for(gone)
        world.begin()


async def test_who_does_not_lead_changes_and_writes_nothing(tmp_path):
    async with going(tmp_path) as world:
        world.term = None
        await world.put("a", {"budgets": [CLUSTER]})
        for _ in range(3):
            world.part.queue.add(CLUSTER_KEY)
            await asyncio.sleep(0.05)
        assert (world.budgets, world.part.rounds) == ({}, 0)
        assert "status" not in await world.cluster.get(POWER_POLICIES, "a")
        world.term = LeadershipTerm(2, 1e12)
        await world.has(CLUSTER=1000.0)


async def test_a_policy_that_others_change_all_the_time_is_read_again(tmp_path):
    async with going(tmp_path) as world:
        update, left = world.loop.update_policy, [3]

        async def contended(policy):
            if left[0]:
                left[0] -= 1
                current = world.loop.core.state.policy
                await update(replace(current, lease_s=current.lease_s + 1.0))
            return await update(policy)

        world.loop.update_policy = contended
        await world.put("a", {"budgets": [CLUSTER]})
        await world.says("a", "InForce", True, "Whole")
        assert (world.budgets, world.loop.core.state.policy.lease_s) == ({"CLUSTER": 1000.0}, 63.0)


async def test_a_full_disk_is_reported_and_the_policy_follows_when_there_is_room(tmp_path):
    async with going(tmp_path) as world:
        world.journal.fault = JournalFull(Path("j"), "the disk is full", "free space in there")
        await world.put("a", {"budgets": [CLUSTER]})
        await world.says("a", "InForce", False, "NotApplied")
        assert world.budgets == {}
        world.journal.fault = None
        await world.says("a", "InForce", True, "Whole")
        assert world.budgets == {"CLUSTER": 1000.0}


async def test_a_status_is_not_written_again_and_again(tmp_path):
    async with going(tmp_path) as world:
        await world.put("a", {"budgets": [CLUSTER]})
        world.draws = {"cluster": PlacePower(400.0)}
        await world.says("a", "WithinBudget", True, "Kept")
        before = world.part.statuses
        for number in range(20):
            world.draws = {"cluster": PlacePower(400.0 + number)}
            rounds = world.part.rounds
            async with asyncio.timeout(5):
                while world.part.rounds == rounds:  # noqa: ASYNC110  # a round of another task
                    await asyncio.sleep(0.005)
        assert world.part.statuses == before


async def test_an_invalid_object_leaves_the_last_good_one(tmp_path):
    async with going(tmp_path) as world:
        await world.put("a", {"budgets": [CLUSTER]})
        await world.says("a", "InForce", True, "Whole")
        await world.put("a", {"budgets": [{**CLUSTER, "limitWatts": 7}], "placement": "nonsense"})
        status = await world.says("a", "Accepted", False, "Invalid")
        assert status["observedGeneration"] == 2
        await world.says("a", "InForce", True, "EarlierGeneration")
        assert world.budgets == {"CLUSTER": 1000.0}


async def test_missing_rights_are_reported_in_the_log_and_the_policy_is_in_force(tmp_path, caplog):
    async with going(tmp_path) as world:
        rules = [{"apiGroups": ["eelgrid.io"], "resources": ["powerpolicies"], "verbs": ["get", "list", "watch"]}]
        world.fake.access.grant("reader", rules)
        await world.end()
        world.around = replace(world.around, cluster=world.fake.client("reader"))
        world.begin()
        with caplog.at_level(logging.WARNING):
            await world.put("a", {"budgets": [CLUSTER]})
            await world.has(CLUSTER=1000.0)

            async def look():
                return "its status could not be written" in caplog.text

            await wait_for(look)


def test_a_damaged_file_is_moved_aside(tmp_path):
    former = FormerValuesFile(tmp_path)
    assert former.load() == (PolicyRecords(), "")
    former.path.write_text('{"format": 1, "records": 3}')
    memory, fault = former.load()
    assert memory == PolicyRecords()
    assert "moved to" in fault
    assert (tmp_path / f"{FILE_NAME}.corrupt").is_file()
    former.path.write_text('{"format": 7}')
    assert "format 7" in former.load()[1]
