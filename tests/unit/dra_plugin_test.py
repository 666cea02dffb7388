"""The DRA driver at a kubelet over real sockets, and its slices at an API server over HTTPS."""

import asyncio
import time
from contextlib import asynccontextmanager, suppress

import pytest
from tests.dra_rig import NODE, claim, dra_node, one_thread
from tests.fakes.api_objects import ApiObjects
from tests.fakes.kubelet_claims import ClaimManager
from tests.waiting import wait_until

from eelgrid_agent.devices.port import Missing, RawReadings
from eelgrid_agent.kubelet.dra_driver import (
    SLICES_PATH,
    DraDriver,
    DraTimes,
    DriverThreads,
    ResourceSlicePublisher,
    SocketPathTooLong,
)
from eelgrid_agent.kubelet.kube_client import (
    ApiAddress,
    ApiConflict,
    ApiForbidden,
    ApiNotFound,
    ApiRejected,
    ApiThrottled,
    ApiUnreachable,
    KubeApiClient,
    find_api_address,
)
from eelgrid_agent.kubelet.resource_slices import DRA_DRIVER, GpuConditionTracker
from eelgrid_agent.node.config import BadEnforcement, parse_flags
from eelgrid_protos.errors import MalformedMessage
from eelgrid_protos.kubelet_api import parse_claims, parse_registration_status
from eelgrid_protos.messages import AbsenceReason, Reading

CLAIMS = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims"


@pytest.fixture
def objects(tmp_path):
    folder = tmp_path / "account"
    folder.mkdir()
    objects = ApiObjects(folder)
    objects.put(f"/api/v1/nodes/{NODE}", {"metadata": {"name": NODE, "uid": "node-uid"}})
    return objects


@pytest.fixture
def node(tmp_path):
    with dra_node(tmp_path) as node:
        yield node


def client(objects, url, waits=None, **changes):
    waits = [] if waits is None else waits
    api = KubeApiClient(ApiAddress(url=url, credentials=objects.folder), sleep=waits.append, **changes)
    objects.clients.append(api)
    return api


# The API server.


def test_verbs_and_errors_by_name(objects):
    with objects.serving() as url:
        api = client(objects, url)
        made = api.create(SLICES_PATH, {"metadata": {"name": "s"}})
        with pytest.raises(ApiConflict):
            api.create(SLICES_PATH, {"metadata": {"name": "s"}})
        assert api.get(f"{SLICES_PATH}/s") == made
        api.replace(f"{SLICES_PATH}/s", made)
        with pytest.raises(ApiConflict, match="409 the object has been modified"):
            api.replace(f"{SLICES_PATH}/s", made)
        api.delete(f"{SLICES_PATH}/s")
        with pytest.raises(ApiNotFound):
            api.delete(f"{SLICES_PATH}/s")
        objects.denied.add(("GET", SLICES_PATH))
        with pytest.raises(ApiForbidden, match="give the agent's service account this right"):
            api.get(SLICES_PATH)
        for fault, error in (
            ((422, {"message": "wrong"}), ApiRejected),
            ((200, b"no json"), ApiRejected),
            ((500, {}), ApiThrottled),
        ):
            objects.faults.append(fault)
            with pytest.raises(error):
                api.get(f"/api/v1/nodes/{NODE}")


def test_what_says_later_is_tried_again_with_the_wait_it_asks_for(objects):
    with objects.serving() as url:
        waits = []
        api = client(objects, url, waits)
        objects.faults += [(429, {"_headers": {"Retry-After": "3"}}), (503, {}), ("cut", None)]
        assert api.get(f"/api/v1/nodes/{NODE}")["metadata"]["uid"] == "node-uid"
        assert waits == [3.0, 1.0, 2.0]
        objects.faults += [(429, {"_headers": {"Retry-After": "9999"}})] * 4
        with pytest.raises(ApiThrottled):
            api.get(f"/api/v1/nodes/{NODE}")
        assert max(waits) == 5.0


def test_a_token_that_is_renewed_is_used_at_once(objects):
    with objects.serving() as url:
        api = client(objects, url)
        api.get(f"/api/v1/nodes/{NODE}")
        objects.token = "second"
        with pytest.raises(ApiForbidden):
            api.get(f"/api/v1/nodes/{NODE}")
        objects.write_token("second")
        api.get(f"/api/v1/nodes/{NODE}")


