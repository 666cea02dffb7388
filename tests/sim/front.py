"""Several clusters and a front under faults: the real dispatcher and real cores, over a network that one seed decides.

A cluster is a core with a node. Users submit workloads, arrays, gangs of two parts, and work that starts after other work. What the front calls goes as a message that the seed delivers, once or twice or never, now
or much later, also after the front that sent it has crashed; answers are lost as well. The front crashes at any point at
which it waits, and within a write of its records, before or after it is on disk. Clusters are cut off and come back. Users
submit and cancel; work ends.

After every event: no workload, and no gang, has been placed in two clusters, and nothing has started while what it starts
after ran. In the end, when all faults are healed, every workload is in one
cluster, or ended everywhere, and no copy is left behind anywhere.
"""

import asyncio
import contextlib
import itertools
import logging
import random
from dataclasses import dataclass, field, replace

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.job_arrays import ElementChange
from eelgrid_controller.federation.dispatch import StoredRecord, Verb
from eelgrid_controller.federation.dispatcher import Dispatcher, DispatchSettings
from eelgrid_controller.federation.ranking import RankingWeights, make_offer, rank_offers
from eelgrid_controller.federation.record_store import StoreFault, decode_state, encode_state
from eelgrid_protos.faults import DeadlineExceeded, FailedPrecondition, Fault, Unavailable
from eelgrid_protos.messages import (
    DependencyCondition,
    GangPart,
    JobArrayRequest,
    JobDeadline,
    JobDependency,
    JobSchedule,
    WorkloadPhase,
)
from tests.builders.cluster import build_core, build_node, build_request

ENDED = DependencyCondition.ENDED
_COUNTED = (
    "crashes", "lost", "doubled", "moves", "cuts", "late", "both", "direct", "arrays", "gangs", "dependents", "repinned", "held",
)  # fmt: skip
INDEXES = "0-2"
REFUSAL = "it refuses new work"


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass
class Site:
    """One cluster, with everything that its core ever placed."""

    name: str
    core: object
    chance: random.Random
    cut: bool = False
    # What a dry run does not know: a rule of the cluster that refuses new work.
    refuses: bool = False
    placed: set[str] = field(default_factory=set)
    # Ids that it was asked to mark.
    marked: set[str] = field(default_factory=set)

    def apply(self, verb, dispatch, now_ns):
        """Carries out one call as the controller does; raises Fault."""
        key = dispatch.workload_id
        if verb is Verb.SUBMIT:
            if self.refuses and self.core.state.find_workload(key) is None:
                raise FailedPrecondition(REFUSAL)
            return self.core.submit(dispatch.submission, now_ns=now_ns).result
        if verb is Verb.WITHDRAW:
            self.marked.add(key)
            return self.core.submit(dispatch.withdrawal, now_ns=now_ns).result
        if verb is Verb.LOOK:
            return self.core.workload_or_array(key)
        if key in self.core.state.arrays:
            return self._change_array(verb, key, now_ns)
        if verb is Verb.RELEASE:
            step = self.core.release(key, now_ns=now_ns)
        elif verb is Verb.HOLD:
            step = self.core.hold(key, user="front", now_ns=now_ns)
        else:
            step = self.core.cancel(key, now_ns=now_ns)
        return step.result

    def _change_array(self, verb, key, now_ns):
        """Changes elements as the controller does, in steps: its leader may end between two."""
        assert verb is not Verb.HOLD, "an array does not move"
        change = ElementChange.RELEASE if verb is Verb.RELEASE else ElementChange.CANCEL
        elements = self.core.state.arrays.list_elements(key)[::-1]
        is_cut_short = self.chance.random() < 0.2
        self.core.change_elements(change, elements[:1] if is_cut_short else elements, now_ns=now_ns)
        if is_cut_short:
            raise Unavailable("the leader has ended")
        return self.core.workload_or_array(key)

    def note_placed(self):
        """Remembers what runs; returns what is new."""
        before = set(self.placed)
        for key, workload in self.core.state.workloads.items():
            if workload.phase is WorkloadPhase.PLACED or workload.placed_ns:
                self.placed.add(key)
        return self.placed - before


