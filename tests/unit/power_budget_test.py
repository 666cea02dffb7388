"""The power budget of a node: held within a second in closed loop, released with care, and told where it cannot be."""

import json
import logging
import random
import subprocess
import sys

import pytest
from bench.fault_world import CrashPoints
from tests.fakes.power_device import FakeMachine, FakePart
from tests.power_rig import Rig, SimulatedMachine, fake, plan_of, setting, simulated

from eelgrid_agent.enforce.guard.core import BudgetState, DeviceDraw, step_budget
from eelgrid_agent.enforce.rules import GuardLimits, LocalPolicy
from eelgrid_agent.node.enforcement_loop import BudgetNotEnforceable, check_budget_reach
from eelgrid_protos.messages import ApplyStatus, Gpu, NodeEventKind

STEP_S = 0.05
LOOKS_EVERY = 5  # four looks a second


class Watch:
    """The longest stretch that the true power stayed over the budget."""

    def __init__(self, rig, budget_w) -> None:
        self.rig, self.budget_w = rig, budget_w
        self.over_s = self.longest_s = 0.0
        self.steps = 0

    def run(self, seconds) -> float:
        for _ in range(int(seconds / STEP_S)):
            self.rig.machine.advance(STEP_S)
            self.steps += 1
            is_over = self.rig.machine.true_power_w() > self.budget_w
            self.over_s = self.over_s + STEP_S if is_over else 0.0
            self.longest_s = max(self.longest_s, self.over_s)
            if self.steps % LOOKS_EVERY == 0:
                self.rig.once()
        return self.longest_s


def load_all(rig, demand_w):
    for uuid in rig.machine.uuids:
        rig.machine.load(uuid, demand_w)


# A busy simulated H100 does not go under 252 W, whatever its limit.
@pytest.mark.parametrize(
    ("make", "budget_w"),
    [(fake, 2000.0), (fake, 3000.0), (fake, 5500.0), (simulated, 2200.0), (simulated, 3000.0), (simulated, 5500.0)],
)
def test_a_sudden_full_load_is_under_the_budget_within_a_second(make, budget_w):
    rig = Rig(make(8), local=LocalPolicy(power_budget_w=budget_w, enforce=True))
    watch = Watch(rig, budget_w)
    watch.run(3.0)
    load_all(rig, 700.0)
    assert watch.run(30.0) <= 1.0
    assert watch.over_s == 0.0
    # Nothing is wasted either: the node draws nearly what it may.
    assert rig.machine.true_power_w() > 0.9 * budget_w
    load_all(rig, 0.0)
    watch.run(60.0)
    assert {uuid: rig.machine.shown(uuid) for uuid in rig.machine.uuids} == rig.found
    assert rig.journal.records == ()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_loads_and_the_controller_do_the_budget_is_kept(seed):
    rng = random.Random(seed)
    rig = Rig(simulated(8), local=LocalPolicy(power_budget_w=2600.0, enforce=True))
    watch = Watch(rig, 2600.0)
    for _ in range(25):
        for uuid in rng.sample(rig.machine.uuids, rng.randint(0, 8)):
            rig.machine.load(uuid, rng.choice([0.0, 200.0, 500.0, 700.0]))
        if rng.random() < 0.4:
            asked = [setting(uuid, rng.choice([200.0, 450.0, 700.0])) for uuid in rig.machine.uuids]
            rig.offer(plan_of(*asked, gangs=(rig.machine.uuids[:4],), power_budget_w=rng.choice([None, 5000.0])))
        watch.run(rng.choice([0.5, 1.0, 4.0]))
    assert watch.longest_s <= 1.0


def test_it_is_kept_after_the_lease_too():
    rig = Rig(simulated(4))
    rig.offer(plan_of(*(setting(uuid, 300.0) for uuid in rig.machine.uuids), power_budget_w=1500.0, lease_s=10.0))
    load_all(rig, 700.0)
    watch = Watch(rig, 1500.0)
    watch.run(9.0)
    assert watch.run(30.0) <= 1.0
    assert NodeEventKind.LEASE_EXPIRED in rig.kinds()
    limits_w = {rig.limit_w(uuid) for uuid in rig.machine.uuids}
    assert len(limits_w) == 1
    assert 340.0 < limits_w.pop() <= 375.0


def test_a_sensor_that_shows_the_last_second_s_mean_does_not_wind_it_down():
    machine = SimulatedMachine(("h100-sxm5-80gb",) * 8, CrashPoints(), driver_version="515.105.01")
    rig = Rig(machine, local=LocalPolicy(power_budget_w=3000.0, enforce=True))
    watch = Watch(rig, 3000.0)
    load_all(rig, 700.0)
    # The mean must first rise and is looked at twice.
    assert watch.run(20.0) <= 1.5
    assert machine.true_power_w() > 2700.0


