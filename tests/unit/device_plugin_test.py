"""The device plugins: what is offered, what is preferred, and a kubelet over real sockets that restarts and asks."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.kubelet_devices import DeviceManager, Refused

from eelgrid_agent.kubelet.device_plugins import (
    DevicePlugins,
    NodeDevices,
    PluginTimes,
    allocate_by_cdi,
    allocate_by_environment,
    build_offers,
    choose_devices,
    gpu_index_by_device,
    planned_device_sets,
)
from eelgrid_agent.node.config import BadEnforcement, BadLabel, parse_flags
from eelgrid_protos.errors import MalformedMessage
from eelgrid_protos.kubelet_api import (
    OfferedDevice,
    PreferredAllocationRequest,
    parse_allocate_request,
    parse_preferred_request,
)
from eelgrid_protos.messages import Assignment, ComputeInstance, Gpu, GpuInstance, GpuLink

DOMAIN = "nvidia.com"


def whole(index, **changes):
    return Gpu(uuid=f"GPU-{index}", index=index, product="NVIDIA H100 80GB HBM3", model="H100", **changes)


def instance(start, profile="1g.10gb", size=1, parts=1):
    return GpuInstance(
        id=start,
        profile_id=19,
        profile=profile,
        start=start,
        size=size,
        compute_instances=tuple(ComputeInstance(id=n, uuid=f"MIG-{start}-{n}-{profile}") for n in range(parts)),
    )


def cut(index, *instances, **changes):
    return whole(index, mig_capable=True, mig_enabled=True, gpu_instances=instances, **changes)


# What is offered.


def test_whole_gpus_and_slices_go_by_the_names_of_the_mixed_strategy():
    found = build_offers([whole(1), cut(0, instance(4), instance(0, "3g.40gb", 4), instance(6, "1g.10gb+me"))], DOMAIN)
    assert {name: [one.device_id for one in devices] for name, devices in found.items()} == {
        "nvidia.com/gpu": ["GPU-1"],
        "nvidia.com/mig-3g.40gb": ["MIG-0-0-3g.40gb"],
        "nvidia.com/mig-1g.10gb": ["MIG-4-0-1g.10gb"],
        "nvidia.com/mig-1g.10gb.me": ["MIG-6-0-1g.10gb+me"],
    }


def test_what_is_cut_further_or_between_modes_is_no_device():
    assert build_offers([cut(0, instance(0, "2g.20gb", 2, parts=2)), whole(1, mig_pending=True), cut(2)], DOMAIN) == {}


def test_lost_and_cordoned_devices_are_offered_as_unhealthy():
    found = build_offers([whole(0, lost=True, numa_node=1), whole(1, cordon="xid 79"), whole(2)], DOMAIN)
    assert [one.is_healthy for one in found["nvidia.com/gpu"]] == [False, False, True]
    assert [one.numa_node for one in found["nvidia.com/gpu"]] == [1, None, None]


# What is preferred.


def links(*pairs, nvlinks=4):
    return tuple(GpuLink(one=one, other=other, ancestor=50, nvlinks=nvlinks) for one, other in pairs)


def ids(*indexes):
    return tuple(f"GPU-{index}" for index in indexes)


def node(count=8, **changes):
    return NodeDevices(index_of=gpu_index_by_device(whole(index) for index in range(count)), **changes)


def test_the_devices_of_the_plan_come_first():
    plan = planned_device_sets(
        [
            Assignment(workload_id="w", replica=0, gpu_uuids=ids(5, 2), gpu_milli=1000),
            Assignment(workload_id="c", replica=0),
        ]
    )
    assert choose_devices(
        PreferredAllocationRequest(available=ids(*range(8)), must=(), size=2), node(wanted=plan)
    ) == ids(2, 5)


def test_a_set_that_a_pod_holds_already_is_not_meant():
    wanted = (frozenset(ids(0)), frozenset(ids(3)))
    asked = PreferredAllocationRequest(available=ids(1, 2, 3), must=(), size=1)
    assert choose_devices(asked, node(wanted=wanted, held=frozenset(ids(0)))) == ids(3)


def test_others_keep_off_what_was_planned_for_somebody_where_they_can():
    wanted = (frozenset(ids(0, 1)),)
    assert choose_devices(
        PreferredAllocationRequest(available=ids(0, 1, 2), must=(), size=1), node(wanted=wanted)
    ) == ids(2)
    assert choose_devices(
        PreferredAllocationRequest(available=ids(0, 1, 2), must=(), size=3), node(wanted=wanted)
    ) == ids(0, 1, 2)


def test_without_a_plan_the_nearest_are_taken():
    near = links((2, 6), (3, 5)) + links((0, 1), nvlinks=2)
    assert choose_devices(
        PreferredAllocationRequest(available=ids(*range(8)), must=(), size=2), node(links=near)
    ) == ids(2, 6)
    assert choose_devices(
        PreferredAllocationRequest(available=ids(*range(8)), must=ids(5), size=2), node(links=near)
    ) == ids(5, 3)


def test_slices_fill_a_gpu_in_use_before_they_open_another():
    gpus = [cut(0, instance(0), instance(1)), whole(1)]
    other = replace(gpus[0], uuid="GPU-9", index=9, gpu_instances=(replace(instance(5), id=55),))
    place = gpu_index_by_device([*gpus, other])
    held = frozenset({"MIG-5-0-1g.10gb"})
    asked = PreferredAllocationRequest(available=("MIG-0-0-1g.10gb", "MIG-1-0-1g.10gb"), must=(), size=1)
    assert choose_devices(asked, NodeDevices(index_of=place)) == ("MIG-0-0-1g.10gb",)
    busy = PreferredAllocationRequest(available=("MIG-0-0-1g.10gb", "MIG-new"), must=(), size=1)
    assert choose_devices(busy, NodeDevices(index_of=place | {"MIG-new": 9}, held=held)) == ("MIG-new",)


def test_many_devices_are_taken_one_by_one():
    asked = PreferredAllocationRequest(available=tuple(f"d{n}" for n in range(64)), must=(), size=20)
    chosen = choose_devices(asked, NodeDevices(index_of={f"d{n}": n // 8 for n in range(64)}))
    assert len(set(chosen)) == 20
    assert len({int(one[1:]) // 8 for one in chosen}) == 3


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_preference_is_what_the_kubelet_can_use(data):
    count = data.draw(st.integers(1, 8))
    free = data.draw(st.lists(st.sampled_from(ids(*range(count))), unique=True, max_size=count))
    must = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=len(free))) if free else []
    size = data.draw(st.integers(0, 8))
    wanted = data.draw(st.lists(st.frozensets(st.sampled_from(ids(*range(count))), min_size=1), max_size=3))
    held = data.draw(st.frozensets(st.sampled_from(ids(*range(count)))))
    chosen = choose_devices(
        PreferredAllocationRequest(available=tuple(free), must=tuple(must), size=size),
        node(count, wanted=tuple(wanted), held=held),
    )
    assert len(set(chosen)) == len(chosen)
    assert set(must) <= set(chosen) <= set(free) | set(must)
    assert len(chosen) == max(len(must), min(size, len(set(free) | set(must))))
    # What is free now is held by nobody, whatever was said of it before.
    planned = [one for one in wanted if len(one) == size and set(must) <= one <= set(free)]
    assert not planned or size <= len(must) or len(free) <= size or set(chosen) == planned[0]


# The kubelet.


class Machine:
    """An inventory and a plan set by hand."""

    def __init__(self, folder, give=allocate_by_environment):
        self.gpus = [whole(0), whole(1)]
        self.wanted = ()
        self.kubelet = DeviceManager(folder)
        self.plugins = DevicePlugins(
            folder,
            offers=lambda: build_offers(self.gpus, DOMAIN),
            node=self.node,
            give=give,
            times=PluginTimes(look_s=0.02, deadline_s=2.0, backoff_most_s=0.1),
        )

    def node(self):
        held = frozenset(one for _, ids in self.kubelet.held.values() for one in ids)
        return NodeDevices(index_of=gpu_index_by_device(self.gpus), wanted=self.wanted, held=held)

    @asynccontextmanager
    async def running(self):
        await self.kubelet.begin()
        task = asyncio.create_task(self.plugins.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.kubelet.end()

    async def sees(self, resource, *devices):
        await self.kubelet.until(lambda: set(self.kubelet.devices.get(resource, {})) == set(devices))


@pytest.fixture
def machine(short_path):
    return Machine(short_path)


async def test_a_pod_gets_the_devices_that_its_plan_names(machine):
    machine.wanted = (frozenset({"GPU-1"}),)
    async with machine.running():
        await machine.sees("nvidia.com/gpu", "GPU-0", "GPU-1")
        answer = await machine.kubelet.admit("pod", "nvidia.com/gpu", 1)
        assert dict(answer.envs) == {"NVIDIA_VISIBLE_DEVICES": "GPU-1"}
        assert machine.kubelet.held["pod"] == ("nvidia.com/gpu", ("GPU-1",))


async def test_cdi_names_go_to_a_runtime_that_knows_them(short_path):
    machine = Machine(short_path, allocate_by_cdi)
    async with machine.running():
        await machine.sees("nvidia.com/gpu", "GPU-0", "GPU-1")
        answer = await machine.kubelet.admit("pod", "nvidia.com/gpu", 2)
        assert [one.name for one in answer.cdi_devices] == ["nvidia.com/gpu=GPU-0", "nvidia.com/gpu=GPU-1"]
        assert not answer.envs


async def test_another_layout_is_offered_and_what_pods_hold_stays_theirs(machine):
    async with machine.running():
        await machine.sees("nvidia.com/gpu", "GPU-0", "GPU-1")
        await machine.kubelet.admit("pod", "nvidia.com/gpu", 1)
        machine.gpus = [whole(0), cut(1, instance(0), instance(1))]
        await machine.sees("nvidia.com/mig-1g.10gb", "MIG-0-0-1g.10gb", "MIG-1-0-1g.10gb")
        await machine.sees("nvidia.com/gpu", "GPU-0")
        assert machine.kubelet.held["pod"] == ("nvidia.com/gpu", ("GPU-0",))
        await machine.kubelet.admit("slice", "nvidia.com/mig-1g.10gb", 1)
        machine.gpus = [whole(0), whole(1)]
        await machine.sees("nvidia.com/mig-1g.10gb")
        await machine.sees("nvidia.com/gpu", "GPU-0", "GPU-1")
        assert machine.kubelet.registered.count("nvidia.com/gpu") == 1


async def test_a_kubelet_that_starts_again_is_reported_again(machine):
    async with machine.running():
        await machine.sees("nvidia.com/gpu", "GPU-0", "GPU-1")
        await machine.kubelet.admit("pod", "nvidia.com/gpu", 1)
        await machine.kubelet.end()
        await machine.kubelet.begin()
        await machine.sees("nvidia.com/gpu", "GPU-0", "GPU-1")
        answer = await machine.kubelet.admit("other", "nvidia.com/gpu", 1)
        assert dict(answer.envs) == {"NVIDIA_VISIBLE_DEVICES": "GPU-1"}


async def test_a_kubelet_that_refuses_is_asked_until_it_does_not(machine):
    machine.kubelet.refuse = True
    async with machine.running():
        await machine.kubelet.until(lambda: machine.kubelet.refusals >= 2)
        assert "could not be registered: UNAVAILABLE (not ready)" in machine.plugins.problem
        machine.kubelet.refuse = False
        await machine.sees("nvidia.com/gpu", "GPU-0", "GPU-1")
        assert machine.plugins.problem == ""


async def test_without_a_kubelet_nothing_is_served_and_the_reason_is_reported(tmp_path):
    machine = Machine(tmp_path)
    assert not await machine.plugins.reconcile_plugins()
    assert "the folder is not mounted" in machine.plugins.problem
    assert not any(plugin.is_serving for plugin in machine.plugins.plugins.values())


async def test_a_device_that_failed_since_is_refused_with_the_reason(machine):
    async with machine.running():
        await machine.sees("nvidia.com/gpu", "GPU-0", "GPU-1")
        plugin = machine.plugins.plugins["nvidia.com/gpu"]
        plugin.update_devices = lambda _: False  # the next look does not put it right
        plugin._devices = (OfferedDevice(device_id="GPU-0", is_healthy=False),)  # and the kubelet has not heard yet
        with pytest.raises(Refused, match="gone or unhealthy"):
            await machine.kubelet.admit("pod", "nvidia.com/gpu", 2)
        assert plugin.refused_total == 1


async def test_a_lost_device_is_given_to_nobody(machine):
    async with machine.running():
        await machine.sees("nvidia.com/gpu", "GPU-0", "GPU-1")
        machine.gpus = [whole(0, lost=True), whole(1)]
        await machine.kubelet.until(lambda: machine.kubelet.devices["nvidia.com/gpu"]["GPU-0"] == "Unhealthy")
        with pytest.raises(Refused, match="1 free of 2"):
            await machine.kubelet.admit("pod", "nvidia.com/gpu", 2)


# What is read.


def test_what_is_no_message_is_refused():
    for read in (parse_preferred_request, parse_allocate_request):
        with pytest.raises(MalformedMessage):
            read(b"\xff\xff")


def test_flags_that_do_not_go_together():
    assert parse_flags([]).device_plugin == "off"
    assert parse_flags(["--device-plugin", "cdi"]).device_plugins_folder.name == "device-plugins"
    with pytest.raises(BadLabel, match="write one such as"):
        parse_flags(["--device-domain", "Nvidia"])
    with pytest.raises(BadEnforcement, match="real devices"):
        parse_flags(["--device-plugin", "cdi", "--simulate", "fleet.json"])