class World:
    """All of it, driven by one seed."""

    def __init__(self, seed, *, clusters=3, forgetful=0.0):
        self.chance = random.Random(seed)
        self.now_ns = 1_000_000_000
        self.sites = {name: Site(name, build_core(build_node(name, gpus=2)), self.chance) for name in "abcd"[:clusters]}
        self.disk = {}
        # Messages on their way: functions that deliver one.
        self.flying = []
        self.sleeping = []
        self.front = None
        # The share of writes that are acknowledged and never reach the disk: a planted fault.
        self.forgetful = forgetful
        self.users = set()
        self.counts = dict.fromkeys(_COUNTED, 0)
        self.numbers = itertools.count()
        self.accepted, self.cancelled = set(), set()
        self.healed = False
        self.log = logging.getLogger("eelgrid.test.front")
        self.log.setLevel(logging.CRITICAL)

    # Ports of the front

    async def open(self):
        """RecordPort."""
        return [
            StoredRecord(decode_state(key, request, text), latest) for key, (request, text, latest) in self.disk.items()
        ]

    async def write(self, dispatch, latest):
        """RecordPort: it may fail, and the front may crash before or after."""
        dice = 1.0 if self.healed else self.chance.random()
        if dice < 0.02:
            raise StoreFault("full")
        if self.chance.random() < self.forgetful and dispatch.workload_id in self.disk:
            return
        await self._pause()
        if (before := self.disk.get(dispatch.workload_id)) is not None:
            chosen = decode_state(dispatch.workload_id, before[0], before[1]).chosen
            self.counts["moves"] += bool(chosen and not dispatch.chosen)
            pin = decode_state(dispatch.workload_id, before[0], before[1]).pinned_to
            self.counts["repinned"] += bool(pin and pin != dispatch.pinned_to)
        self.disk[dispatch.workload_id] = (dispatch.request, encode_state(dispatch), latest)
        await self._pause()

    async def _pause(self):
        """A point at which the front may crash."""
        done = asyncio.get_running_loop().create_future()
        self.sleeping.append(done)
        await done

    async def sleep(self, _seconds):
        """The front's sleep: as long as the seed wants."""
        await self._pause()

    def port(self, site):
        """ClusterPort of one cluster."""
        world = self

        class Port:
            async def call(self, verb, dispatch):
                return await world.send(site, verb, dispatch)

            async def ask_offer(self, request):
                await world._pause()
                if site.cut:
                    raise Unavailable("cut off")
                preview = site.core.submit(
                    replace(request, workload_id="", dry_run=True, hold=False), now_ns=world.now_ns
                ).result
                return make_offer(site.name, preview, pending=0, models={}, prices=None, now_ns=world.now_ns)

        return Port()

    async def send(self, site, verb, dispatch):
        """One call: delivered, lost or doubled, and its answer too."""
        answer = asyncio.get_running_loop().create_future()
        dice = 1.0 if self.healed else self.chance.random()

        def deliver():
            if site.cut:
                self.flying.append(deliver)
                self.counts["late"] += 1
                return
            try:
                outcome = site.apply(verb, dispatch, self.now_ns)
            except Fault as fault:
                outcome = fault
            self.check()
            if dice < 0.15 or answer.done():
                return
            answer.set_exception(outcome) if isinstance(outcome, Fault) else answer.set_result(outcome)

        if dice >= 0.1:
            self.flying.append(deliver)
        else:
            self.counts["lost"] += 1
        if 0.15 < dice < 0.4:
            self.counts["doubled"] += 1
            self.flying.append(deliver)

        def give_up():
            if not answer.done():
                answer.set_exception(DeadlineExceeded("no answer in time"))

        self.flying.append(give_up)
        return await answer

    # The life of the front

    async def begin(self):
        """Starts a front on the records that are there."""
        clock = Clock(
            now_ns=lambda: self.now_ns, monotonic_s=lambda: self.now_ns / 1e9, perf_s=lambda: self.now_ns / 1e9
        )

        def rank(spec, offers):
            return rank_offers(spec, offers, busy_w={}, weights=RankingWeights(), now_ns=self.now_ns)

        self.front = Dispatcher(
            {name: self.port(site) for name, site in self.sites.items()},
            self,
            rank=rank,
            clock=clock,
            settings=DispatchSettings(move_after_s=2.0, answer_s=5.0),
            log=self.log,
            sleep=self.sleep,
        )
        await self.front.start()

    async def crash(self):
        """Ends the front wherever it is, and starts another."""
        self.counts["crashes"] += 1
        for task in self.users:
            task.cancel()
        await self.front.stop()
        await asyncio.gather(*self.users, return_exceptions=True)
        self.users, self.sleeping = set(), []
        await self.begin()

    def submit(self):
        """A user submits, or repeats a submission."""
        if self.disk and self.chance.random() < 0.2:
            key = self.chance.choice(sorted(self.disk))
            self._submit(key, self.disk[key][0])
            return
        key, dice = f"w-x{next(self.numbers)}", self.chance.random()
        gpus = self.chance.choice((1, 2))
        if dice < 0.2:
            # Its deadline is promised, so it is never held.
            deadline = JobDeadline(end_ns=self.now_ns + 10**12)
            self._submit(key, build_request(gpus=gpus, deadline=deadline, expected_runtime_s=60.0))
            self.counts["direct"] += 1
        elif dice < 0.35:
            self.counts["arrays"] += 1
            self._submit(key, replace(build_request(), array=JobArrayRequest(indexes=INDEXES)))
        elif dice < 0.5:
            self.counts["gangs"] += 1
            gang = GangPart(name=f"gang-{key}", parts=2, parts_least=self.chance.choice((0, 1)))
            for part in range(2):
                self._submit(f"{key}-{part}", build_request(gang=gang))
        elif dice < 0.75 and self.disk:
            self.counts["dependents"] += 1
            self._submit(key, self._build_dependent(gpus))
        else:
            is_held = self.chance.random() < 0.3
            self.counts["held"] += is_held
            self._submit(key, build_request(gpus=gpus), held_by="somebody" if is_held else "")

    def _build_dependent(self, gpus):
        """Work that starts after one or two others, or an array whose elements start after those of another."""
        keys = self.chance.sample(sorted(self.disk), min(len(self.disk), self.chance.choice((1, 2))))
        is_paired = all(self.disk[key][0].array is not None for key in keys)
        after = tuple(JobDependency(workload_id=key, condition=ENDED, each=is_paired) for key in keys)
        request = build_request(gpus=1 if is_paired else gpus, schedule=JobSchedule(after=after))
        return replace(request, array=JobArrayRequest(indexes=INDEXES)) if is_paired else request

    def _submit(self, key, request, held_by=""):
        async def run():
            try:
                await self.front.submit(key, request, owner="", held_by=held_by)
            except Fault:
                return
            self.accepted.add(key)

        self._spawn(run())

    def cancel(self):
        """A user cancels something."""
        if not self.disk:
            return
        self._cancel(self.chance.choice(sorted(self.disk)))

    def _cancel(self, key):
        async def run():
            try:
                await self.front.cancel(key)
            except Fault:
                return
            self.cancelled.add(key)

        self._spawn(run())

    def release(self):
        """A user releases something, or holds it."""
        if self.disk:
            self._release(self.chance.choice(sorted(self.disk)), is_held=self.chance.random() < 0.3)

    def _release(self, key, *, is_held=False):
        async def run():
            with contextlib.suppress(Fault):
                await (self.front.hold(key, "somebody") if is_held else self.front.release(key))

        self._spawn(run())

    def _spawn(self, work):
        task = asyncio.get_running_loop().create_task(work)
        self.users.add(task)
        task.add_done_callback(self.users.discard)

    def cordon(self, site):
        """A cluster takes no work for a while, or takes some again: what waits there may go elsewhere."""
        change = site.core.uncordon_node if site.core.state.nodes[site.name].cordon else site.core.cordon_node
        change(site.name, now_ns=self.now_ns)

    def turn_refusal(self):
        """One cluster refuses new work, or none does any more."""
        chosen = self.chance.choice(list(self.sites.values()))
        for site in self.sites.values():
            site.refuses = site is chosen and not site.refuses

    def end_work(self, site):
        """A workload that runs ends, as somebody in the cluster decides."""
        running = sorted(key for key, one in site.core.state.workloads.items() if one.phase is WorkloadPhase.PLACED)
        if running:
            site.core.cancel(self.chance.choice(running), now_ns=self.now_ns)

    # Steps

    async def settle(self):
        """Lets the front run until it waits for the world."""
        for _ in range(40):
            await asyncio.sleep(0)

    async def step(self):
        """One event."""
        self.now_ns += int(self.chance.random() * 2e9)
        dice = self.chance.random()
        if dice < 0.02:
            self.submit()
        elif dice < 0.023:
            self.cancel()
        elif dice < 0.029:
            await self.crash()
        elif dice < 0.038:
            site = self.chance.choice(list(self.sites.values()))
            site.cut = not site.cut
            self.counts["cuts"] += 1
        elif dice < 0.055:
            self.cordon(self.chance.choice(list(self.sites.values())))
        elif dice < 0.062:
            self.turn_refusal()
        elif dice < 0.067:
            self.end_work(self.chance.choice(list(self.sites.values())))
        elif dice < 0.075:
            self.release()
        elif self.flying and (dice < 0.6 or not self.sleeping):
            self.flying.pop(self.chance.randrange(len(self.flying)))()
        elif self.sleeping:
            done = self.sleeping.pop(self.chance.randrange(len(self.sleeping)))
            if not done.done():
                done.set_result(None)
        await self.settle()
        self.check()
        assert not self.front.failed.done(), self.front.failed.result()

    def check(self):
        """No workload was placed in two clusters, and no cluster that was not chosen was released."""
        for site in self.sites.values():
            for key in site.note_placed():
                self._check_start(site.core.state.workloads[key])
        self._check_gangs()
        for first, second in itertools.combinations(self.sites.values(), 2):
            if both := first.placed & second.placed:
                raise Broken(f"{sorted(both)} ran in {first.name} and in {second.name}")
        held = [key for key in self.disk if sum(self._is_there(site, key) for site in self.sites.values()) > 1]
        self.counts["both"] += bool(held)

    def _check_start(self, workload):
        """What starts has no dependency that runs, or that waits in the cluster that its record names."""
        record = self.disk.get(self._find_submission(workload))
        if record is not None and decode_state(self._find_submission(workload), *record[:2]).held_by:
            raise Broken(f"{workload.workload_id} starts while it is held at the front")
        for one in () if record is None or record[0].spec.schedule is None else record[0].spec.schedule.after:
            keys = {one.workload_id} if not one.each else {f"{one.workload_id}_{workload.spec.array.index}"}
            for site in self.sites.values():
                state = site.core.state
                names = [key for parent in keys for key in state.arrays.list_elements(parent) or (parent,)]
                if any(key in state.workloads and state.workloads[key].phase is WorkloadPhase.PLACED for key in names):
                    raise Broken(f"{workload.workload_id} starts while {keys} runs in {site.name}")

    def _check_gangs(self):
        """No parts of a gang run in two clusters."""
        found = {}
        for site in self.sites.values():
            for key in site.placed:
                record = self.disk.get(key)
                if record is not None and record[0].spec.gang is not None:
                    found.setdefault(record[0].spec.gang.name, set()).add(site.name)
        if split := {name: sites for name, sites in found.items() if len(sites) > 1}:
            raise Broken(f"gangs run in several clusters: {split}")

    @staticmethod
    def _find_submission(workload):
        """The id under which a workload was submitted, that of its array for an element."""
        return workload.workload_id if workload.spec.array is None else workload.spec.array.array_id

    def _is_there(self, site, key):
        workload = site.core.state.find_workload(key)
        return workload is not None and not workload.phase.is_ended

    async def heal(self):
        """All faults end, and what is under way comes to its end."""
        self.healed = True
        for site in self.sites.values():
            site.cut = site.refuses = False
            site.core.uncordon_node(site.name, now_ns=self.now_ns)
        # 84 seeds took 136 rounds at the most.
        for _ in range(4_000):
            self.now_ns += 10**9
            if self.flying:
                self.flying.pop(0)()
            for done in self.sleeping:
                if not done.done():
                    done.set_result(None)
            self.sleeping = []
            for site in self.sites.values():
                self.end_work(site)
            self.cancel_incomplete()
            self.release_all()
            await self.settle()
            self.check()
            if not self.front.live and not self.users and not self.flying:
                break
        self.check_end()

    def release_all(self):
        """Releases what is held at the front."""
        if self.users:
            return
        for one in self.front.list_records():
            if one.dispatch.held_by and not one.dispatch.is_settled:
                self._release(one.dispatch.workload_id)

    def cancel_incomplete(self):
        """Cancels the parts of gangs that will never be complete."""
        if self.users:
            return
        gangs = {}
        for one in self.front.list_records():
            if one.dispatch.request.spec.gang is not None and not one.dispatch.is_settled:
                gangs.setdefault(one.dispatch.request.spec.gang.name, []).append(one.dispatch)
        for parts in gangs.values():
            live = [one for one in parts if not one.is_cancelled]
            if len(live) < 2 and not any(one.is_decided for one in live):
                for one in live:
                    self._cancel(one.workload_id)

    def check_end(self):
        """Everything has ended; what was accepted ran, or was cancelled, and nothing is left behind."""
        left = sorted(
            f"{site.name}/{key}" for site in self.sites.values() for key in self.disk if self._is_there(site, key)
        )
        if left:
            raise Broken(f"copies are left behind: {left}")
        if self.front.live:
            raise Broken(
                f"not settled: {[one.dispatch for one in self.front.list_records() if not one.dispatch.is_settled]}"
            )
        ran = {
            self._find_submission(site.core.state.workloads[key]) for site in self.sites.values() for key in site.placed
        }
        failed = {one.dispatch.workload_id for one in self.front.list_records() if one.dispatch.has_failed}
        if both := failed & ran:
            raise Broken(f"told to be refused, and ran: {sorted(both)}")
        if idle := self.accepted - ran - self.cancelled - self.stopped():
            raise Broken(f"accepted and never run: {sorted(idle)}")

    def stopped(self):
        """What the records say was cancelled, although its user got no answer, and what its cluster refused after all."""
        found = [one.dispatch for one in self.front.list_records()]
        failed = [one for one in found if one.has_failed]
        for one in failed:
            # Nothing fails while a cluster is left that it may go to.
            gang = one.request.spec.gang
            parts = [one] if gang is None else [part for part in found if part.request.spec.gang == gang]
            asked = {copy.cluster for part in parts for copy in part.copies if copy.problem}
            # Elements that pair with those of two arrays in two clusters can start in none.
            is_apart = not one.copies and any("runs in one cluster" in line for line in one.decision)
            if not (one.is_direct or is_apart or one.pinned_to in asked or asked == set(self.sites)):
                raise Broken(f"{one.workload_id} has failed, and only {sorted(asked)} refused it: {one.decision}")
        return {one.workload_id for one in found if one.is_cancelled or one.has_failed}


async def run(seed, steps, **parts):
    """Runs one seed; raises Broken."""
    world = World(seed, **parts)
    await world.begin()
    try:
        for _ in range(steps):
            await world.step()
        await world.heal()
    finally:
        for task in world.users:
            task.cancel()
        await world.front.stop()
    return world