def test_who_is_not_there_and_who_is_somebody_else_is_not_talked_to(objects, tmp_path):
    with pytest.raises(ApiUnreachable, match="retried later"):
        client(objects, "https://localhost:1").get("/api")
    other = tmp_path / "other"
    other.mkdir()
    impostor = ApiObjects(other)
    with impostor.serving() as url:
        waits = []
        with pytest.raises(ApiUnreachable, match=r"(?i)certificate"):
            client(objects, url, waits).get("/api")
        assert waits == []
    with pytest.raises(ApiUnreachable, match="is not the address of an API server"):
        client(objects, "http://localhost:1")
    (objects.folder / "token").unlink()
    with objects.serving() as url, pytest.raises(ApiUnreachable, match="token"):
        client(objects, url).get("/api")


def test_where_the_api_server_is():
    pod = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert find_api_address("", None, pod).url == "https://[fd00::1]:6443"
    assert find_api_address("https://here", None, pod).url == "https://here"
    with pytest.raises(ApiUnreachable, match="--api-server"):
        find_api_address("", None, {})


# The slices.


def test_slices_are_written_once_and_again_when_they_change(objects, node):
    with objects.serving() as url:
        publisher = ResourceSlicePublisher(client(objects, url), NODE)
        written = publisher.publish_slices(node.slices)
        stand = {path: one for path, one in objects.objects.items() if path.startswith(SLICES_PATH)}
        assert written == len(stand) == len(node.slices())
        assert {one["spec"]["pool"]["generation"] for one in stand.values()} == {1}
        assert {one["metadata"]["ownerReferences"][0]["uid"] for one in stand.values()} == {"node-uid"}
        assert publisher.publish_slices(node.slices) == 0
        # The API server adds a time to each taint.
        for path, one in stand.items():
            for device in one["spec"].get("devices", ()):
                device["taints"][0]["timeAdded"] = "2026-11-22T00:00:00Z"
            objects.put(path, one)
        assert publisher.publish_slices(node.slices) == 0
        objects.objects.pop(max(stand))
        assert publisher.publish_slices(node.slices) == len(stand)
        stand = {path: one for path, one in objects.objects.items() if path.startswith(SLICES_PATH)}
        assert {one["spec"]["pool"]["generation"] for one in stand.values()} == {2}
        assert publisher.withdraw_slices() == len(stand)
        assert not any(path.startswith(SLICES_PATH) for path in objects.objects)


def test_a_writer_in_between_is_looked_at_again_and_others_slices_are_left(objects, node):
    theirs = {"metadata": {"name": "x"}, "spec": {"driver": DRA_DRIVER, "nodeName": "other", "pool": {"generation": 9}}}
    objects.put(f"{SLICES_PATH}/x", theirs)
    objects.denied.add(("GET", f"/api/v1/nodes/{NODE}"))
    with objects.serving() as url:
        publisher = ResourceSlicePublisher(client(objects, url), NODE)
        assert publisher.publish_slices(node.slices) > 0
        node.cannot_change = "--observe-only"
        objects.faults += [(200, {"items": []})]  # as an old list would
        assert publisher.publish_slices(node.slices) > 0
        left = [path for path in objects.objects if path.startswith(SLICES_PATH)]
        assert f"{SLICES_PATH}/x" in left
        assert len(left) == 1 + len(node.slices())
        objects.faults += [(409, {})] * 3
        with pytest.raises(ApiConflict):
            publisher.publish_slices(node.slices)


# The kubelet.


class Rig:
    def __init__(self, folder, node, objects, url, thread):
        self.folder, self.node, self.objects = folder, node, objects
        self.kubelet = ClaimManager(folder)
        api = client(objects, url)
        self.plugin = DraDriver(
            folder,
            node.readying,
            ResourceSlicePublisher(client(objects, url), NODE),
            look=lambda: node.slices,
            read=lambda namespace, name: api.get(
                f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}"
            ),
            threads=DriverThreads(thread, thread, thread),
            times=DraTimes(look_s=0.02, publish_s=0.2, backoff_most_s=0.1),
        )

    def allocate(self, uid, *devices):
        self.objects.put(f"{CLAIMS}/{uid}", claim(uid, *devices))
        return ("team", uid, uid)

    async def until(self, is_so):
        await wait_until(is_so)

    def published(self):
        return sum(path.startswith(SLICES_PATH) for path in self.objects.objects)


@pytest.fixture
async def rig(short_path, node, objects):
    @asynccontextmanager
    async def running():
        with objects.serving() as url, one_thread() as thread:
            rig = Rig(short_path / "k", node, objects, url, thread)
            task = asyncio.create_task(rig.plugin.run())
            try:
                await rig.kubelet.registered(DRA_DRIVER)
                yield rig
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async with running() as rig:
        yield rig


