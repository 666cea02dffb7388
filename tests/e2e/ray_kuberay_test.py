"""A real Ray whose nodes are pods of a RayCluster's worker groups: they come with demand, make room with notice, go when idle.

The API server and KubeRay's operator are fakes (tests/fakes); a pod that is bound to the node runs a real raylet, by the shell
command that KubeRay gives to a pod, and ends as a kubelet ends it. Needs a Ray in an environment of its own (`make test-ray`
installs one).
"""

import asyncio
import contextlib
import os
import signal
import subprocess

import pytest
from tests.builders.kubernetes import build_node
from tests.fakes.kuberay import RAY_CLUSTERS, KubeRay, build_group, build_ray_cluster, define_ray_clusters
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.kubelets import Kubelets
from tests.fakes.kubernetes.scheduler import Scheduler
from tests.ray_rig import MISSING, PYTHON, RayCluster
from tests.waiting import wait_for

from eelgrid_controller.engines.kubernetes.api.port import NODES, PODS

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
START_S = 120.0
DRAIN_S = 12
DRIVER = """
import json
@ray.remote(num_gpus=1, num_cpus=1, max_restarts=-1, max_task_retries=-1)
class Holder:
    def look(self):
        return ray.get_runtime_context().get_node_id()
held = Holder.remote()
for line in sys.stdin:
    print(json.dumps(ray.get(held.look.remote())), flush=True)
"""


