"""Leaders that end in the middle of a burst, and others that take over with journals that are empty, older, or the same.

Twenty nodes of eight GPUs, a burst of 150 one-GPU pods (a ReplicaSet of twenty among them), and a leader
that is killed (SIGKILL), ended (SIGTERM) or frozen (SIGSTOP, and woken when another leads) while it is
planning. The next leader has an empty journal, an older copy of the last one's, or a copy as of that moment;
it is started before with an empty journal, as a standby is, and after with the others, as a process is that
comes back. Half of the takeovers are with agents: a simulated fleet that reaches whoever holds the Lease.
Judged by checker.py from pods, nodes and bindings, all the time and at the end of each burst.
"""

import asyncio
import contextlib
import itertools
import json
import random
import shutil
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from bench.kubernetes.checker import Findings, judge
from bench.kubernetes.processes import ControllerProcess
from bench.kubernetes.rig import Rig, Seen, pod
from bench.kubernetes.trials import Row
from bench.processes import free_port
from eelgrid_controller.engines.kubernetes.api.election import record_of
from eelgrid_controller.engines.kubernetes.api.errors import ClusterError, ObjectNotFound
from eelgrid_controller.engines.kubernetes.api.port import LEASES, NODES, PODS, REPLICA_SETS
from eelgrid_controller.engines.kubernetes.model.well_known import LABEL_MANAGED

__all__ = ["takeover_rows"]

NODES_COUNT, GPUS = 20, 8
PODS_COUNT, OWNED = 150, 20
WITHIN_S = 90.0  # for all pods of a burst to be bound
_WATCH_S = 0.5  # between two looks of the checker
_HOWS = ("SIGKILL", "SIGTERM", "SIGSTOP")
_JOURNALS = ("empty", "older", "same")
_OWNER = "takeover"
_NUMBERS = itertools.count()
Start = Callable[[str], ControllerProcess]


class _Taken(NamedTuple):
    """One takeover."""

    how: str
    journal: str
    agents: bool
    bound: int
    seconds: float
    findings: Findings  # at the end
    unsafe: list[str]  # at any moment
    remade: int
    left: int  # pods without a plan when the leader ended


