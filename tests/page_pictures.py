"""`python -m tests.page_pictures`: pictures of the live page for the documentation, of a made-up fleet in a real Chromium.

Readings are bench.page_fleet's; the overview is computed of them as a controller computes it, with given joules.
`--every` draws each view at three widths, light and dark, to look at.
"""

import argparse
import asyncio
import random
import tempfile
from dataclasses import replace
from pathlib import Path

from bench.page_fleet import PageFleet
from PIL import Image

from eelgrid_controller.server.grpc.overview import LedgerFigures, OverviewInputs, OverviewModel
from eelgrid_controller.state.events import NodeJoined, NodeLost, PolicyChanged
from eelgrid_protos.messages import (
    BudgetScope,
    JobStatus,
    ListPromisesResponse,
    Policy,
    PowerBudget,
    ServiceStatus,
    TodayEnergy,
)
from tests.chromium_rig import browser
from tests.page_rig import LIVE

OWNERS = (("research", "alice"), ("research", "bob"), ("serving", "ci"), ("vision", "carol"), ("batch", "nightly"))
VIEWS = (
    "now",
    "fleet",
    "workloads",
    "queue",
    "promises",
    "power",
    "history",
    "frontier",
    "node/node-0005",
    "gpu/node-0005/2",
)
HOUR_NS = 3600 * 10**9


class PictureFleet(PageFleet):
    """A fleet with owners, faults, promises and budgets."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self._model = OverviewModel()
        self._owners = random.Random(7)
        self.promised = ListPromisesResponse(
            services=(
                ServiceStatus(
                    workload_id="w-3", name="chat", objective_s=0.5, live_s=0.62, phase="rising", replicas_wanted=3
                ),
                ServiceStatus(workload_id="w-9", name="embed", objective_s=0.05, live_s=0.031, phase="steady"),
            ),
            jobs=(JobStatus(workload_id="w-7", name="train", power_limit_w=250.0, slowdown=0.012, saving=0.185),),
        )

    def submit(self, workload_id, **wanted):
        """Somebody's workload."""
        namespace, user = self._owners.choices(OWNERS, (5, 3, 4, 2, 1))[0]
        super().submit(workload_id, **{"namespace": namespace, "user": user, **wanted})

    def break_parts(self) -> None:
        """Loses a GPU and a node, and sets budgets."""
        inventory = self.state.nodes["node-0005"].inventory
        gpus = tuple(replace(gpu, lost=gpu.index == 2) for gpu in inventory.gpus)
        limit_w = 1.12 * sum(
            self._power_w(record, gpu) for record in self.state.nodes.values() for gpu in record.inventory.gpus
        )
        budgets = (
            PowerBudget(scope=BudgetScope.CLUSTER, limit_w=round(limit_w, -3)),
            PowerBudget(scope=BudgetScope.RACK, name="rack-001", limit_w=42_000.0),
        )
        self.happen(
            NodeJoined(time_ns=self.now_ns(), inventory=replace(inventory, gpus=gpus)),
            NodeLost(time_ns=self.now_ns() - HOUR_NS // 3, node_name="node-0012"),
            PolicyChanged(time_ns=self.now_ns(), policy=Policy(budgets=budgets)),
        )

    async def overview(self):
        """The overview as a controller computes it, with made-up joules."""
        now_ns, energy_j = self.now_ns(), 3.6e6 * 1.4 * len(self.state.nodes) * 8
        today = TodayEnergy(
            begin_ns=now_ns - 11 * HOUR_NS,
            end_ns=now_ns,
            energy_j=energy_j,
            idle_j=0.17 * energy_j,
            cost=0.21 * energy_j / 3.6e6,
            idle_cost=0.21 * 0.17 * energy_j / 3.6e6,
            currency="EUR",
        )
        shares = zip(OWNERS, (0.31, 0.22, 0.18, 0.08, 0.04), strict=True)
        spent = {owner: (share * energy_j, 0.21 * share * energy_j / 3.6e6) for owner, share in shares}
        inputs = OverviewInputs(
            now_ns=now_ns,
            now_s=self.now_s(),
            promises=replace(self.promised, budgets=self.budgets()),
            ledger=LedgerFigures(today, spent),
        )
        return self._model.build_overview(self.state, self.telemetry, inputs)


async def _ready(fleet, tab):
    for _ in range(4):
        fleet.report()
        await asyncio.sleep(1.0)
    await tab.until("eelgrid.map.drawn.all > 0 && document.querySelectorAll('#headlines .figure').length === 6")


async def draw_pictures(out: Path, *, nodes: int, every: bool) -> None:
    """Draws the picture of the documentation, or every view."""
    fleet = PictureFleet(nodes)
    door = await fleet.open(every_s=0.5)
    fleet.fill(0.85, waiting=12)
    fleet.break_parts()
    fleet.report()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with browser(Path(folder)) as tab:
            await tab.size(1400, 860)
            await tab.open(f"http://127.0.0.1:{door.port}/")
            await tab.until(LIVE)
            await _ready(fleet, tab)
            if not every:
                picture = await tab.picture(out / "page.png")
                # Few colours: a fifth of the bytes.
                Image.open(picture).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(picture, optimize=True)
            for width, theme in [(w, t) for w in (1440, 768, 390) for t in ("light", "dark")] if every else ():
                await tab.theme(theme)
                for view in VIEWS:
                    await tab.size(width, 900)
                    await tab.run(f"location.hash = '#/{view}'")
                    await asyncio.sleep(0.8)
                    whole = await tab.run(
                        "document.querySelector('main').scrollHeight + document.querySelector('main').offsetTop"
                    )
                    await tab.size(width, max(900, min(2600, whole)) if width < 900 else 900)
                    fleet.report()
                    await asyncio.sleep(0.7)
                    await tab.picture(out / f"{view.replace('/', '-')}-{width}-{theme}.png")
    await door.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--every", action="store_true")
    given = parser.parse_args()
    asyncio.run(draw_pictures(given.out, nodes=given.nodes, every=given.every))