async def test_the_kubelet_takes_the_driver_and_the_slices_follow(rig):
    assert rig.kubelet.drivers == {DRA_DRIVER: str(rig.plugin.socket)}
    await rig.until(lambda: rig.published() == len(rig.node.slices()))
    # A kubelet that starts anew takes them away and registers the driver again.
    for path in [path for path in rig.objects.objects if path.startswith(SLICES_PATH)]:
        del rig.objects.objects[path]
    rig.kubelet.drivers.clear()
    await rig.kubelet.registered(DRA_DRIVER)
    await rig.until(lambda: rig.published() == len(rig.node.slices()))
    assert rig.plugin.is_registered
    await rig.until(lambda: rig.plugin.problem == "")


async def test_claims_are_answered_each_for_itself(rig):
    one, other = rig.allocate("a", "gpu-0-1g-4"), rig.allocate("b", "gpu-0-2g-4")
    found = await rig.kubelet.prepare(DRA_DRIVER, one, other, ("team", "nobody", "c"))
    cdi = f"nvidia.com/gpu={rig.node.uuid(0, 4)}"
    assert found["a"] == [(["r0"], NODE, "gpu-0-1g-4", [cdi])]
    assert (
        "claim team/b: gpu-0-1g-4 is held by claim team/a; release that claim, or allocate another device" in found["b"]
    )
    assert "claim team/nobody: GET" in found["c"]
    assert (rig.plugin.ready_total, rig.plugin.refused_total) == (1, 2)
    assert await rig.kubelet.unprepare(DRA_DRIVER, one, other) == {"a": "", "b": ""}
    assert rig.node.standing(0) == []
    found = await rig.kubelet.prepare(DRA_DRIVER, other)
    assert found["b"][0][2] == "gpu-0-2g-4"


async def test_a_claim_that_is_ready_needs_no_api_server(rig):
    one = rig.allocate("a", "gpu-0-1g-4")
    first = await rig.kubelet.prepare(DRA_DRIVER, one)
    del rig.objects.objects[f"{CLAIMS}/a"]
    assert await rig.kubelet.prepare(DRA_DRIVER, one) == first


async def test_sockets_that_are_gone_come_back(rig):
    rig.plugin.registration.unlink()
    rig.kubelet.drivers.clear()
    await rig.kubelet.registered(DRA_DRIVER)
    one = rig.allocate("a", "gpu-2")
    assert (await rig.kubelet.prepare(DRA_DRIVER, one))["a"][0][2] == "gpu-2"


async def test_a_failure_to_publish_is_reported_and_ends(rig):
    await rig.until(lambda: rig.plugin.problem == "")
    rig.objects.denied.add(("GET", SLICES_PATH))
    await rig.until(lambda: "slices could not be published" in rig.plugin.problem)
    rig.objects.denied.clear()
    await rig.until(lambda: rig.plugin.problem == "")
    await rig.kubelet.refuse(rig.plugin.registration, "no such version")
    await rig.until(lambda: True)
    assert rig.plugin.problem == "the kubelet rejected the driver: no such version"


# What is read, and how it fares.


def test_what_is_no_message_is_refused():
    for read in (parse_claims, parse_registration_status):
        with pytest.raises(MalformedMessage):
            read(b"\xff\xff")


def test_flags_that_do_not_go_together():
    assert not parse_flags([]).dra
    assert parse_flags(["--dra", "on"]).kubelet_folder.name == "kubelet"
    with pytest.raises(BadEnforcement, match="allocated twice"):
        parse_flags(["--dra", "on", "--device-plugin", "cdi"])
    with pytest.raises(BadEnforcement, match="real devices"):
        parse_flags(["--dra", "on", "--simulate", "fleet.json"])


def test_a_folder_too_deep_for_sockets_is_reported(tmp_path):
    with pytest.raises(SocketPathTooLong, match="--kubelet-folder"):
        DraDriver(tmp_path / ("x" * 100), None, None, read=None, look=None, threads=None)


def raw(mask, limit_w=300.0):
    values = {Reading.EVENT_REASONS_MASK: mask, Reading.POWER_LIMIT_W: limit_w}
    return RawReadings(values=values, energy_counter_j=Missing(AbsenceReason.NOT_SUPPORTED))


def test_a_gpu_is_throttled_at_once_and_for_a_minute():
    conditions, started_s = GpuConditionTracker(), time.monotonic()
    unknown = Missing(AbsenceReason.NOT_SUPPORTED)
    # A power cap (0x04) is kept on purpose; heat (0x20) is not.
    for after_s, mask, is_throttled in [(0, 4.0, False), (1, 36.0, True), (30, 0.0, True), (62, 0.0, False)]:
        found = conditions.observe({"GPU-0": raw(mask)}, started_s + after_s)
        assert (found["GPU-0"].is_throttled, found["GPU-0"].power_limit_w) == (is_throttled, 300.0), after_s
    found = conditions.observe({"GPU-1": raw(unknown, unknown)}, started_s)
    assert found["GPU-1"] == (None, None)