class RayletKubelets(Kubelets):
    """Kubelets whose pods are raylets: one runs while its pod does, and is ended by SIGTERM as a container is."""

    def __init__(self, fake, ray):
        super().__init__(fake)
        self.ray, self.raylets = ray, {}

    def work(self):
        for (namespace, name), (_, _, what) in list(self.due.items()):
            if what == "running" and name not in self.raylets:
                self.raylets[name] = self._start(name)
            elif what == "gone" and self._is_running(name):
                self._end(name)
                del self.due[namespace, name]
        super().work()
        self._tell_ends()
        return 0.1

    def _start(self, name):
        """By the command of a pod of KubeRay: a shell that becomes `ray start --block`."""
        ray = "ray start --address {} --block --num-cpus 2 --num-gpus 1 --node-ip-address 127.0.0.1"
        ports = "--min-worker-port 0 --max-worker-port 0 --object-store-memory 80000000 --disable-usage-stats"
        own = {
            "RAY_CLOUD_INSTANCE_ID": name, "RAY_NODE_TYPE_NAME": "gpu", "RAY_TMPDIR": str(self.ray.folder),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_S),
        }  # fmt: skip
        with (self.ray.folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                ["bash", "-c", "--", f"ulimit -n ${{RAY_START_ULIMIT:-4096}}; {ray.format(self.ray.address)} {ports}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**self.ray.environment, **own},
                cwd=self.ray.folder, start_new_session=True,
            )  # fmt: skip

    def _is_running(self, name):
        return name in self.raylets and self.raylets[name].poll() is None

    def _end(self, name):
        # Of a container only its first process has the signal.
        self.raylets[name].send_signal(signal.SIGTERM)

    def _tell_ends(self):
        for (namespace, name), record in list(self.store.of(self.kind(PODS)).items()):
            if name not in self.raylets or self._is_running(name):
                continue
            if record.object["metadata"].get("deletionTimestamp"):
                self.api.delete(self.kind(PODS), namespace, name, {"gracePeriodSeconds": 0})
            elif record.object["status"]["phase"] == "Running":
                self.finish(namespace, name, phase="Failed")

    async def stop(self):
        await super().stop()
        for raylet in self.raylets.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(raylet.pid, signal.SIGKILL)
            raylet.wait()


class World:
    """Ray's head, a RayCluster on a fake API server, and the autoscaler of the head's pod."""

    def __init__(self, ray, fake):
        self.ray, self.fake, self.cluster = ray, fake, fake.client()

    async def start(self, folder):
        """Starts all of it."""
        await define_ray_clusters(self.cluster)
        self.operator = await self.fake.add(KubeRay(self.fake))
        await self.fake.add(Scheduler(self.fake))
        self.kubelets = await self.fake.add(RayletKubelets(self.fake, self.ray))
        await self.cluster.create(NODES, build_node("n0", gpus=2))
        group = build_group(most=2, labels={"eelgrid.io/managed": "true"})
        options = {"idleTimeoutSeconds": 6}
        body = build_ray_cluster(group, autoscalerOptions=options)
        await self.cluster.create(RAY_CLUSTERS, body, namespace="default")
        (folder / "token").write_text("admin")
        self.log = self.ray.folder / "kuberay.log"
        arguments = [
            "--cluster", "train", "--namespace", "default", "--server", self.fake.url, "--address", self.ray.address,
            "--token-file", str(folder / "token"), "--poll-s", "1",
        ]  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(  # noqa: ASYNC220  it is begun here and not waited for
                [PYTHON, "-m", "eelgrid.kuberay", *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self.ray.environment, cwd=self.ray.folder, start_new_session=True,
            )  # fmt: skip

    async def group(self):
        found = await self.cluster.get(RAY_CLUSTERS, "train", namespace="default")
        (group,) = found["spec"]["workerGroupSpecs"]
        return group["replicas"], group.get("scaleStrategy", {}).get("workersToDelete", [])

    async def pods(self):
        found = (await self.cluster.list(PODS, namespace="default")).items
        return {one["metadata"]["name"]: one["status"].get("phase") for one in found}

    async def ask(self, program):
        """What the program says to a line."""
        await asyncio.to_thread(program.tell)
        return await asyncio.wait_for(asyncio.to_thread(program.read), START_S)

    async def raylets(self):
        """Ids of nodes that are alive, without the head, by the pod that each is."""
        nodes = await asyncio.to_thread(self.ray.list, "nodes")
        return {one["node_id"] for one in nodes if one["state"] == "ALIVE" and not one["is_head_node"]}


@pytest.fixture
async def world(tmp_path):
    with RayCluster(nodes=0, head_type="headgroup") as ray:
        async with FakeCluster() as fake:
            found = World(ray, fake)
            await found.start(tmp_path)
            try:
                yield found
                assert found.operator.violations == []
            finally:
                found.process.terminate()
                found.process.wait(30.0)
                print(found.log.read_text()[-6000:])
                for path in sorted(ray.folder.glob("train-gpu-*.log")):
                    print(path.name, path.read_text()[-1500:])


async def wait_until(ask, what, within_s=60.0):
    """What awaiting `ask()` gives once it is true."""
    try:
        return await wait_for(ask, within_s=within_s)
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s: {what}") from None


async def test_a_pod_comes_with_demand_makes_room_with_notice_is_replaced_and_goes_when_idle(world):
    program = world.ray.program(DRIVER)
    first = await world.ask(program)
    assert await world.group() == (1, [])
    (pod,) = await world.pods()

    # As the controller evicts a pod that must make room.
    await world.cluster.evict(pod, namespace="default")
    log = world.ray.folder / f"{pod}.log"

    async def is_drained():
        return "draining" in log.read_text().lower()

    await wait_until(is_drained, "its raylet is drained", 30.0)
    assert pod in await world.pods()

    async def is_replaced():
        found = await world.pods()
        return pod not in found and found

    (after,) = await wait_until(is_replaced, "another pod is there in its place")
    # It was neither asked for twice nor given back.
    assert (await world.group())[0] == 1
    again = await world.ask(program)
    assert again != first
    assert await world.pods() == {after: "Running"}
    assert await world.group() == (1, [])

    await asyncio.to_thread(program.end)

    async def is_given_back():
        return await world.group() == (0, [after])

    await wait_until(is_given_back, "the group shrinks by the pod that is idle")

    async def is_empty():
        return not await world.pods() and not await world.raylets()

    await wait_until(is_empty, "the head is alone")
    drained = world.log.read_text().index("RAY_STOP_REQUESTED")
    assert drained < world.log.read_text().rindex("terminate=")
