"""Worker groups of KubeRay as nodes of Ray: what is written into a RayCluster, and which pods are which runs. Needs no Ray."""

import asyncio
import re
from pathlib import Path

import pytest
import yaml
from tests.builders.kubernetes import build_node
from tests.fakes.kuberay import (
    RAY_CLUSTERS,
    SCHEMA,
    KubeRay,
    build_group,
    build_ray_cluster,
    define_ray_clusters,
    list_violations,
)
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.kubelets import Kubelets
from tests.fakes.kubernetes.scheduler import Scheduler
from tests.waiting import wait_for

from eelgrid.errors import FailedPreconditionError, InvalidSettingsError, PermissionDeniedError
from eelgrid.kuberay import (
    HttpClusterApi,
    WorkerGroupSupply,
    list_worker_runs,
    main,
    parse_groups,
    parse_pods,
    parse_settings,
)
from eelgrid.ray_capacity import NodeRun, RayCapacity, RayInstance
from eelgrid_controller.engines.kubernetes.api.port import NODES, PODS

RULES = [
    {"verbs": ["get", "list"], "apiGroups": [""], "resources": ["pods"]},
    {"verbs": ["get", "patch"], "apiGroups": ["ray.io"], "resources": ["rayclusters"]},
]


class World:
    """A RayCluster on a fake API server, with the operator; pods run on one node with room for `gpus` of them."""

    def __init__(self, fake, folder):
        self.fake, self.cluster = fake, fake.client()
        fake.access.grant("head", RULES)
        (folder / "token").write_text("head\n")
        # Of Ray's autoscaler, which a user's writes may come between.
        self.api = HttpClusterApi(fake.url, token_file=folder / "token", ca_file=folder / "none")
        self.supply = WorkerGroupSupply(self.api, cluster="train", namespace="default")
        self.capacity = RayCapacity(self.supply)

    async def start(self, *groups, gpus=2):
        await define_ray_clusters(self.cluster)
        self.operator = await self.fake.add(KubeRay(self.fake))
        await self.fake.add(Scheduler(self.fake))
        await self.fake.add(Kubelets(self.fake, stop_s=3600.0))
        await self.cluster.create(NODES, build_node("n0", gpus=gpus))
        await self.cluster.create(RAY_CLUSTERS, build_ray_cluster(*groups), namespace="default")

    async def groups(self):
        found = await self.cluster.get(RAY_CLUSTERS, "train", namespace="default")
        return [
            (one["replicas"], one.get("scaleStrategy", {}).get("workersToDelete", []))
            for one in found["spec"]["workerGroupSpecs"]
        ]

    def write_replicas(self, count):
        """What a user writes into the first worker group."""
        path = "/apis/ray.io/v1/namespaces/default/rayclusters/train"
        self.api.patch(path, [{"op": "add", "path": "/spec/workerGroupSpecs/0/replicas", "value": count}])

    async def instances(self):
        return await asyncio.to_thread(self.capacity.list_instances)

    async def until(self, running, waiting=0):
        """The instances once so many run, and so many wait."""

        async def look():
            found = await self.instances()
            counts = sum(one.is_placed for one in found), sum(not one.is_placed for one in found)
            return found if counts == (running, waiting) else None

        return await wait_for(look)

    async def launch(self, shape, request_id):
        await asyncio.to_thread(self.capacity.launch, shape, request_id)

    async def terminate(self, ids, request_id="r"):
        await asyncio.to_thread(self.capacity.terminate, ids, request_id)

    async def gone(self, name):
        """The pod's kubelet has ended it."""
        await self.cluster.delete(PODS, name, namespace="default", grace_s=0)

    def problems(self):
        return [one.reason for one in self.capacity.take_problems()]


@pytest.fixture
async def world(tmp_path):
    async with FakeCluster() as fake:
        found = World(fake, tmp_path)
        yield found
        assert found.operator.violations == []


async def test_what_ray_asks_for_are_replicas_and_a_repeated_request_adds_none(world):
    await world.start(build_group(replicas=1), build_group("cpu"))
    await world.until(1)
    for _ in range(2):
        await world.launch({"gpu": 2, "cpu": 1}, "a")
    assert await world.groups() == [(3, []), (1, [])]
    found = await world.until(2, 2)
    assert sorted(one.node_type for one in found) == ["cpu", "gpu", "gpu", "gpu"]
    assert all(one.instance_id.startswith(f"train-{one.node_type}-worker-") for one in found)
    assert world.problems() == []


