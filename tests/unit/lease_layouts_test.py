"""What engines have leased, MIG layouts, claims and the device plugin leave alone; and what they give is leased."""

import asyncio
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tests.dra_rig import GPUS, DraNode, dra_node
from tests.unit.device_plugin_test import Machine

from eelgrid_agent.devices.host import read_boot_id
from eelgrid_agent.enforce.device_leases import KUBELET_HOLDER, LEASES_FILE, DeviceLeases, LayoutChanging
from eelgrid_agent.enforce.lease_table import LEASE_JOURNAL, DeviceLeased, LeaseHolder, LeaseTable
from eelgrid_agent.enforce.mig.inspection import inspect_host
from eelgrid_agent.enforce.mig.journal import MIG_JOURNAL
from eelgrid_agent.enforce.mig.mig_service import MigService
from eelgrid_agent.kubelet.claim_preparation import ClaimJournal, ClaimPreparer, ClaimUnpreparable, LayoutDevices
from eelgrid_agent.kubelet.device_plugins import DevicePlugins, PluginTimes, allocate_by_environment, build_offers
from eelgrid_agent.state_files import MemoryState, StateFile
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import ApplyStatus, GpuLayout, WantedInstance

JOB = LeaseHolder("slurm", "12")


class LeasedNode(DraNode):
    """The rig's node, with leases of all engines in its state directory."""

    def start(self):
        super().start()
        site = self.site
        self.leases = DeviceLeases(
            StateFile(self.folder / LEASES_FILE, LEASE_JOURNAL), boot_id=read_boot_id(), wall_ns=time.time_ns
        )
        self.leases.list_gpus = site.device.gpus
        self.layouts = MigService(
            site.device, site.control, StateFile(self.folder / "mig.json", MIG_JOURNAL), boot_id=lambda: site.boot_id,
            sleep=self.sleep, monotonic_s=time.monotonic, wall_ns=time.time_ns, leases=self.leases,
        )  # fmt: skip
        self.layouts.recover()
        self.readying = ClaimPreparer(
            self.name, LayoutDevices(site.device, site.control, self.layouts), ClaimJournal(self.folder / "claims.json"),
            load_catalogue(), leases=self.leases,
        )  # fmt: skip
        self.readying.restore_leases()
        self.leases.finish_adoption()

    def sleep(self, seconds):
        """Time between two tries of the driver."""

    def held(self):
        return sorted((*lease.holder, lease.device.start, lease.device.size) for lease in self.leases.table.leases)


@pytest.fixture
def node(tmp_path):
    with leased_node(tmp_path) as found:
        yield found


@contextmanager
def leased_node(folder):
    with dra_node(folder, GPUS) as plain:
        yield LeasedNode(folder, plain.site)


def layout(node, *parts):
    gpu = node.gpus()[1]
    instances = tuple(WantedInstance(profile=profile, start=start) for profile, start in parts)
    return node.layouts.apply_layout(GpuLayout(gpu_uuid=gpu.uuid, mig_enabled=bool(parts), instances=instances))


def test_a_layout_touches_no_leased_slice_and_says_whose_it_is(node):
    node.leases.take(JOB, [node.uuid(1, 4)])
    before = node.standing(1)
    refused = layout(node, ("7g.40gb", 0))
    assert refused.status is ApplyStatus.REFUSED
    assert "leased to slurm 12 since" in refused.detail
    assert node.standing(1) == before
    assert layout(node, ("3g.20gb", 4), ("2g.10gb", 0)).status is ApplyStatus.APPLIED
    node.leases.release(JOB)
    assert layout(node, ("7g.40gb", 0)).status is ApplyStatus.APPLIED


def test_a_gpu_that_is_leased_whole_is_not_cut(node):
    gpu = node.gpus()[0]
    node.leases.take(JOB, [gpu.uuid])
    wanted = GpuLayout(gpu_uuid=gpu.uuid, mig_enabled=True, instances=(WantedInstance(profile="1g.10gb", start=0),))
    refused = node.layouts.apply_layout(wanted)
    assert refused.status is ApplyStatus.REFUSED
    assert "slurm 12" in refused.detail
    assert not node.gpus()[0].mig_enabled


