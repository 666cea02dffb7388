"""Two engines on one node: seeded schedules of who asks, ends, crashes and lays out, held against a joint log.

A schedule draws two engines out of three: Slurm, which asks by the agent's socket in a prolog and gives back in an
epilog; the agent's own local engine; and the kubelet, which asks by Allocate and lists what pods have. Jobs start and end,
ask twice, lose answers and die without a word; the agent dies before and after any write to its disk, is away, and starts
anew; its journal is lost, the machine boots, slurmctld is away; the GPU is cut anew by MIG while engines go on asking
between two calls of the driver. The agent's parts are the real ones (leases and their journal's bytes, the socket's
answers, layouts, the checks of owners) over a simulated driver. Jobs have no process on their GPU, so nothing but a lease
keeps others away.

Each engine writes down what it uses; joint_log.py reads that and nothing else: no slice in two hands, none taken away from
under a job, and none leased at the end that nobody uses.
"""

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bench.fault_world import Crash, CrashPoints
from bench.joint_log import JointLog, read_joint_log
from bench.runner import Options, Progress, benchmark, report_promise
from bench.tables import write_csv
from eelgrid_agent.enforce.device_leases import KUBELET_HOLDER, DeviceLeases
from eelgrid_agent.enforce.lease_table import (
    LEASE_JOURNAL,
    LOCAL_ENGINE,
    LeaseDevice,
    LeaseEntry,
    LeaseHolder,
    LeaseRefused,
    LeaseTable,
    find_lease_device,
)
from eelgrid_agent.enforce.mig.mig_service import MigService
from eelgrid_agent.kubelet.pod_resources import PodLeases
from eelgrid_agent.node.lease_owners import OwnerAnswer, OwnerState, check_owners
from eelgrid_agent.node.lease_socket import LeaseSocket
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.spec import GpuSpec, NodeSpec
from eelgrid_agent.state_files import MemoryState, StateDamaged
from eelgrid_protos.kubelet_api import ContainerDevices
from eelgrid_protos.messages import GpuLayout, WantedInstance

SLICES = 8
STEPS = (20, 60)
_JOBS_MOST = 6
_LAYOUTS: tuple[tuple[tuple[str, int], ...], ...] = (
    (),
    (("1g.5gb", 0), ("1g.5gb", 1), ("1g.5gb", 2)),
    (("2g.10gb", 0), ("2g.10gb", 2), ("3g.20gb", 4)),
    (("3g.20gb", 0), ("3g.20gb", 4)),
    (("1g.5gb", 0), ("2g.10gb", 2), ("1g.5gb", 4), ("1g.5gb", 5)),
    (("7g.40gb", 0),),
)
_NOWHERE = Path("lease.sock")
MakeLeases = Callable[["Disk", "World"], DeviceLeases]


class Disk:
    """The journal of leases: bytes that outlive agents. A crash comes before a write or after it."""

    def __init__(self, moment: CrashPoints) -> None:
        self.moment, self.content = moment, b""

    def load(self) -> LeaseTable:
        """What was stored last."""
        try:
            return LEASE_JOURNAL.from_bytes(self.content) if self.content else LeaseTable()
        except ValueError as error:
            self.content = b""
            raise StateDamaged(str(error)) from error

    def store(self, table: LeaseTable) -> None:
        """Keeps these."""
        content = LEASE_JOURNAL.to_bytes(table)
        self.moment("before store")
        self.content = content
        self.moment("after store")


@dataclass(eq=False)
class Job:
    """What an engine runs; `devices` are those that it was given."""

    name: str
    names: tuple[str, ...]
    devices: tuple[LeaseDevice, ...] = ()
    # One that was given no devices is forgotten by its engine.
    runs: bool = False