async def test_what_ray_gives_back_is_named_with_as_many_replicas_fewer_and_no_other_pod_goes(world):
    await world.start(build_group(replicas=2))
    first, second = sorted(one.instance_id for one in await world.until(2))
    await world.terminate([first])
    assert await world.groups() == [(1, [first])]
    # Until its kubelet has ended it, it is there, and a second request changes nothing.
    await world.terminate([first])
    assert sorted(one.instance_id for one in await world.until(2)) == [first, second]
    await world.gone(first)
    assert [one.instance_id for one in await world.until(1)] == [second]
    assert await world.groups() == [(1, [first])]
    # The next write leaves out what is gone.
    await world.launch({"gpu": 1}, "b")
    assert await world.groups() == [(2, [])]
    await world.until(2)


async def test_a_pod_that_is_evicted_is_listed_with_the_one_that_comes_and_clearing_it_away_shrinks_nothing(world):
    await world.start(build_group(replicas=1))
    (first,) = await world.until(1)
    await world.cluster.evict(first.instance_id, namespace="default")
    assert await world.instances() == [first, RayInstance(f"{first.instance_id}.next", "gpu", False)]
    await world.terminate([first.instance_id])
    assert await world.groups() == [(1, [])]
    await world.gone(first.instance_id)
    (again,) = await world.until(1)
    assert again.instance_id != first.instance_id
    assert await world.groups() == [(1, [])]


async def test_the_one_that_would_come_in_the_place_of_an_evicted_pod_is_withdrawn_when_ray_needs_it_no_more(world):
    await world.start(build_group(replicas=2))
    first, second = await world.until(2)
    await world.cluster.evict(first.instance_id, namespace="default")
    await world.terminate([f"{first.instance_id}.next"])
    assert await world.groups() == [(1, [])]
    assert await world.instances() == [second, first]
    await world.gone(first.instance_id)
    assert await world.until(1) == [second]


async def test_a_pod_whose_raylet_has_failed_is_replaced_and_counted_once(world):
    await world.start(build_group(replicas=1))
    (first,) = await world.until(1)
    kubelets = next(one for one in world.fake._parts if isinstance(one, Kubelets))
    kubelets.finish("default", first.instance_id, phase="Failed")
    (again,) = await world.until(1)
    assert again.instance_id != first.instance_id
    assert await world.groups() == [(1, [])]


async def test_more_than_a_group_allows_is_refused_with_what_helps(world):
    await world.start(build_group(most=3, replicas=2))
    await world.launch({"gpu": 3, "strange": 1}, "a")
    assert await world.groups() == [(3, [])]
    refused = world.problems()
    assert len(refused) == 3
    assert refused[:2] == ["the worker group gpu has as many as its maxReplicas; raise it"] * 2
    assert "no worker group strange" in refused[2]
    assert world.problems() == []


async def test_a_write_that_no_longer_fits_is_planned_anew(world):
    await world.start(build_group())
    changes, patch = [2, 3], world.api.patch

    def patch_after_a_user(path, operations):
        world.api.patch = patch
        if changes:
            world.write_replicas(changes.pop(0))
            world.api.patch = patch_after_a_user
        return patch(path, operations)

    world.api.patch = patch_after_a_user
    await world.launch({"gpu": 1}, "a")
    assert await world.groups() == [(4, [])]
    assert world.problems() == []


async def test_replicas_that_a_user_lowered_without_saying_which_go_stay_until_ray_says_it(world):
    await world.start(build_group(replicas=2))
    first, second = await world.until(2)
    await asyncio.to_thread(world.write_replicas, 0)
    await world.terminate([first.instance_id])
    assert await world.groups() == [(1, [first.instance_id])]
    await world.gone(first.instance_id)
    assert await world.until(1) == [second]


async def test_without_the_right_to_write_it_is_told_which_rights_are_needed(world):
    await world.start(build_group())
    world.fake.access.grant("head", RULES[:1])
    await world.launch({"gpu": 1}, "a")
    (problem,) = world.problems()
    assert "get and patch on rayclusters" in problem
    with pytest.raises(PermissionDeniedError):
        await world.instances()


