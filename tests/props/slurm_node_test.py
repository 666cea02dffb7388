"""A MIG layout that changes under a node of Slurm, with a crash at every step: old or new, and the node is back in service."""

import random

import pytest
from bench.fault_world import NEVER, Crash, CrashPoints, MemoryJournal
from bench.mig_device import MigDevice
from bench.node_crashes import draw, spelled
from tests.fakes.slurm_node import FakeSlurmNode

from eelgrid_agent.enforce.mig.layout import read_layout
from eelgrid_agent.enforce.mig.mig_service import MigService
from eelgrid_agent.enforce.mig.partitioner import TransitionRefused
from eelgrid_agent.engine.slurm_node import (
    OUTAGE_REASON,
    OutageLimits,
    OutagePhase,
    OutageRecord,
    SlurmNodeService,
    build_gres,
)
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import ApplyStatus

# A change of the mode of these takes no reset.
PARTS = [load_catalogue().geometries[key] for key in ("h100-80gb-sxm", "h200-141gb")]
ROUNDS_MOST = 12


class OutageJournal:
    """What outlives the agent of an outage; a crash comes before or after a write, never within."""

    def __init__(self, moment):
        self.moment, self.record = moment, OutageRecord()

    def load(self):
        return self.record

    def store(self, record):
        self.moment("before store of the outage")
        self.record = record
        self.moment("after store of the outage")


class World:
    """A GPU, its node of Slurm, both journals, and the agent of now."""

    def __init__(self, geometry, *, mig_enabled, seed=0, drain_wait_s=0.0):
        self.points, self.drain_wait_s = CrashPoints(), drain_wait_s
        self.device = MigDevice(geometry, self.moment, mig_enabled=mig_enabled)
        self.slurm = FakeSlurmNode(self.moment, now_s=lambda: self.device.now_s, seed=seed)
        self.layouts, self.outages = MemoryJournal(self.moment), OutageJournal(self.moment)
        self.boots = 1
        self.start_agent()

    def moment(self, name):
        self.slurm.pass_time()
        is_of_gpu = name.partition(" ")[2] in (
            "set_mig_mode",
            *(f"{what}_{of}_instance" for what in ("create", "destroy") for of in ("gpu", "compute")),
        )
        if is_of_gpu and (self.slurm.takes_jobs or self.slurm.jobs):
            self.slurm.violations.append(f"{name}: the layout changed while jobs could run")
        if name == "before start_slurmd" and self.slurm.jobs:
            self.slurm.violations.append("slurmd was started under jobs")
        self.points(name)

    def start_agent(self):
        self.node = SlurmNodeService(
            self.slurm,
            self.outages,
            read_gres=self.gres,
            sleep=self.device.sleep,
            monotonic_s=lambda: self.device.now_s,
            limits=OutageLimits(drain_wait_s=self.drain_wait_s),
        )
        self.service = MigService(
            self.device,
            self.device,
            self.layouts,
            boot_id=lambda: f"boot-{self.boots}",
            sleep=self.device.sleep,
            monotonic_s=lambda: self.device.now_s,
            wall_ns=lambda: int(self.device.now_s * 1e9),
            service=self.node,
        )

    def gres(self):
        return build_gres(self.device.gpus(), lambda *_: ("/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap1"))

    def layout(self):
        return read_layout(self.device.gpus()[0])

    def apply(self, state):
        return self.service.apply_layout(spelled(self.device.geometry, self.device.uuid, state))

    def reboot(self):
        self.device.reboot()
        self.slurm.reboot()
        self.boots += 1

    def find_problem(self, *, reason=""):
        """What keeps the node from being in service as it is; empty if nothing does."""
        slurm = self.slurm
        if slurm.violations or self.device.violations:
            return (slurm.violations + self.device.violations)[0]
        if self.service.executor.record(self.device.uuid).intent is not None:
            return "the layout is still under way"
        if self.outages.record.phase is not OutagePhase.IN_SERVICE:
            return f"the outage is {self.outages.record.phase}"
        if not slurm.registered == slurm.slurmd == slurm.options == self.gres().text:
            return f"Slurm has {slurm.registered}, slurmd {slurm.slurmd}, options {slurm.options}; there is {self.gres().text}"
        is_drained = "DRAIN" in slurm.states
        return "" if (is_drained, slurm.reason) == (bool(reason), reason) else f"{slurm.states} {slurm.reason}"