class DriverBetween:
    """The driver, where others act between two calls that change a layout, and the truth of what is changed is written."""

    def __init__(self, node: SimulatedNode, log: JointLog) -> None:
        self._node, self._log = node, log
        self.between: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        """Everything else is the driver's."""
        return getattr(self._node, name)

    def set_mig_mode(self, uuid: str, *, enabled: bool) -> Any:
        """As the port."""
        self.between()
        self._note(uuid, 0, SLICES)
        return self._node.set_mig_mode(uuid, enabled=enabled)

    def create_gpu_instance(self, uuid: str, profile_id: int, start: int) -> int:
        """As the port."""
        self.between()
        return self._node.create_gpu_instance(uuid, profile_id, start)

    def destroy_gpu_instance(self, uuid: str, instance_id: int) -> None:
        """As the port."""
        self.between()
        self._note_instance(uuid, instance_id)
        self._node.destroy_gpu_instance(uuid, instance_id)

    def destroy_compute_instance(self, uuid: str, instance_id: int, compute_id: int) -> None:
        """As the port."""
        self.between()
        self._note_instance(uuid, instance_id)
        self._node.destroy_compute_instance(uuid, instance_id, compute_id)

    def _note_instance(self, uuid: str, instance_id: int) -> None:
        gpu = next(gpu for gpu in self._node.gpus() if gpu.uuid == uuid)
        for one in gpu.gpu_instances:
            if one.id == instance_id:
                self._note(uuid, one.start, one.start + one.size)

    def _note(self, uuid: str, first: int, past: int) -> None:
        self._log.write("change", engine="agent", job="layout", gpu=uuid, slices=[first, past])