class _Scene:
    """Nodes, the leader of the moment, and who comes next."""

    def __init__(self, rig: Rig, start: Start, folder: Path, rng: random.Random) -> None:
        self.rig, self.start, self.folder, self.rng = rig, start, folder, rng
        self.leader: ControllerProcess | None = None
        self.older: Path | None = None

    def made(self, kind: str) -> ControllerProcess:
        """A process with a name and a journal of its own, among all that this process ever makes."""
        one = self.start(f"takeover-{next(_NUMBERS):03d}-{kind}")
        shutil.rmtree(one.data, ignore_errors=True)
        return one

    async def takeover(self, how: str, journal: str, *, agents: bool) -> _Taken:
        """A burst in which the leader ends."""
        rng, before = self.rng, self.leader
        if before is None:
            before = self.leader = self.made("first")
            await before.start()
        await self._led_by(before.name)
        after = self.made(journal)
        if journal == "empty":
            await after.start()
        is_early = rng.random() < 0.5
        if journal == "older" and is_early:
            await asyncio.to_thread(_copy, before.data, self.folder / "older")
        unsafe: list[str] = []
        watching = asyncio.create_task(self._watch(unsafe))
        making = asyncio.create_task(self._burst())
        if journal == "older" and not is_early:
            await self._planned(rng.randint(5, 40))
            await asyncio.to_thread(_copy, before.data, self.folder / "older")
        await self._planned(rng.randint(41, 120))
        began_s, left = time.monotonic(), PODS_COUNT - self._plans()
        ending = asyncio.create_task(_end(before, how))
        if how != "SIGTERM":
            await ending
        if journal != "empty":
            if how == "SIGTERM":
                await ending
            source = before.data if journal == "same" else self.folder / "older"
            await asyncio.to_thread(_copy, source, after.data)
            await after.start()
        await self._led_by(after.name)
        if how == "SIGSTOP":
            await asyncio.sleep(rng.uniform(0.0, 3.0))
            before.wake()
        await asyncio.gather(making, ending)
        await self.rig.until(lambda: len(self._bound()) >= PODS_COUNT, within_s=WITHIN_S)
        seconds = max((one.bound_s or began_s for one in self._bound()), default=began_s) - began_s
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        found, bound = await self._judged(), len(self._bound())
        remade = sum(one.name.startswith(_OWNER) for one in self.rig.seen.values()) - OWNED
        unsafe += [*found.twice, *found.beyond, *found.astray]
        await before.kill()
        self.leader = after
        await self._clear()
        return _Taken(how, journal, agents, bound, max(0.0, seconds), found, list(dict.fromkeys(unsafe)), remade, left)

    async def end(self) -> None:
        """No leader, no pods."""
        if self.leader is not None:
            await self.leader.stop()
        self.leader = None
        await self._clear()

    async def _burst(self) -> None:
        template = pod("", labels={"app": _OWNER, LABEL_MANAGED: "true"})
        del template["metadata"]["name"]
        body = {"replicas": OWNED, "selector": {"matchLabels": {"app": _OWNER}}, "template": template}
        await self.rig.cluster.create(
            REPLICA_SETS, {"metadata": {"name": _OWNER}, "spec": body}, namespace=self.rig.namespace
        )
        await self.rig.make(pod(f"t{index:03d}") for index in range(PODS_COUNT - OWNED))

    async def _clear(self) -> None:
        with contextlib.suppress(ObjectNotFound):
            await self.rig.cluster.delete(REPLICA_SETS, _OWNER, namespace=self.rig.namespace)
        await self.rig.clear()

    def _bound(self) -> list[Seen]:
        return [one for one in self.rig.alive() if one.bound_s is not None]

    async def _planned(self, count: int) -> None:
        """Until so many pods have a plan."""
        await self.rig.until(lambda: self._plans() >= count, within_s=60.0)

    def _plans(self) -> int:
        return sum(bool(one.plan) for one in self.rig.alive())

    async def _led_by(self, name: str) -> None:
        async with asyncio.timeout(120.0):
            while await holder(self.rig) != name:  # noqa: ASYNC110  # a Lease is read, nobody tells
                await asyncio.sleep(0.1)

    async def _judged(self) -> Findings:
        # Nodes first: they do not change here, and pods are to be as new as can be.
        nodes = (await self.rig.cluster.list(NODES)).items
        return judge((await self.rig.cluster.list(PODS, namespace=self.rig.namespace)).items, nodes)

    async def _watch(self, unsafe: list[str]) -> None:
        while True:
            with contextlib.suppress(ClusterError):
                found = await self._judged()
                unsafe += [*found.twice, *found.beyond, *found.astray]
            await asyncio.sleep(_WATCH_S)