def in_service(scenario, *, chance=0.0, **more):
    """A world whose node is in service with the layout that a scenario begins with; from then on jobs start by chance."""
    world = World(scenario.geometry, mig_enabled=scenario.start.mig_enabled, **more)
    world.service.recover()
    assert world.apply(scenario.start).status is ApplyStatus.APPLIED
    assert not world.find_problem()
    world.points.passed, world.points.names = 0, []
    world.slurm.chance = chance
    return world


def run(scenario, *, crash_at, death="agent", again_at=NEVER, reason="", **more):
    """What went wrong, or nothing, and how many moments there were."""
    world = in_service(scenario, **more)
    if reason:
        world.slurm.states.add("DRAIN")
        world.slurm.reason = reason
    before = world.layout()
    lives = True
    world.points.at = crash_at
    try:
        result = world.apply(scenario.goal)
    except Crash:
        lives, result = False, None
        if death == "reboot":
            world.points.disarm()
            world.reboot()
    moments = world.points.passed
    world.points.passed, world.points.at = 0, again_at
    for _ in range(ROUNDS_MOST):
        try:
            if not lives:
                world.start_agent()
                lives = True
                world.service.recover()
            world.service.check_layouts()
        except Crash:
            lives = False
            world.points.disarm()
        world.device.sleep(10.0)
    world.points.disarm()
    world.slurm.chance = 0.0
    ends = [before, in_service(scenario).layout()]
    after = World(scenario.geometry, mig_enabled=scenario.start.mig_enabled)
    after.service.recover()
    assert after.apply(scenario.goal).status is ApplyStatus.APPLIED
    ends.append(after.layout())
    problem = world.find_problem(reason=reason)
    if not problem and world.layout() not in ends:
        problem = f"ends at {world.layout()}"
    if not problem and result is not None and (result.status is ApplyStatus.APPLIED) != (world.layout() == ends[-1]):
        problem = f"was answered {result}"
    return problem, moments


def scenario_of(seed):
    """The scenario of a seed, in which nobody uses or made anything else, and something changes."""
    drawn = draw(seed, PARTS)
    while drawn.start == drawn.goal:
        seed += 10_000
        drawn = draw(seed, PARTS)
    return drawn


@pytest.mark.parametrize("seed", range(12))
def test_a_crash_at_any_step_leaves_the_old_or_the_new_layout_and_the_node_in_service(seed):
    chance, scenario = random.Random(seed), scenario_of(seed)
    # Jobs start whenever they may, and the change waits for them or does not.
    more = {"chance": chance.choice((0.0, 0.3)), "seed": seed, "drain_wait_s": chance.choice((0.0, 60.0))}
    more["reason"] = chance.choice(("", "", "the fan rattles"))
    problem, moments = run(scenario, crash_at=NEVER, **more)
    assert not problem
    for moment in range(moments):
        for death in ("agent", "reboot"):
            problem, _ = run(scenario, crash_at=moment, death=death, **more)
            assert not problem, (seed, moment, death)


@pytest.mark.parametrize("seed", range(100, 106))
def test_a_crash_of_the_recovery_is_recovered_from(seed):
    chance, scenario = random.Random(seed), scenario_of(seed)
    _, moments = run(scenario, crash_at=NEVER)
    for moment in range(moments):
        problem, _ = run(
            scenario, crash_at=moment, death=chance.choice(("agent", "reboot")), again_at=chance.randrange(25)
        )
        assert not problem, (seed, moment)


def test_a_node_with_jobs_stays_as_it_is_and_its_jobs_run_on():
    scenario = scenario_of(1)
    world = in_service(scenario)
    before, world.slurm.jobs = world.layout(), {"12": 1e9}
    result = world.apply(scenario.goal)
    assert (result.status, result.rule) == (ApplyStatus.REFUSED, "busy")
    assert "(12)" in result.detail
    assert world.points.names == []
    assert world.layout() == before
    # With time to drain, nothing starts meanwhile, and what is still there then ends the wait.
    world.drain_wait_s = 30.0
    world.start_agent()
    assert world.apply(scenario.goal).rule == "busy"
    assert "before drain" in world.points.names
    assert world.slurm.jobs == {"12": 1e9}
    assert not world.find_problem()


