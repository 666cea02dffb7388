"""`python -m bench.kubernetes --out DIR`: Bursts, claims, takeovers and restarts on a Kubernetes control plane.

Writes DIR/summary.csv (measure,value,baseline). The baseline of a rate is kube-scheduler alone in the
same run, alternating with Eelgrid; that of a count is the required value; that of a time is its limit,
if there is one.
"""

import asyncio
import contextlib
import logging
import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping

import click

from bench.kubernetes.burst import Burst, burst
from bench.kubernetes.claims import claims_rows
from bench.kubernetes.control_plane import ControlPlane, NoControlPlane, at_hand
from bench.kubernetes.processes import ControllerProcess
from bench.kubernetes.rig import Rig
from bench.kubernetes.takeovers import takeover_rows
from bench.kubernetes.trials import Row, api_restart, gang_stolen, gang_waits, leaders_killed
from bench.kubernetes.webhook import WebhookFiles, webhook_registered
from bench.runner import Options, benchmark
from bench.tables import write_csv

_SETTLE_S = 5.0
# Ways to place pods, and the rate to reach as a share of kube-scheduler's.
_GOALS = {"gate": 0.85, "scheduler": 1.2, "admission": 1.2}


class _Run:
    def __init__(self, options: Options, plane: ControlPlane, rig: Rig) -> None:
        self.options = options
        self.plane = plane
        self.rig = rig
        self.rows: list[Row] = []
        self.nodes: list[str] = []
        self._made: list[ControllerProcess] = []

    async def close(self) -> None:
        """No controller outlives the run."""
        for one in self._made:
            await one.kill()

    def controller(
        self,
        name: str,
        *,
        lease_s: float = 15.0,
        unbound_s: float = 3.0,
        abilities: str = "",
        mode: str = "gate",
        more: tuple[str, ...] = (),
    ) -> ControllerProcess:
        options = (
            *more,
            "--unbound-after",
            str(unbound_s),
            "--kubernetes-mode",
            mode,
            *(("--kubernetes-abilities", abilities) if abilities else ()),
        )
        made = ControllerProcess(self.plane.kubeconfig, self.options.out, name, lease_s=lease_s, options=options)
        self._made.append(made)
        return made

    async def told(self, work: Awaitable[list[Row]]) -> None:
        """Rows of a part, on the screen and in the file at once."""
        for row in await work:
            print(*row, flush=True)
            self.rows.append(row)
        write_csv(self.options.out / "summary.csv", ("measure", "value", "baseline"), self.rows)

    async def bursts(self) -> list[Row]:
        found: dict[str, list[Burst]] = {mode: [] for mode in ("alone", "created", *_GOALS)}
        # Everything that is new to the cluster is over before anything is measured: new nodes, cold caches.
        await burst(self.rig, min(200, self.options.pods), self.plane.pids(), mode="alone")
        await self.rig.clear()
        await asyncio.sleep(_SETTLE_S)
        files = WebhookFiles(self.options.out)
        for turn in range(self.options.pairs):
            for mode in ("created", "alone"):
                found[mode].append(await self._burst(mode, self.plane.pids()))
            for mode in _GOALS:
                is_admitted = mode == "admission"
                side = self.controller(
                    f"burst-{mode}-{turn}",
                    unbound_s=60.0,
                    mode="scheduler" if is_admitted else mode,
                    more=files.options if is_admitted else (),
                )
                await side.start()
                await _leads(side)
                assert side.pid is not None
                pids = {**self.plane.pids(), "eelgrid-controller": side.pid}
                async with (
                    webhook_registered(self.rig, files, side.webhook) if is_admitted else contextlib.nullcontext()
                ):
                    found[mode].append(await self._burst(mode, pids))
                await side.stop()
        rows: list[Row] = [("burst_nodes", self.options.nodes, "-"), ("burst_pods", self.options.pods, "-")]
        alone, created = found["alone"], found["created"]
        rows.append(("burst_created_a_second", _median([one.rate for one in created]), "-"))
        ratios = [one.rate / other.rate for one, other in zip(created, alone, strict=True)]
        rows.append(("burst_created_rate_to_kube_scheduler_alone", _median(ratios), "-"))
        for mode, goal in _GOALS.items():
            rows += _burst_rows(mode, found[mode], alone, goal, self.options.pods)
        pinned = sum(one.admitted for one in found["admission"])
        rows.append(("burst_admission_pods_pinned_at_admission", pinned, self.options.pods * self.options.pairs))
        return rows

    async def _burst(self, mode: str, pids: Mapping[str, int]) -> Burst:
        found = await burst(self.rig, self.options.pods, pids, mode=mode, nodes=self.nodes)
        print(f"# mode={mode} {found} rate={found.rate:.1f}", flush=True)
        await self.rig.clear()
        await asyncio.sleep(1.0)
        return found

    async def claims(self) -> list[Row]:
        async def start() -> Callable[[], Awaitable[None]]:
            side = self.controller("claims", unbound_s=60.0, abilities="claims")
            await side.start()
            await _leads(side)
            return side.stop

        many, alone = self.options.claims, self.options.claims_alone
        return await claims_rows(self.rig, start, pods=many, nodes=100, alone=alone)

    async def gangs(self) -> None:
        side = self.controller("gangs")
        await side.start()
        await _leads(side)
        for is_grouped in (True, False):
            await self.told(gang_waits(self.rig, is_grouped=is_grouped))
            if self.plane.folder is not None:
                await self.told(gang_stolen(self.rig, self.plane, is_grouped=is_grouped))
        await side.stop()

    async def leaders(self) -> list[Row]:
        lease_s = self.options.lease
        return await leaders_killed(
            self.rig,
            lambda name: self.controller(name, lease_s=lease_s, unbound_s=60.0),
            times=self.options.kills,
            lease_s=lease_s,
        )

    async def takeovers(self) -> list[Row]:
        lease_s = self.options.takeover_lease
        return await takeover_rows(
            self.rig,
            lambda name: self.controller(name, lease_s=lease_s, unbound_s=30.0),
            self.options.out,
            times=self.options.takeovers,
        )

    async def restart(self) -> list[Row]:
        side = self.controller("restart", unbound_s=60.0)
        await side.start()
        await _leads(side)
        rows = await api_restart(self.rig, self.plane)
        await side.stop()
        return rows


