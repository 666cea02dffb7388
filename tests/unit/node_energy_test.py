"""One node's energy from the device port to owners: a simulated node, the real sampler, and who is charged."""

import pytest
from tests.device_rig import open_rig

from eelgrid_agent.devices.port import GpuProcess, ProcessKind
from eelgrid_agent.devices.sampler import NodeSample, Sampler, read_extended_readings
from eelgrid_agent.energy.accounts import EnergyUse, UsageOwnerKind
from eelgrid_agent.energy.metering import EnergyMeasurement
from eelgrid_agent.energy.node_energy import AttributionSources, NodeEnergy
from eelgrid_agent.energy.process_owners import ProcessOwnerResolver
from eelgrid_agent.node.inventory import read_each_gpu
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec, MigSlice
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.codec import decode_message, encode_message
from eelgrid_protos.messages import Assignment, ConnectRequest, NodeEventKind, Reading

SECOND = 1_000_000_000
MILLIJOULES = 1000.0
HALVES = (MigSlice(profile="3g", start=4), MigSlice(profile="1g", start=0))


class Site:
    """A node that ticks every second and looks every five, as the agent does."""

    def __init__(self, rig, proc):
        self.rig = rig
        self.proc = proc
        self.sampler = Sampler(sample_interval_s=1.0)
        self.energy = NodeEnergy(load_catalogue(), AttributionSources(ProcessOwnerResolver(proc)))
        self.assignments = None
        self.events = []
        self.tick = None

    def process(self, index, pid, job, instance=None):
        folder = self.proc / str(pid)
        folder.mkdir()
        (folder / "cgroup").write_text(f"0::/system.slice/slurmstepd.scope/job_{job}/step_0/user/task_0\n")
        (folder / "stat").write_text(f"{pid} (python) " + " ".join(["S", *["0"] * 18, "77"]))
        self.rig.node.start_process(
            self.rig.uuid(index), GpuProcess(pid=pid, kind=ProcessKind.COMPUTE, gpu_instance_id=instance)
        )

    def step(self, number):
        self.rig.advance(1)
        gpus = self.rig.device.gpus()
        looks = read_each_gpu(self.rig.device, tuple(gpu.uuid for gpu in gpus))
        now_ns = self.rig.clock[0]
        seen = self.sampler.observe(NodeSample(wall_ns=now_ns, monotonic_ns=now_ns, generation=1, gpus=looks, host={}))
        self.tick = seen.tick
        self.energy.on_tick(gpus, looks, seen, monotonic_ns=now_ns)
        if number % 5 == 0:
            slow = read_extended_readings(self.rig.device, [gpu.uuid for gpu in gpus])
            found = self.energy.read_sources(gpus, slow, now_ns=now_ns)
            self.events += self.energy.observe(
                gpus, slow, found, assignments=self.assignments, uncounted_s=self.sampler.uncounted_by_gpu
            )
            self.check()

    def run(self, seconds):
        for number in range(seconds):
            self.step(number)

    def check(self):
        """Everything that anybody was charged is what the controller is told, to the millijoule."""
        for index, device in enumerate(self.energy.build_report().devices):
            told_j = self.tick.reading(Reading.ENERGY_J, index)
            if told_j is not None:
                assert device.total_mj == round(told_j * MILLIJOULES)

    def joules(self, **wanted):
        """Of owners with these labels."""
        return sum(
            row.energy_mj / MILLIJOULES
            for row in self.energy.build_report().owners
            if row.owner.labels().items() >= wanted.items()
        )


@pytest.fixture
def site(tmp_path):
    with open_rig("nvml", GpuSpec(product="h100-sxm5-80gb"), GpuSpec(product="h100-sxm5-80gb", mig=HALVES)) as rig:
        yield Site(rig, tmp_path)


def test_nothing_is_known_before_the_first_tick_and_look(site):
    gpus = site.rig.device.gpus()
    slow = read_extended_readings(site.rig.device, [gpu.uuid for gpu in gpus])
    assert site.energy.build_report() is None
    assert site.energy.observe(gpus, slow, site.energy.read_sources(gpus, slow, now_ns=0)) == ()
    assert (site.energy.build_report(), site.energy.newest) == (None, None)