def test_a_static_node_is_refused_before_anything_is_done():
    world = in_service(scenario_of(1))
    world.slurm.states -= {"DYNAMIC_NORM"}
    result = world.apply(scenario_of(1).goal)
    assert (result.status, result.rule) == (ApplyStatus.REFUSED, "engine")
    assert "slurmd with -Z" in result.detail
    assert world.points.names == []


def test_a_node_in_a_reservation_is_refused_before_anything_is_done():
    world = in_service(scenario_of(1))
    world.slurm.reservations = ("keep",)
    result = world.apply(scenario_of(1).goal)
    assert (result.status, result.rule) == (ApplyStatus.REFUSED, "engine")
    assert "(keep)" in result.detail
    assert world.points.names == []


@pytest.mark.parametrize("call", ["read_node", "drain", "stop_slurmd", "delete"])
def test_what_slurm_refuses_on_the_way_out_leaves_the_node_in_service_with_the_old_layout(call):
    world = in_service(scenario_of(1))
    before, world.slurm.failures = world.layout(), {call: 1}
    result = world.apply(scenario_of(1).goal)
    assert (result.status, result.rule) == (ApplyStatus.REFUSED, "engine")
    assert world.layout() == before
    world.service.check_layouts()
    assert not world.find_problem()


def test_a_node_that_cannot_be_brought_back_is_told_and_brought_back_later():
    world = in_service(scenario_of(1))
    world.slurm.failures = {"start_slurmd": 1}
    result = world.apply(scenario_of(1).goal)
    assert (result.status, result.rule) == (ApplyStatus.REFUSED, "engine")
    assert "out of service" in result.detail
    assert world.outages.record.phase is OutagePhase.OUT
    world.service.check_layouts()
    assert not world.find_problem()
    assert world.apply(scenario_of(1).goal).status is ApplyStatus.APPLIED


def test_a_drain_of_somebody_else_is_given_back():
    world = in_service(scenario_of(1))
    world.slurm.states.add("DRAIN")
    world.slurm.reason = "the fan rattles"
    assert world.apply(scenario_of(1).goal).status is ApplyStatus.APPLIED
    assert not world.find_problem(reason="the fan rattles")


def test_a_drain_whose_journal_was_lost_is_taken_back():
    world = in_service(scenario_of(1))
    world.slurm.states.add("DRAIN")
    world.slurm.reason = OUTAGE_REASON
    world.start_agent()
    world.service.recover()
    assert not world.find_problem()


def test_a_node_that_somebody_deleted_or_whose_layout_changed_without_it_is_registered_anew():
    world = in_service(scenario_of(1))
    world.slurm.registered = None
    world.start_agent()
    world.service.recover()
    assert not world.find_problem()
    world.slurm.registered = world.slurm.slurmd = "gpu:other:1"
    world.slurm.jobs = {"12": 1.0}
    world.start_agent()
    world.service.recover()
    # Not under a job.
    assert world.slurm.registered == "gpu:other:1"
    world.device.sleep(2.0)
    world.start_agent()
    world.service.recover()
    assert not world.find_problem()


@pytest.mark.parametrize("reason", ["gres/gpu count reported lower than configured", OUTAGE_REASON])
@pytest.mark.parametrize("phase", [OutagePhase.IN_SERVICE, OutagePhase.DRAINING])
def test_a_node_that_slurmctld_finds_invalid_is_registered_anew_and_not_drained_again(reason, phase):
    """As after a restart with an old state of the node, which may have been saved while we drained it."""
    world = in_service(scenario_of(1))
    world.slurm.states |= {"DRAIN", "INVALID_REG"}
    world.slurm.reason, world.outages.record = reason, OutageRecord(phase=phase)
    world.service.check_layouts()
    assert not world.find_problem()


def test_an_outage_in_an_outage_is_one():
    world = in_service(scenario_of(1))
    with world.node.outage(), world.node.outage():
        assert world.slurm.registered is None
    assert world.points.names.count("after delete") == 1
    with world.node.recovery():
        assert world.slurm.takes_jobs
    assert world.slurm.reason != OUTAGE_REASON


def test_an_outage_that_slurm_does_not_allow_raises():
    world = in_service(scenario_of(1))
    world.slurm.jobs = {"12": 1e9}
    with pytest.raises(TransitionRefused), world.node.outage():
        pass