def test_nothing_of_the_gpu_is_given_while_its_layout_changes(node, monkeypatch):
    asked = []
    create = node.site.control.create_gpu_instance

    def create_and_ask(uuid, profile_id, start):
        with pytest.raises(LayoutChanging):
            node.leases.take(JOB, [uuid])
        asked.append(start)
        return create(uuid, profile_id, start)

    monkeypatch.setattr(node.site.control, "create_gpu_instance", create_and_ask)
    assert layout(node, ("2g.10gb", 0), ("2g.10gb", 2)).status is ApplyStatus.APPLIED
    assert asked == [0, 2]
    node.leases.take(JOB, [node.uuid(1, 2)])


def test_a_claim_gets_no_slice_of_another_engine_and_its_own_is_leased_before_it_exists(node):
    node.leases.take(JOB, [node.uuid(1, 4)])
    with pytest.raises(ClaimUnpreparable, match="is leased to slurm 12"):
        node.ready("u1", "gpu-1-3g-4")
    assert node.held() == [("slurm", "12", 4, 4)]
    # In its way stands an instance that nobody has.
    node.ready("u2", "gpu-1-2g-0")
    owner = "claim team/u2 u2"
    assert node.held() == [("kubernetes", owner, 0, 2), ("slurm", "12", 4, 4)]
    with pytest.raises(DeviceLeased, match="delete the pod or the claim"):
        node.leases.take(JOB, [node.uuid(1, 0)])
    node.undo("u2")
    assert node.held() == [("slurm", "12", 4, 4)]


def test_claims_that_stand_are_leased_again_after_the_journal_was_lost(tmp_path):
    with leased_node(tmp_path) as node:
        node.ready("u1", "gpu-2")
        (tmp_path / LEASES_FILE).write_text("{")
        node.start()
        assert node.held() == [("kubernetes", "claim team/u1 u1", 0, 0)]
        assert node.readying.is_restored
        # And of a claim that is no more nothing stays.
        node.leases.take_devices(LeaseHolder("kubernetes", "claim team/gone g"), [])
        (tmp_path / "claims.json").unlink()
        node.start()
        assert node.held() == []


def test_the_command_for_layouts_reads_what_the_agent_has_leased(node):
    node.leases.take(JOB, [node.gpus()[1].uuid])
    found = inspect_host(replace(node.site, directory=node.folder))
    assert found.executor.observe_device(node.gpus()[1].uuid).leased


class LeasedMachine(Machine):
    """A kubelet and our device plugins, with leases."""

    def __init__(self, folder):
        super().__init__(folder)
        self.leases = DeviceLeases(MemoryState(LeaseTable()), boot_id="b", wall_ns=time.time_ns)
        self.leases.list_gpus = lambda: self.gpus
        self.leases.finish_adoption()
        self.hides = True
        self.plugins = DevicePlugins(
            folder,
            offers=lambda: build_offers(self.gpus, "nvidia.com", self.is_leased),
            node=self.node,
            give=allocate_by_environment,
            lease=lambda ids: self.leases.take(KUBELET_HOLDER, ids),
            times=PluginTimes(look_s=0.02, deadline_s=2.0, backoff_most_s=0.1),
        )

    def is_leased(self, uuid):
        return self.hides and self.leases.find_conflict(KUBELET_HOLDER, uuid) is not None


def test_the_kubelet_is_refused_what_another_engine_took_and_leases_what_it_gives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("k")

    async def talk():
        machine = LeasedMachine(folder)
        # What it was told last is older than the lease.
        machine.hides = False
        async with machine.running():
            await machine.sees("nvidia.com/gpu", "GPU-0", "GPU-1")
            machine.leases.take(JOB, ["GPU-0", "GPU-1"])
            with pytest.raises(Exception, match="is leased to slurm 12"):
                await machine.kubelet.admit("pod", "nvidia.com/gpu", 1)
            machine.leases.release(JOB, ["GPU-1"])
            machine.hides = True
            await machine.kubelet.until(lambda: machine.kubelet.devices["nvidia.com/gpu"]["GPU-0"] == "Unhealthy")
            answer = await machine.kubelet.admit("pod", "nvidia.com/gpu", 1)
            return dict(answer.envs), [(lease.device.uuid, *lease.holder) for lease in machine.leases.table.leases]

    envs, held = asyncio.run(talk())
    assert envs == {"NVIDIA_VISIBLE_DEVICES": "GPU-1"}
    assert held == [("GPU-0", "slurm", "12"), ("GPU-1", *KUBELET_HOLDER)]