def test_the_highest_draw_goes_first_and_the_low_ones_are_not_touched_by_it():
    rig = Rig(fake(4), local=LocalPolicy(power_budget_w=1200.0, enforce=True))
    for uuid, demand_w in zip(rig.machine.uuids, (700.0, 600.0, 100.0, 100.0), strict=True):
        rig.machine.load(uuid, demand_w)
    rig.cycle(4)
    draws = [part.power_w for part in rig.machine.parts.values()]
    assert draws[2:] == [100.0, 100.0]
    assert draws[0] == draws[1]
    assert 480.0 <= draws[0] <= 500.0


def test_a_part_that_draws_more_than_its_limit_is_lowered_by_what_it_overdraws():
    class Overdrawing(FakePart):
        @property
        def power_w(self):
            return max(self.idle_w, min(self.demand_w, self.enforced_w + 30.0))

    machine = FakeMachine({f"GPU-{number}": Overdrawing() for number in range(4)}, CrashPoints())
    rig = Rig(machine, local=LocalPolicy(power_budget_w=1600.0, enforce=True))
    load_all(rig, 700.0)
    rig.cycle(40)
    assert machine.true_power_w() <= 1600.0


def test_a_budget_that_cannot_be_kept_is_reported_once_and_minima_are_respected():
    rig = Rig(fake(4), local=LocalPolicy(power_budget_w=700.0, enforce=True))
    load_all(rig, 700.0)
    rig.cycle(40)
    assert [rig.limit_w(uuid) for uuid in rig.machine.uuids] == [200.0] * 4
    told = [event for event in rig.events if event.kind is NodeEventKind.HEALTH]
    assert len(told) == 1
    assert "cannot be kept" in told[0].detail


def test_parts_that_do_not_go_down_to_their_limit_are_told_too():
    rig = Rig(simulated(8), local=LocalPolicy(power_budget_w=2000.0, enforce=True))
    load_all(rig, 700.0)
    rig.cycle(80)
    assert {rig.limit_w(uuid) for uuid in rig.machine.uuids} == {200.0}
    assert rig.machine.true_power_w() > 2000.0
    (told,) = [event.detail for event in rig.events if event.kind is NodeEventKind.HEALTH]
    assert "of 2000 W cannot be kept: 0 W cannot be lowered" in told


def test_a_plan_far_below_the_budget_does_not_slow_the_budget_down():
    rig = Rig(fake(4))
    load_all(rig, 700.0)
    rig.offer(plan_of(*(setting(uuid, 250.0) for uuid in rig.machine.uuids), power_budget_w=1500.0))
    rig.cycle()
    assert rig.machine.true_power_w() <= 1500.0
    rig.cycle(4)
    assert {rig.limit_w(uuid) for uuid in rig.machine.uuids} == {250.0}


def test_a_node_that_observes_only_reports():
    rig = Rig(fake(4), local=LocalPolicy(power_budget_w=1000.0))
    rig.offer(plan_of(setting("GPU-0", 300.0), enforce=False, power_budget_w=900.0))
    load_all(rig, 700.0)
    rig.cycle(20)
    assert all(part.writes == [] for part in rig.machine.parts.values())
    told = [event.detail for event in rig.events if event.kind is NodeEventKind.HEALTH]
    assert len(told) == 1
    assert "observe-only" in told[0]
    assert rig.guard.cycle_s == 0.25


def test_a_silent_device_counts_with_the_limit_that_it_was_seen_under():
    rig = Rig(fake(2), local=LocalPolicy(power_budget_w=1000.0, enforce=True))
    rig.machine.load("GPU-0", 600.0)
    rig.cycle(2)
    rig.machine.hang("GPU-1")  # idle, but nobody can know that it stays so
    rig.cycle(4)
    assert 270.0 <= rig.limit_w("GPU-0") <= 300.0


def test_a_device_that_somebody_holds_lower_is_theirs():
    rig = Rig(fake(2), local=LocalPolicy(power_budget_w=1000.0, enforce=True))
    load_all(rig, 700.0)
    rig.cycle(4)
    rig.machine.set_behind("GPU-0", 250.0)
    rig.cycle(10)
    assert rig.limit_w("GPU-0") == 250.0
    load_all(rig, 0.0)
    rig.cycle(200)
    assert [rig.limit_w(uuid) for uuid in rig.machine.uuids] == [250.0, 700.0]


def test_the_answer_tells_that_the_budget_holds_a_setting_down():
    rig = Rig(fake(2))
    rig.offer(plan_of(setting("GPU-0", 600.0), power_budget_w=800.0))
    load_all(rig, 700.0)
    rig.cycle(12)
    assert rig.status("GPU-0") == (ApplyStatus.APPLIED, "")
    result = next(result for result in rig.guard.applied.results)
    assert "node-budget: held at" in rig.guard._build_answer().results[0].detail
    assert result.subject == "GPU-0"


def test_the_level_depends_on_the_readings_only():
    limits = GuardLimits()
    draws = tuple(
        DeviceDraw(power_w=700.0, limit_w=700.0, low_w=200.0, high_w=700.0, is_writable=True) for _ in range(4)
    )
    first, _ = step_budget(BudgetState(), draws, 2000.0, 0, limits, is_enforced=True)
    second, _ = step_budget(first, draws, 2000.0, 250_000_000, limits, is_enforced=True)
    assert first.level_w == second.level_w == 490.0