async def takeover_rows(rig: Rig, start: Start, folder: Path, *, times: int, seed: int = 1) -> list[Row]:
    """So many takeovers, the first half without agents."""
    names = await rig.make_nodes(NODES_COUNT, gpus=GPUS, prefix="take-")
    rng = random.Random(seed)
    taken: list[_Taken] = []
    for agents in (False, True):
        scene = _Scene(rig, start, folder, rng)
        async with _fleet(scene, folder) if agents else contextlib.nullcontext():
            for turn in range(times // 2 if agents else times - times // 2):
                # All nine pairs in nine turns, each signal and each journal in every three.
                how, journal = _HOWS[turn % 3], _JOURNALS[(turn + turn // 3) % 3]
                one = await scene.takeover(how, journal, agents=agents)
                taken.append(one)
                _say(one)
            await scene.end()
    for name in names:
        await rig.cluster.delete(NODES, name)
    return _rows(taken)


def _say(one: _Taken) -> None:
    agents = "with agents" if one.agents else "without agents"
    print(f"# {one.how} {one.journal} {agents}, {one.left} left to plan: {one.bound} bound in ", end="")
    print(f"{one.seconds:.1f} s, {one.remade} made anew", end="")
    print("".join(f"; {text}" for text in (*one.unsafe, *one.findings.unbound)[:12]), flush=True)


def _rows(taken: list[_Taken]) -> list[Row]:
    rows: list[Row] = [
        ("takeovers", len(taken), "-"),
        ("takeovers_with_pods_left_to_plan", sum(one.left > 0 for one in taken), "-"),
        ("takeovers_pods_bound", sum(one.bound for one in taken), PODS_COUNT * len(taken)),
        ("takeovers_devices_given_twice", sum(len(one.findings.twice) for one in taken), 0),
        ("takeovers_unsafe_at_any_moment", sum(len(one.unsafe) for one in taken), 0),
        ("takeovers_nodes_planned_beyond_capacity", sum(len(one.findings.beyond) for one in taken), 0),
        ("takeovers_pods_astray", sum(len(one.findings.astray) for one in taken), 0),
        ("takeovers_pods_stuck", sum(len(one.findings.unbound) for one in taken), 0),
        ("takeovers_pods_made_anew", sum(one.remade for one in taken), 0),
        ("takeovers_slowest_seconds", round(max((one.seconds for one in taken), default=0.0), 1), WITHIN_S),
    ]
    for agents in (False, True):
        part = sorted(one.seconds for one in taken if one.agents is agents)
        if part:
            how = "with" if agents else "without"
            rows.append((f"takeovers_median_seconds_{how}_agents", round(part[len(part) // 2], 1), "-"))
    return rows


async def _end(side: ControllerProcess, how: str) -> None:
    match how:
        case "SIGKILL":
            await side.kill()
        case "SIGTERM":
            await side.stop()
        case _:
            side.freeze()


def _copy(source: Path, target: Path) -> None:
    """A copy of a data directory as of now, also while a controller writes there.

    Databases come last: the journal's mark, copied before its database, never names entries that the copy lacks.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in sorted(source.rglob("*"), key=_is_sqlite):
        to = target / path.relative_to(source)
        if path.is_dir():
            to.mkdir(parents=True, exist_ok=True)
        elif path.name.endswith(("-wal", "-shm")) or ".lock" in path.name:
            continue
        elif _is_sqlite(path):
            with contextlib.closing(sqlite3.connect(path)) as old, contextlib.closing(sqlite3.connect(to)) as new:
                old.backup(new)
        else:
            with contextlib.suppress(FileNotFoundError):
                shutil.copy2(path, to)


def _is_sqlite(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(15) == b"SQLite format 3"
    return False


async def holder(rig: Rig) -> str:
    """Who holds the Lease."""
    with contextlib.suppress(ClusterError):
        return record_of(await rig.cluster.get(LEASES, "eelgrid-controller", namespace="default")).holder
    return ""


@asynccontextmanager
async def _fleet(scene: _Scene, folder: Path) -> AsyncIterator[None]:
    """An agent for each node, in one process; it reaches the leader's address, as by a Service."""
    service = _Service(scene, folder)
    server = await asyncio.start_server(service.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    node = {
        "cpu_milli": 64_000,
        "memory_bytes": 512 << 30,
        "gpus": [{"product": "h100-sxm5-80gb", "model": "H100", "count": GPUS}],
    }
    file = folder / "fleet.json"
    file.write_text(json.dumps({"nodes": [{"name": f"take-{index:04d}", **node} for index in range(NODES_COUNT)]}))
    with (folder / "fleet.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "eelgrid_agent",
            "--controller",
            f"127.0.0.1:{port}",
            "--simulate",
            str(file),
            "--listen",
            f"127.0.0.1:{free_port()}",
            "--metrics",
            f"127.0.0.1:{free_port()}",
            stdout=log,
            stderr=log,
        )
    following = asyncio.create_task(service.follow())
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        process.terminate()
        await process.wait()
        server.close()


class _Service:
    """Connections go to whoever holds the Lease; those to another before are cut when it changes."""

    def __init__(self, scene: _Scene, folder: Path) -> None:
        self._scene, self._folder = scene, folder
        self._leader = ""
        self._open: set[asyncio.StreamWriter] = set()

    async def follow(self) -> None:
        while True:
            found = await holder(self._scene.rig)
            if found and found != self._leader:
                self._leader = found
                for writer in list(self._open):
                    writer.close()
            await asyncio.sleep(0.2)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = ""
        if self._leader:
            address = ControllerProcess("", self._folder, self._leader).address
        host, _, port = address.rpartition(":")
        try:
            there, back = await asyncio.open_connection(host, int(port or 0))
        except OSError:
            writer.close()
            return
        both = {writer, back}
        self._open |= both
        try:
            await asyncio.gather(_pumped(reader, back), _pumped(there, writer))
        finally:
            self._open -= both
            for one in both:
                one.close()


async def _pumped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(65_536):
            writer.write(piece)
            await writer.drain()
    writer.close()
