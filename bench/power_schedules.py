"""Random schedules for a node with power enforcement: plans, budgets, faults and crashes, and the invariants.

`run_schedule(seed)` lives one and raises AssertionError where the agent broke
a promise:

- no write outside a part's constraints, none that the journal does not cover, none at all in a life that observes;
- a budget that can be kept is not exceeded for longer than a second, whatever the controller does;
- what somebody else changes is repaired a bounded number of times;
- a gang that has come to rest has one limit and one lock;
- after the lease, a stop or a crash and a new start each device shows exactly what it showed before, and the journal
  is empty.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

from bench.fault_world import Crash
from bench.power_world import NAME, Agent, World
from eelgrid_agent.enforce.rules import GuardLimits, LocalPolicy, RefusalRule
from eelgrid_agent.simulation.gpu import SimHealth
from eelgrid_agent.simulation.spec import GpuLoad
from eelgrid_protos.messages import AccessLevel, Assignment, GpuSetting, NodeEventKind, NodePlan

__all__ = ["Schedule", "run_schedule"]

STEP_S = 0.25
OVER_S_MOST = 1.0
PRODUCTS = ("h100-sxm5-80gb", "h100-sxm5-80gb", "a100-sxm4-80gb", "b200")
LIMITS = GuardLimits()
# (what happens, how often)
ACTS: tuple[tuple[str, int], ...] = (
    ("offer", 10), ("quiet", 6), ("load", 8), ("renew", 3), ("observe", 1), ("change_limit", 4), ("change_rest", 2), ("fight", 2),
    ("cap", 1), ("reload", 2), ("reboot", 1), ("lose", 2), ("hang", 2), ("heal", 4), ("forbid", 1), ("fill", 1),
    ("crash", 3), ("stop", 1), ("wait", 2),
)  # fmt: skip


def run_schedule(seed: int) -> None:
    """Lives the schedule of this seed; raises AssertionError, with the seed and what had happened."""
    Schedule(seed).run()


@dataclass
class Budget:
    """The budget that must be kept, and for how long it has not been."""

    local_w: float | None
    plan_w: float | None = None
    over_s: float = 0.0

    @property
    def lowest_w(self) -> float | None:
        """The one that holds."""
        return min((w for w in (self.local_w, self.plan_w) if w is not None), default=None)


@dataclass
class Schedule:
    """One life; `did` counts what happened and what was seen, so that a check that checks nothing shows."""

    seed: int
    did: Counter[str] = field(default_factory=Counter)
    past: list[str] = field(default_factory=list)

    def run(self) -> None:
        """From the first act to the end."""
        self.chance = random.Random(f"power/{self.seed}")
        self.world = World(self.chance.choice(PRODUCTS), self.chance.randint(2, 4), self.seed)
        self.epoch = 0
        self.unlocked: set[str] = set()
        self._find_changed()
        may_enforce = self.chance.random() < 0.9
        gpu = self.world.node.devices[0]
        top_w = len(self.world.uuids) * gpu.limits_w[1]
        local_w = round(top_w * self.chance.uniform(0.5, 1.0)) if self.chance.random() < 0.5 else None
        self.local = LocalPolicy(power_budget_w=local_w, enforce=may_enforce)
        self.may_enforce = may_enforce
        self.world.is_observing = not may_enforce
        try:
            self._begin()
            for _ in range(self.chance.randint(8, 30)):
                names, weights = zip(*ACTS, strict=True)
                self._act(self.chance.choices(names, weights)[0])
            self._end(self.chance.choice(("lease", "observe", "stop", "crash")))
        except AssertionError as error:
            life = "; ".join(self.past[-12:])
            raise AssertionError(f"seed {self.seed}: {error} (after {life})") from error
        if not may_enforce:
            assert self.world.writes == 0, f"seed {self.seed}: written in a life that observes"

    def _find_changed(self) -> None:
        """What an operator or a script had set before the agent came."""
        for gpu in self.world.node.devices:
            if self.chance.random() < 0.3:
                low_w, high_w = gpu.limits_w
                self.world.node.faults.limit_power(gpu.uuid, round(self.chance.uniform(low_w, high_w)))
                self.world.ground[gpu.uuid].limits_w = {gpu.limit_mw / 1000.0}
            if gpu.product.architecture == "blackwell" and self.chance.random() < 0.3:
                gpu.profiles = frozenset({2})
                self.world.ground[gpu.uuid].profiles = {2}

    def _begin(self) -> None:
        """An agent starts, and may die while it does."""
        while True:
            try:
                self.agent = Agent(self.world, self.local)
            except Crash:
                self.did["died at the start"] += 1
                self.world.crashes.disarm()
                continue
            break
        self.budget = Budget(local_w=self.local.power_budget_w if self.may_enforce else None)
        self.gangs: tuple[tuple[str, ...], ...] = ()
        self.repairs: list[tuple[int, str]] = []

    def _act(self, name: str) -> None:
        self.past.append(name)
        self.did[name] += 1
        getattr(self, f"_{name}")()
        self._steps(self.chance.randint(1, 6))

    def _steps(self, count: int, step_s: float = STEP_S) -> None:
        for _ in range(count):
            self._hold_budget(step_s)
            self.world.advance(step_s)
            try:
                self.agent.turn()
            except Crash:
                self.did["died"] += 1
                self.past.append("died")
                self._restart()
            self._heed()

    def _restart(self) -> None:
        """Another process, maybe later, maybe after something else happened, maybe one that dies too."""
        self.world.crashes.disarm()
        if self.chance.random() < 0.3:
            self._between()
        if self.chance.random() < 0.3:
            self.world.crashes.arm(self.chance.randint(0, 6))
        self._begin()
        self.world.crashes.disarm()

    def _between(self) -> None:
        match self.chance.choice(("reload", "reboot", "change", "wait")):
            case "reload":
                self._reload()
            case "reboot":
                self._reboot()
            case "change":
                self._change_limit()
            case _:
                self.world.advance(self.chance.uniform(1.0, 100.0))

    def _heed(self) -> None:
        """What the agent told since the step before."""
        for event in self.agent.events:
            self.did[event.kind.name] += 1
            if event.kind is NodeEventKind.SETTING_DRIFT and ": repair " in event.detail:
                self.repairs.append((event.time_ns, event.gpu_uuid))
                self._check_repairs(event.gpu_uuid)
        self.agent.events.clear()

    def _check_repairs(self, uuid: str) -> None:
        last_ns = self.repairs[-1][0]
        recent = [
            then for then, other in self.repairs if other == uuid and last_ns - then < LIMITS.repair_window_s * 1e9
        ]
        assert len(recent) <= LIMITS.repairs_most, f"{len(recent)} repairs of {uuid}"

    def _hold_budget(self, seconds: float) -> None:
        """True power from now until the next moment; what nobody could keep is not held against the agent."""
        budget_w = self.budget.lowest_w
        if budget_w is None or not self.world.answers or not all(map(self._is_in_hand, self.world.uuids)):
            self.budget.over_s = 0.0
            return
        self.did["budget steps"] += 1
        if self.world.power_w > budget_w:
            self.did["steps over budget"] += 1
            self.budget.over_s += seconds
            assert self.budget.over_s <= OVER_S_MOST, f"over {budget_w:g} W for {self.budget.over_s:g} s"
        else:
            self.budget.over_s = 0.0

    def _is_in_hand(self, uuid: str) -> bool:
        """Whether the agent has neither given this device up nor waits before it tries again."""
        device = self.agent.guard.state.device(uuid)
        gpu = self.world.node.get_device(uuid).identity
        given_up = device.suspended or device.problems or device.is_quarantined(self.world.now_ns)
        given_up = given_up or gpu.power_limit_min_w is None  # which limits it takes, it does not say
        barred = device.attempts and device.note is not None and device.note.rule is not RefusalRule.JOURNAL
        waits = device.is_lost or barred or device.is_restoring
        return not given_up and not waits

    # What happens

    def _offer(self, *, enforce: bool = True) -> None:
        uuids, chance = self.world.uuids, self.chance
        gpu = self.world.node.devices[0]
        low_w, high_w = gpu.limits_w
        asked = []
        for uuid in uuids:
            if chance.random() < 0.7:
                limit_w = chance.choice((None, low_w - 50.0, chance.uniform(low_w, high_w), high_w, high_w + 100.0))
                low, high = sorted(chance.sample(gpu.sm_clocks_mhz[len(gpu.sm_clocks_mhz) // 3 :], 2))
                locks = chance.random() < 0.4
                profile = chance.choice((None, 0, 5)) if gpu.product.architecture == "blackwell" else None
                asked.append(
                    GpuSetting(
                        gpu_uuid=uuid,
                        power_limit_w=limit_w,
                        sm_clock_min_mhz=low if locks else None,
                        sm_clock_max_mhz=high if locks else None,
                        power_profile=profile,
                    )
                )
        gang = tuple(sorted(chance.sample(uuids, chance.randint(2, len(uuids))))) if chance.random() < 0.6 else ()
        in_step = [one.power_limit_w for one in asked if one.gpu_uuid in gang and one.power_limit_w is not None]
        self.gang_w = max(low_w, min(in_step, default=high_w))
        budget_w = round(len(uuids) * high_w * chance.uniform(0.5, 1.0)) if chance.random() < 0.5 else None
        assignments = (Assignment(workload_id="w", replica=0, gpu_uuids=gang, gpu_milli=500),) if gang else ()
        self.epoch += 1
        self.agent.offer(
            NodePlan(
                node_name=NAME,
                epoch=self.epoch,
                lease_s=chance.choice((5.0, 20.0, 60.0)),
                enforce=enforce and self.may_enforce,
                assignments=assignments,
                gpu_settings=tuple(asked),
                power_budget_w=budget_w,
            )
        )
        self.gangs = (gang,) if gang and enforce and self.may_enforce else ()
        self.budget.plan_w = budget_w if enforce and self.may_enforce else None

    def _observe(self) -> None:
        self._offer(enforce=False)

    def _renew(self) -> None:
        self.agent.guard.renew_lease(self.world.now_ns)

    def _load(self) -> None:
        for uuid in self.chance.sample(self.world.uuids, self.chance.randint(1, len(self.world.uuids))):
            ratio = self.chance.choice((0.0, 0.3, 0.7, 1.0, 1.0))
            self.world.node.set_load(uuid, GpuLoad(utilization_ratio=ratio))

    def _one(self) -> str:
        return self.chance.choice(self.world.uuids)

    def _change_limit(self) -> None:
        """Somebody else sets a limit; who set the one before cannot be told from it."""
        uuid = self._one()
        gpu = self.world.node.get_device(uuid)
        if gpu.health is SimHealth.OK:
            low_w, high_w = gpu.limits_w
            limit_w = round(self.chance.uniform(low_w, high_w)) + 0.5
            self.world.node.faults.limit_power(uuid, min(limit_w, high_w))
            self.world.ground[uuid].limits_w.add(gpu.limit_mw / 1000.0)

    def _fight(self) -> None:
        """Somebody who sets the same limit again whenever it is put right."""
        uuid = self._one()
        gpu = self.world.node.get_device(uuid)
        low_w, high_w = gpu.limits_w
        theirs_w = round(self.chance.uniform(low_w, high_w)) + 0.25
        for _ in range(6):
            if gpu.health is SimHealth.OK:
                self.world.node.faults.limit_power(uuid, min(theirs_w, high_w))
                self.world.ground[uuid].limits_w.add(gpu.limit_mw / 1000.0)
            self._steps(5)

    def _change_rest(self) -> None:
        """Somebody else lets the clock go, or sets a profile."""
        gpu = self.world.node.get_device(self._one())
        if gpu.product.architecture == "blackwell" and self.chance.random() < 0.5:
            gpu.profiles = frozenset({self.chance.choice((1, 3))})
            self.world.ground[gpu.uuid].profiles.add(min(gpu.profiles))
        else:
            gpu.lock_clocks(None, self.world.now_ns)
            self.unlocked.add(gpu.uuid)

    def _cap(self) -> None:
        gpu = self.world.node.get_device(self._one())
        self.world.node.faults.cap_power(gpu.uuid, self.chance.choice((None, sum(gpu.limits_w) / 2.0)))

    def _reload(self) -> None:
        self.world.restart_driver(reboot=False)

    def _reboot(self) -> None:
        """The machine goes down, and the agent with it."""
        self.world.restart_driver(reboot=True)
        self._begin()

    def _lose(self) -> None:
        self.world.node.faults.lose_gpu(self._one())

    def _hang(self) -> None:
        self.world.node.faults.hang_gpu(self._one())

    def _heal(self) -> None:
        self.world.heal()

    def _forbid(self) -> None:
        self.world.node.faults.set_rights(AccessLevel.READ_ONLY)

    def _fill(self) -> None:
        self.world.is_full = True

    def _crash(self) -> None:
        """Somewhere in what it does next, if it does that much."""
        self.chance.choice((self._offer, self._offer, self._load, self._change_limit))()
        self.world.crashes.arm(self.chance.randint(0, 8))
        self._steps(4)
        if self.world.crashes.is_armed:
            self._restart()

    def _stop(self) -> None:
        self.agent.stop()
        if self.world.answers:
            self._check_ground("a stop")
        self._begin()

    def _wait(self) -> None:
        self._steps(self.chance.randint(20, 80))

    def _quiet(self) -> None:
        """Nothing happens for a while: what works in step has come to rest then."""
        self._steps(40)
        guard = self.agent.guard
        if guard.expired or guard.plan is None or not self.world.answers:
            return
        for gang in self.gangs:
            if all(map(self._is_in_hand, gang)):
                self.did["gangs at rest"] += 1
                gpus = [self.world.node.get_device(uuid) for uuid in gang]
                wished = [guard.state.device(uuid).wish.limit_w is not None for uuid in gang]
                limits_w = [gpu.limit_mw / 1000.0 for gpu in gpus]
                if any(wished):
                    assert max(limits_w) - min(limits_w) <= LIMITS.tolerance_w, f"a gang at {limits_w} W"
                    most_w = self.gang_w + LIMITS.hysteresis_w + LIMITS.tolerance_w
                    assert max(limits_w) <= most_w, f"a gang at {limits_w} W where {self.gang_w:g} W was asked"
                # Under a low limit the clock is below any lock, so that nobody can see that one is gone.
                if not self.unlocked & set(gang):
                    assert len({gpu.locked_mhz for gpu in gpus}) == 1, "a gang with several locks"

    # The end

    def _end(self, how: str) -> None:
        self.past.append(f"end by {how}")
        self.world.crashes.disarm()
        self.world.heal()
        match how:
            case "stop":
                self.agent.stop()
            case "crash":
                self._begin()
            case "lease" | "observe":
                self.budget = Budget(local_w=None)
                for uuid in self.world.uuids:
                    self.world.node.set_load(uuid, GpuLoad())
                if how == "observe":
                    self._offer(enforce=False)
                # The lease, the quiet time of a budget, a retry, and the way up by steps.
                self._steps(260, 1.0)
        self._check_ground(how)

    def _check_ground(self, how: str) -> None:
        """Every device is as it was before."""
        for gpu in self.world.node.devices:
            ground = self.world.ground[gpu.uuid]
            shown = (gpu.limit_mw / 1000.0, min(gpu.profiles, default=None), gpu.locked_mhz)
            assert ground.shows(gpu), f"after {how} {gpu.uuid} shows {shown} where it was {ground}"
        assert self.world.content == (), f"after {how} the journal holds {self.world.content}"
        self.did["put back"] += 1