def test_what_only_the_budget_holds_is_given_up_until_another_budget():
    def given_up(rig, uuid):
        return bool(rig.guard.state.device(uuid).suspended)

    rig = Rig(fake(1), local=LocalPolicy(power_budget_w=10_000.0))
    (uuid,) = rig.machine.uuids
    rig.machine.load(uuid, 700.0)
    rig.offer(plan_of(power_budget_w=500.0))
    rig.cycle(40, seconds=0.25)
    assert rig.limit_w(uuid) <= 500.0
    for _ in range(5):
        rig.machine.set_behind(uuid, 690.0)
        rig.cycle(8, seconds=0.25)
    assert given_up(rig, uuid)
    # The plan judged anew, or a later one with the same budget, is no reason to fight again.
    rig.guard.revalidate_plan(gpu_uuids=frozenset({uuid}))
    rig.offer(plan_of(power_budget_w=500.0))
    rig.cycle(8, seconds=0.25)
    assert given_up(rig, uuid)
    rig.offer(plan_of(power_budget_w=550.0))
    rig.cycle(40, seconds=0.25)
    assert not given_up(rig, uuid)
    assert rig.limit_w(uuid) <= 550.0


def rangeless(count=4):
    """Devices of which the first does not tell between what its limit may be."""
    parts = {f"GPU-{number}": FakePart() for number in range(count)}
    parts["GPU-0"] = FakePart(min_w=None, max_w=None)
    return FakeMachine(parts, CrashPoints())


def test_a_part_that_reports_no_range_is_reported_once_counted_and_made_up_for_by_the_others():
    rig = Rig(rangeless(), local=LocalPolicy(power_budget_w=2200.0, enforce=True))
    load_all(rig, 700.0)
    rig.cycle(40)
    assert rig.machine.true_power_w() <= 2200.0
    assert (rig.limit_w("GPU-0"), rig.limit_w("GPU-1")) == (700.0, pytest.approx(490.0, abs=10.0))
    told = [(event.gpu_uuid, event.detail) for event in rig.events if event.kind is NodeEventKind.HEALTH]
    assert [uuid for uuid, _ in told] == ["GPU-0"]
    assert "does not report its limit range" in told[0][1]
    assert rig.guard.state.budget.fixed == 1


def test_without_an_enforced_budget_nothing_is_told_of_a_part_without_a_range():
    rig = Rig(rangeless(), local=LocalPolicy(power_budget_w=5000.0))
    rig.cycle(8)
    assert rig.events == []


@pytest.fixture
def warnings(caplog):
    """What the agent's logger says, whether or not somebody keeps it from the root."""
    logger = logging.getLogger("eelgrid.agent")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def gpu(index, least_w, **changes):
    return Gpu(
        uuid=f"GPU-{index}",
        index=index,
        product="p",
        model="m",
        power_limit_min_w=least_w,
        power_limit_max_w=700.0,
        **changes,
    )


def test_a_budget_that_reaches_no_gpu_is_refused_at_the_start():
    with pytest.raises(
        BudgetNotEnforceable, match="--power-budget 900 cannot be kept on n: none of its 2 GPUs reports"
    ):
        check_budget_reach(900.0, "n", [gpu(0, None), gpu(1, None), gpu(2, 100.0, lost=True)])


def test_a_gpu_that_a_budget_does_not_reach_is_warned_of(warnings):
    with warnings.at_level(logging.WARNING, logger="eelgrid.agent"):
        check_budget_reach(900.0, "n", [gpu(0, 100.0), gpu(1, None), gpu(2, None, lost=True)])
    assert "event=power_budget_out_of_reach node=n watts=900 gpus=1 " in warnings.text


@pytest.mark.parametrize(("budget_w", "gpus"), [(None, [gpu(0, None)]), (900.0, []), (900.0, [gpu(0, 100.0)])])
def test_a_budget_that_reaches_all_or_that_nobody_asked_for_is_not_spoken_of(warnings, budget_w, gpus):
    with warnings.at_level(logging.WARNING, logger="eelgrid.agent"):
        check_budget_reach(budget_w, "n", gpus)
    assert warnings.text == ""


def test_an_agent_whose_budget_reaches_no_gpu_ends_with_one_line(tmp_path):
    fleet = tmp_path / "fleet.json"
    gpus = [{"product": "h100-pcie-80gb", "count": 2}]
    fleet.write_text(json.dumps({"nodes": [{"name": "n", "cpu_milli": 1000, "memory_bytes": 2**30, "gpus": gpus}]}))
    words = ("--controller", "127.0.0.1:1", "--simulate", str(fleet), "--power-budget", "500W")
    done = subprocess.run(
        [sys.executable, "-m", "eelgrid_agent", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    (line,) = [one for one in done.stderr.splitlines() if one.startswith("eelgrid-agent: ")]
    assert "--power-budget 500 cannot be kept on n: none of its 2 GPUs reports" in line