def test_a_group_is_bounded_as_kuberay_bounds_it():
    groups = [build_group(least=2), build_group(replicas=9), build_group(replicas=3, suspend=True), build_group()]
    del groups[3]["replicas"]
    found = parse_groups(build_ray_cluster(*groups))
    assert [(one.replicas, one.stated) for one in found] == [(2, 0), (4, 9), (0, 3), (0, None)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"numOfHosts": 4}, r"workerGroupSpecs\[0\].numOfHosts is 4"),
        ({"replicas": "2"}, r"workerGroupSpecs\[0\].replicas is '2'"),
        ({"maxReplicas": -1}, "maxReplicas is '-1'"),
    ],
)
def test_a_group_that_cannot_be_scaled_is_named_by_its_field(fields, words):
    with pytest.raises(FailedPreconditionError, match=words):
        parse_groups(build_ray_cluster({**build_group(), **fields}))


@pytest.mark.parametrize("answer", [{}, {"spec": None}, {"spec": {"workerGroupSpecs": ["x"]}}, []])
def test_an_answer_that_is_no_ray_cluster_is_refused(answer):
    with pytest.raises(FailedPreconditionError):
        parse_groups(answer)


def test_a_pod_that_cannot_be_read_is_left_out():
    labels = {"ray.io/node-type": "worker", "ray.io/group": "gpu"}
    good = {"metadata": {"name": "a", "labels": labels}, "status": {"phase": "Running"}}
    head = {"metadata": {"name": "h", "labels": {**labels, "ray.io/node-type": "head"}}}
    found = parse_pods({"items": [good, head, {"metadata": {"labels": labels}}, "x", {"metadata": None}]})
    assert [(one.name, one.is_running, one.is_ending) for one in found] == [("a", True, False)]


def test_settings_are_those_that_kuberay_gives_to_the_autoscaler_of_a_head():
    environment = {
        "RAY_CLUSTER_NAME": "train", "RAY_CLUSTER_NAMESPACE": "ml", "KUBERNETES_SERVICE_HOST": "fd00::1",
        "KUBERNETES_SERVICE_PORT": "6443",
    }  # fmt: skip
    found = parse_settings([], environment)
    assert (found.cluster, found.namespace, found.server) == ("train", "ml", "https://[fd00::1]:6443")
    assert (found.address, found.poll_s) == ("127.0.0.1:6379", 5.0)
    with pytest.raises(InvalidSettingsError, match="--namespace is not given"):
        parse_settings([], {"RAY_CLUSTER_NAME": "train"})
    with pytest.raises(InvalidSettingsError, match="--poll-s is 0"):
        parse_settings(["--poll-s", "0"], environment)


def test_a_program_outside_of_a_pod_says_what_to_give(capsys, monkeypatch):
    monkeypatch.delenv("RAY_CLUSTER_NAME", raising=False)
    assert main([]) == 1
    assert "--cluster is not given" in capsys.readouterr().err


def test_the_next_run_of_a_pod_is_no_more_than_the_group_wants():
    labels = {"ray.io/node-type": "worker", "ray.io/group": "gpu"}
    pods = parse_pods(
        {
            "items": [
                {"metadata": {"name": name, "labels": labels, "deletionTimestamp": "x"}, "status": {"phase": "Running"}}
                for name in ("a", "b")
            ]
        }
    )
    groups = parse_groups(build_ray_cluster(build_group(replicas=1)))
    assert list_worker_runs(groups, pods) == [NodeRun("a", "gpu", True, "a.next"), NodeRun("b", "gpu", True)]


def test_the_ray_cluster_of_the_how_to_page_is_read():
    text = (Path(__file__).parents[2] / "docs/how-to/ray.md").read_text()
    block = re.search(r'```yaml title="raycluster.yaml"\n(.*?)```', text, re.DOTALL)
    found = yaml.safe_load(block[1])
    assert [(one.name, one.replicas, one.most) for one in parse_groups(found)] == [("gpu", 0, 8)]
    assert list_violations(found["spec"]["workerGroupSpecs"][0], SCHEMA["schema"]) == []