async def _leads(side: ControllerProcess) -> None:
    async with asyncio.timeout(120.0):
        while "kubernetes=leading" not in side.text():  # noqa: ASYNC110  # a log is read, nobody tells
            await asyncio.sleep(0.1)


def _burst_rows(mode: str, ours: list[Burst], alone: list[Burst], goal: float, pods: int) -> list[Row]:
    """What one mode did beside kube-scheduler alone; the ratio's spread is that of the turns."""
    ratios = [one.rate / other.rate for one, other in zip(ours, alone, strict=True)]
    head = f"burst_{mode}"
    return [
        (f"{head}_bound_a_second", _median([one.rate for one in ours]), _median([one.rate for one in alone])),
        (f"{head}_rate_to_kube_scheduler_alone", _median(ratios), goal),
        (f"{head}_rate_to_kube_scheduler_alone_least", round(min(ratios), 3), "-"),
        (f"{head}_rate_to_kube_scheduler_alone_most", round(max(ratios), 3), "-"),
        (
            f"{head}_seconds_to_create",
            _median([one.created_s for one in ours]),
            _median([one.created_s for one in alone]),
        ),
        (
            f"{head}_seconds_from_created_to_bound",
            _median([one.late_s for one in ours]),
            _median([one.late_s for one in alone]),
        ),
        (f"{head}_pods_on_planned_nodes", sum(one.planned for one in ours), pods * len(ours)),
        (f"{head}_nodes_overbooked", sum(one.overbooked for one in ours), 0),
        *_processors(head, ours, alone),
    ]


def _processors(head: str, ours: list[Burst], alone: list[Burst]) -> list[Row]:
    """Milliseconds of processor for a pod, by process and of all."""
    rows: list[Row] = []
    for name in ours[0].cpu_ms:
        without = [one.cpu_ms[name] for one in alone if name in one.cpu_ms]
        value = _median([one.cpu_ms[name] for one in ours])
        rows.append((f"{head}_cpu_ms_a_pod_{name.replace('-', '_')}", value, _median(without) if without else 0))
    whole = [_median([sum(one.cpu_ms.values()) for one in side]) for side in (ours, alone)]
    return [*rows, (f"{head}_cpu_ms_a_pod", *whole)]


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


async def _main(options: Options, plane: ControlPlane) -> None:
    parts = set(filter(None, options.only.split(","))) or {
        "burst",
        "claims",
        "gangs",
        "leaders",
        "restart",
        "takeovers",
    }
    async with Rig(plane.kubeconfig) as rig:
        await rig.clear()
        run = _Run(options, plane, rig)
        try:
            if "claims" in parts:
                await run.told(run.claims())
            if "takeovers" in parts:
                await run.told(run.takeovers())
            if parts - {"claims", "takeovers"}:
                run.nodes = await rig.make_nodes(options.nodes)
            if "burst" in parts:
                await run.told(run.bursts())
            if "gangs" in parts:
                await run.gangs()
            if "leaders" in parts:
                await run.told(run.leaders())
            if "restart" in parts and plane.folder is not None:
                await run.told(run.restart())
        finally:
            await run.close()


@benchmark(out="bench-out/kubernetes", refused=(NoControlPlane,))
@click.option("--nodes", default=500)
@click.option("--pods", default=2000)
@click.option("--pairs", default=3, help="bursts of each kind, alternating")
@click.option("--kills", default=20, help="leaders killed")
@click.option("--lease", default=15.0, help="seconds, while leaders are killed")
@click.option("--takeovers", type=int, default=50, help="takeovers during a burst")
@click.option("--takeover-lease", default=3.0, help="lease of these takeovers in seconds")
@click.option("--only", default="", help="some of burst,claims,gangs,leaders,restart,takeovers; default all")
@click.option("--claims", default=1000, help="pods with claims")
@click.option("--claims-alone", type=int, default=80, help="pods for kube-scheduler's own search of devices")
def main(options: Options) -> int:
    """Run it; 2 without a control plane."""
    logging.basicConfig(level="ERROR")
    with at_hand() as plane:
        asyncio.run(_main(options, plane))
    return 0


if __name__ == "__main__":
    sys.exit(main())