def test_two_jobs_on_one_device_are_charged_what_the_device_really_drew(site):
    site.run(61)
    site.process(0, 11, job=1)
    site.process(0, 12, job=2)
    site.rig.load(0, 0.8)
    truth_pj = site.rig.node.devices[0].energy_pj(site.rig.clock[0])
    before_j = site.energy.build_report().devices[0].total_mj / MILLIJOULES
    site.run(121)
    report = site.energy.build_report()
    drawn_j = (site.rig.node.devices[0].energy_pj(site.rig.clock[0]) - truth_pj) / 1e12
    device = report.devices[0]
    assert device.total_mj / MILLIJOULES - before_j == pytest.approx(drawn_j, rel=0.01)
    assert device.estimate.method is EnergyMeasurement.COUNTER
    assert device.estimate.uncertainty_j == pytest.approx(0.05 * device.estimate.energy_j, rel=0.1)
    # Equal parts of the load, to the rounding of SM ratios.
    assert site.joules(slurm_job="1") == pytest.approx(site.joules(slurm_job="2"), rel=0.02)
    # Nobody was given the device, so its idle power is the node's.
    assert dict(device.nobody_mj)["unallocated"] / MILLIJOULES == pytest.approx(182 * 70, rel=0.15)
    assert {
        (row.owner.pid, row.part) for row in report.recent if row.gpu_uuid == device.gpu_uuid and row.owner.pid
    } == {(pid, part) for pid in (11, 12) for part in (EnergyUse.CONTEXT_IDLE, EnergyUse.ACTIVE)}
    assert device.recent_s == 5.0


def test_resets_losses_and_gaps_lose_no_millijoule_of_what_is_reported(site):
    faults, uuid = site.rig.node.faults, site.rig.uuid(0)
    site.process(0, 11, job=1)
    site.rig.load(0, 0.5)
    site.run(17)
    faults.reset_counter(uuid)
    site.run(13)
    faults.lose_gpu(uuid)
    site.run(7)
    faults.restore_gpu(uuid)
    site.run(13)
    charged_j = site.joules(slurm_job="1")
    assert charged_j > 5000.0
    # Its process went with the device, and an hour later its joules are among those who are no more.
    site.rig.advance(3600)
    site.run(16)
    device = site.energy.build_report().devices[0]
    assert dict(device.nobody_mj)["ended"] / MILLIJOULES == pytest.approx(charged_j)
    assert device.estimate.method is EnergyMeasurement.MIXED


def test_a_held_device_that_idles_is_reported_once(site):
    uuid = site.rig.uuid(0)
    site.assignments = (Assignment(workload_id="train", replica=0, gpu_uuids=(uuid,)),)
    site.run(600)
    (event,) = site.events
    assert (event.kind, event.gpu_uuid) == (NodeEventKind.GPU_IDLE_HELD, uuid)
    assert event.detail.startswith("held and idle for 300 s")
    assert event.detail.endswith("by workload workload=train")
    assert site.joules(workload="train") > 0.0
    # Work ends it, and it is told again when it idles again.
    site.rig.load(0, 0.9)
    site.run(20)
    site.rig.load(0, 0.0)
    site.run(330)
    assert [event.gpu_uuid for event in site.events] == [uuid, uuid]


def test_an_idle_context_of_somebody_who_holds_nothing_is_reported(site):
    busy, idle = (one.id for one in site.rig.device.gpus()[1].gpu_instances)
    site.process(1, 21, job=8, instance=busy)
    site.process(1, 22, job=9, instance=idle)
    site.rig.node.set_instance_load(site.rig.uuid(1), busy, GpuLoad(utilization_ratio=0.9))
    site.run(330)
    (event,) = site.events
    assert event.detail.startswith(f"GPU instance {idle}: an idle context is open for 300 s")
    assert event.detail.endswith("by slurm job=9 step=0")
    # Both pay for their contexts, and one for the work.
    context = {
        row.owner.job: row.energy_mj for row in site.energy.build_report().owners if row.part is EnergyUse.CONTEXT_IDLE
    }
    assert abs(context["8"] - context["9"]) <= 70
    assert {row.owner.job for row in site.energy.build_report().owners if row.part is EnergyUse.ACTIVE} == {"8"}
    assert {row.owner.kind for row in site.energy.build_report().owners} == {UsageOwnerKind.SLURM}


def test_an_idle_context_in_a_cgroup_whose_name_is_no_text_is_told(site):
    site.process(0, 21, job=8)
    (site.proc / "21" / "cgroup").write_bytes(b"0::/system.slice/own.service/\xff\x1b[2J.scope\n")
    site.run(330)
    (event,) = site.events
    assert event.detail.endswith("by unit unit=\\udcff\\x1b[2J.scope")
    assert decode_message(ConnectRequest, encode_message(ConnectRequest(message=event))).message == event