class World:
    """One node, its agent over all its lives, and two engines."""

    def __init__(self, seed: int, make: MakeLeases | None = None) -> None:
        self.chance = random.Random(seed)
        self.log, self.moment, self.counts = JointLog(), CrashPoints(), Counter[str]()
        self.disk, self.mig_journal = Disk(self.moment), MemoryState[Any](())
        self.now_s, self.boots = 1000.0, 1
        specs = (GpuSpec(product="a100-sxm4-40gb", mig=()), GpuSpec(product="a100-sxm4-40gb"))
        node = NodeSpec(node_name="n", cpu_milli=1000, memory_bytes=2**30, gpus=specs)
        self.node = SimulatedNode(node, monotonic_ns=lambda: int(self.now_s * 1e9), seed=seed)
        self.driver = DriverBetween(self.node, self.log)
        self._make, self._is_calm = make or open_leases, False
        kinds: list[type[Engine]] = [SlurmEngine, LocalJobs, KubeletPods]
        self.engines = [kind(self) for kind in self.chance.sample(kinds, 2)]
        self.leases: DeviceLeases | None = None
        self.start_agent()

    def start_agent(self) -> None:
        """A new agent, over what the last one left on the disk; it may die at once, then there is another."""
        with self.calm():
            if self.chance.random() < 0.1:
                self.moment.arm(self.chance.randrange(3))
            with suppress(Crash):
                self._start()
            self.moment.disarm()
            if self.leases is None:
                self._start()

    def _start(self) -> None:
        self.counts["agent starts"] += 1
        self.leases = None
        leases = self._make(self.disk, self)
        leases.list_gpus = self.node.gpus
        self.layouts = MigService(
            self.driver, self.driver, self.mig_journal, boot_id=lambda: f"b{self.boots}", sleep=self.sleep,
            monotonic_s=lambda: self.now_s, wall_ns=lambda: int(self.now_s * 1e9), leases=leases,
        )  # fmt: skip
        self.leases = leases
        try:
            for engine in self.engines:
                engine.on_agent_start(leases)
            leases.finish_adoption()
        except Crash:
            self.leases = None
            raise
        self.layouts.recover()

    def sleep(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds

    def ask(self, act: Callable[[DeviceLeases], Any], *, is_lost: bool = False) -> Any:
        """What the agent answers; None if it is away, dies of it, or its answer is lost."""
        if self.leases is None:
            return None
        if not self._is_calm and self.chance.random() < 0.08:
            self.moment.arm(self.chance.randrange(4))
        try:
            answer = act(self.leases)
        except Crash:
            self.counts["agent crashes"] += 1
            self.leases = None
            return None
        self.counts["answers lost"] += is_lost
        return None if is_lost else answer

    @contextmanager
    def calm(self) -> Iterator[None]:
        """While this runs no agent dies of what it is asked."""
        before, self._is_calm = self._is_calm, True
        self.moment.disarm()
        try:
            yield
        finally:
            self._is_calm = before

    def step(self) -> None:
        """One thing happens."""
        self.now_s += self.chance.uniform(0.1, 20.0)
        drawn = self.chance.random()
        if drawn < 0.75:
            self.chance.choice(self.engines).act()
        elif drawn < 0.87:
            self.lay_out()
        elif drawn < 0.93:
            self.start_agent()
        elif drawn < 0.95:
            self.leases = None
        elif drawn < 0.96:
            self.disk.content = self.disk.content[:-1]
            self.start_agent()
        elif drawn < 0.97:
            self.boot()
        else:
            self.check_owners()

    def check_owners(self) -> None:
        """The agent asks who of the owners is gone."""
        asking = {engine.name: engine.ask_owner for engine in self.engines if isinstance(engine, SlurmEngine)}
        self.ask(lambda leases: run(check_owners(leases, asking)))
        for engine in self.engines:
            engine.on_round()

    def lay_out(self) -> None:
        """Somebody asks for another MIG layout, and engines go on between two calls of the driver."""
        parts = self.chance.choice(_LAYOUTS)
        wanted = tuple(WantedInstance(profile=profile, start=start) for profile, start in parts)
        uuid = self.chance.choice(self.node.gpus()).uuid
        layout = GpuLayout(gpu_uuid=uuid, mig_enabled=bool(parts) or self.chance.random() < 0.5, instances=wanted)

        def between() -> None:
            if self.chance.random() < 0.05:
                raise Crash("in a change of the layout")
            if self.chance.random() < 0.5:
                with self.calm():
                    self.chance.choice(self.engines).act()

        self.driver.between = between
        try:
            result = self.ask(lambda _: self.layouts.apply_layout(layout))
        finally:
            self.driver.between = lambda: None
        if result is not None:
            self.counts[f"layouts {result.status.name.lower()}"] += 1

    def boot(self) -> None:
        """The machine starts anew."""
        self.log.write("boot")
        self.boots += 1
        self.node.faults.reboot_node()
        for engine in self.engines:
            engine.on_boot()
        self.counts["boots"] += 1
        self.start_agent()

    def settle(self) -> None:
        """All is quiet: the agent runs, slurmctld answers, everybody has had time; then it is written who has a lease."""
        self.start_agent()
        with self.calm():
            for engine in self.engines:
                engine.settle()
            for _ in range(6):
                self.now_s += 20.0
                self.check_owners()
        assert self.leases is not None
        leased = [_describe(lease) for lease in self.leases.table.leases]
        self.log.write("quiet", leased=leased)


def _describe(lease: LeaseEntry) -> tuple[str, str, str, int, int]:
    first, past = _slices(lease.device)
    # The kubelet's leases are those of its pods, which it divides itself.
    owner = "pods" if lease.holder == KUBELET_HOLDER else lease.holder.owner
    return lease.holder.engine, owner, lease.device.gpu_uuid, first, past


def _slices(device: LeaseDevice) -> tuple[int, int]:
    return (0, SLICES) if device.is_whole else (device.start, device.start + device.size)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """What comes of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("nothing here waits")


def open_leases(disk: Disk, world: World) -> DeviceLeases:
    """The leases of a new agent."""
    return DeviceLeases(disk, boot_id=f"b{world.boots}", wall_ns=lambda: int(world.now_s * 1e9))


class Engine:
    """An engine of the node: its jobs, and what it writes of them."""

    name = ""

    def __init__(self, world: World) -> None:
        self.world, self.jobs, self.started = world, dict[str, Job](), 0

    def act(self) -> None:
        """Starts or ends a job."""
        jobs = [job for job in self.jobs.values() if job.runs]
        if jobs and self.world.chance.random() < 0.45:
            self.end(self.world.chance.choice(jobs))
        elif len(self.jobs) < _JOBS_MOST:
            self.begin()

    def begin(self) -> None:
        """Starts a job on devices that the engine thinks are free, as far as it knows."""
        chance, own = self.world.chance, {name for job in self.jobs.values() for name in job.names}
        names = []
        for gpu in self.world.node.gpus():
            parts = [child.uuid for one in gpu.gpu_instances for child in one.compute_instances]
            names += parts if parts and chance.random() < 0.9 else [gpu.uuid]
        free = [name for name in names if name not in own and not self.overlaps_own(name)]
        if not free:
            return
        self.started += 1
        chosen = tuple(chance.sample(free, min(len(free), chance.choice((1, 1, 2)))))
        self.launch(Job(f"{self.started}", chosen))

    def overlaps_own(self, name: str) -> bool:
        """Whether the engine itself has given a part of it."""
        device = find_lease_device(name, self.world.node.gpus())
        own = (one for job in self.jobs.values() for one in job.devices)
        return device is None or any(device.overlaps(one) for one in own)

    def launch(self, job: Job) -> None:
        """Asks for the devices and starts the job."""
        raise NotImplementedError

    def end(self, job: Job) -> None:
        """Ends a job."""
        raise NotImplementedError

    def use(self, job: Job) -> None:
        """The job begins to use its devices."""
        gpus = self.world.node.gpus()
        devices = (find_lease_device(name, gpus) for name in job.names)
        job.devices, job.runs = tuple(device for device in devices if device is not None), True
        self.jobs[job.name] = job
        self.world.counts["jobs"] += 1
        self._write("use", job)

    def leave(self, job: Job) -> None:
        """The job uses its devices no more."""
        job.runs = False
        self._write("leave", job)

    def _write(self, event: str, job: Job) -> None:
        for device in job.devices:
            self.world.log.write(
                event, engine=self.name, job=self.owner(job), gpu=device.gpu_uuid, slices=_slices(device)
            )

    def owner(self, job: Job) -> str:
        """Under which name the job's devices are leased."""
        return job.name

    def on_boot(self) -> None:
        """The machine has started anew."""
        self.jobs.clear()

    def on_agent_start(self, leases: DeviceLeases) -> None:
        """An agent has started: what of this engine it looks after is adopted."""

    def on_round(self) -> None:
        """Time for what is done at intervals."""

    def settle(self) -> None:
        """Nothing is under way any more."""


class SlurmEngine(Engine):
    """Slurm: prologs and epilogs ask by the socket; jobs that are killed have no epilog."""

    name = "slurm"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.is_away = False

    def _request(self, job: Job, operation: str, *, is_lost: bool) -> Any:
        request = {"op": operation, "engine": self.name, "owner": job.name}
        request |= {"gpus": list(job.names)} if operation == "take" else {"gpus": None}
        line = json.dumps(request).encode()
        return self.world.ask(lambda leases: LeaseSocket(_NOWHERE, leases).answer(line), is_lost=is_lost)

    def launch(self, job: Job) -> None:
        """The prolog asks, and again if there is no answer; without one the job does not start."""
        for _ in range(self.world.chance.choice((1, 2, 3))):
            answer = self._request(job, "take", is_lost=self.world.chance.random() < 0.1)
            if answer is None and self.world.chance.random() < 0.5:
                continue
            if answer is not None and answer["ok"]:
                if self.world.chance.random() < 0.1:
                    # The node's daemon dies before the job starts.
                    return
                self.use(job)
                if self.world.chance.random() < 0.1:
                    self._request(job, "take", is_lost=True)
            elif answer is not None:
                self.world.counts["refused"] += 1
            return

    def end(self, job: Job) -> None:
        """The job ends; mostly its epilog says so."""
        self.leave(job)
        del self.jobs[job.name]
        if self.world.chance.random() < 0.8:
            self._request(job, "release", is_lost=self.world.chance.random() < 0.1)

    def act(self) -> None:
        """As every engine; now and then slurmctld goes or comes back."""
        if self.world.chance.random() < 0.05:
            self.is_away = not self.is_away
        super().act()

    async def ask_owner(self, lease: LeaseEntry) -> OwnerAnswer:
        """What slurmctld says of a job."""
        if self.is_away:
            return OwnerAnswer(OwnerState.UNKNOWN, "slurmctld is away")
        job = self.jobs.get(lease.holder.owner)
        return OwnerAnswer(OwnerState.GONE if job is None else OwnerState.HOLDS)

    def on_agent_start(self, leases: DeviceLeases) -> None:
        """The folder of the prolog says what jobs have."""
        if not leases.is_complete:
            for job in self.jobs.values():
                leases.adopt(LeaseHolder(self.name, job.name), job.devices)

    def settle(self) -> None:
        """Slurmctld answers."""
        self.is_away = False


class LocalJobs(Engine):
    """The agent's own engine, as engine/local.py calls the leases: its jobs live on when the agent dies."""

    name = LOCAL_ENGINE

    def owner(self, job: Job) -> str:
        """As attempts are named."""
        return f"w-{job.name}/0/1"

    def launch(self, job: Job) -> None:
        """Takes the lease, then starts the process; an agent that is away starts nothing."""

        def start(leases: DeviceLeases) -> None:
            try:
                leases.take(LeaseHolder(self.name, self.owner(job)), job.names)
            except LeaseRefused:
                self.world.counts["refused"] += 1
            else:
                self.use(job)

        self.world.ask(start)

    def end(self, job: Job) -> None:
        """The process ends; the agent sees it, or the next one."""
        self.leave(job)
        del self.jobs[job.name]
        self.world.ask(lambda leases: leases.release(LeaseHolder(self.name, self.owner(job))))

    def on_agent_start(self, leases: DeviceLeases) -> None:
        """Adopts what runs, and ends the leases of what does not."""
        for job in self.jobs.values():
            leases.adopt(LeaseHolder(self.name, self.owner(job)), job.devices)
        leases.keep_only(self.name, {self.owner(job) for job in self.jobs.values()})


class KubeletPods(Engine):
    """The kubelet: Allocate asks, and its list says what pods have; it divides its devices among pods itself."""

    name = KUBELET_HOLDER.engine

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.listing: PodLeases | None = None

    def owner(self, job: Job) -> str:  # noqa: ARG002
        """The leases are the kubelet's, whichever pod has them."""
        return "pods"

    def launch(self, job: Job) -> None:
        """Allocate, then the pod starts; without an answer it does not."""

        def allocate(leases: DeviceLeases) -> bool:
            try:
                leases.take(KUBELET_HOLDER, job.names)
            except LeaseRefused:
                self.world.counts["refused"] += 1
                return False
            return True

        if self.world.ask(allocate, is_lost=self.world.chance.random() < 0.1):
            self.use(job)

    def end(self, job: Job) -> None:
        """The pod is gone, which the next lists say."""
        self.leave(job)
        del self.jobs[job.name]

    def on_agent_start(self, leases: DeviceLeases) -> None:
        """The kubelet is asked at once."""
        self.listing = PodLeases(leases, gpus=self.world.node.gpus, clock_s=lambda: self.world.now_s)
        self.on_round()

    def on_round(self) -> None:
        """The kubelet lists."""
        listing, pods = self.listing, self.jobs.values()
        containers = [
            ContainerDevices(
                namespace="d", pod=job.name, container="c", devices=tuple(("gpu", name) for name in job.names)
            )
            for job in pods
        ]
        if listing is not None:
            self.world.ask(lambda _: listing.on_containers(containers))


def run_schedule(seed: int, make: MakeLeases | None = None) -> tuple[World, list[str]]:
    """Plays one schedule; returns its world, and what an independent reader of its log finds broken."""
    world = World(seed, make)
    for _ in range(world.chance.randint(*STEPS)):
        world.step()
    world.settle()
    return world, list(read_joint_log(world.log.lines))


@benchmark(out="bench-out/two-engines")
@click.option("--schedules", default=10_000, help="How many schedules.")
@click.option("--seed", default=0, help="The first seed; a schedule's seed brings it again.")
def main(options: Options) -> int:
    """Plays the schedules; 1 where a promise was broken."""
    logging.getLogger("eelgrid.agent").setLevel(logging.CRITICAL)
    counts, broken = Counter[str](), list[tuple[int, str]]()
    progress = Progress("schedules")
    for number in range(options.schedules):
        world, problems = run_schedule(options.seed + number)
        counts += world.counts
        counts["log lines"] += len(world.log.lines)
        counts["pair " + " and ".join(sorted(engine.name for engine in world.engines))] += 1
        if problems:
            broken.append((options.seed + number, problems[0]))
            (options.out / f"seed-{options.seed + number}.log").write_text("\n".join(world.log.lines) + "\n", "utf-8")
        progress.show(number + 1, options.schedules)
    write_csv(options.out / "counts.csv", ("what", "count"), sorted(counts.items()))
    for what, count in sorted(counts.items()):
        print(f"{what:32} {count:>12,}")
    for seed, problem in broken[:5]:
        print(f"seed {seed}: {problem}")
    what = f"{options.schedules:,} schedules: no slice held twice, none leaked; broken: {len(broken)}"
    return report_promise(what, kept=not broken)


if __name__ == "__main__":
    raise SystemExit(main())
