"""The live page by axe-core: each view, light and dark, on a screen, a tablet and a phone."""

import pytest
from tests.builders.overviews import busy_overview
from tests.chromium_rig import CHROMIUM
from tests.page_rig import shown

from eelgrid_controller.state.events import PolicyChanged
from eelgrid_controller.state.measurement_events import PointsMeasured
from eelgrid_protos.messages import (
    BudgetScope,
    JobStatus,
    ListPromisesResponse,
    MeasuredPoint,
    Policy,
    PowerBudget,
    ServiceStatus,
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; apt-get install chromium")
# The address of each view, and what it says once it is there.
VIEWS = {
    "#/now": "Who uses what",
    "#/fleet": "Power against budget",
    "#/workloads": "workloads",
    "#/queue": "In order",
    "#/promises": "Services: 0 of 1 kept, 1 late",
    "#/power": "Budgets",
    "#/history": "Times are of",
    "#/frontier": "In bold",
    "#/gpu/node-0000/3": "Work on it",
    "#/node/node-0001": "MIG slices",
    "#/workload/w-1": "Why it stands there",
    "#/workload/w-13": "What would help",
}


def prepare(fleet):
    budgets = (
        PowerBudget(scope=BudgetScope.CLUSTER, limit_w=1.64e6),
        PowerBudget(scope=BudgetScope.RACK, name="rack-000", limit_w=5e3),
    )
    points = tuple(
        MeasuredPoint(
            profile="bert", gpu_model="H100", batch=batch, throughput_hz=90.0 * batch, power_w=300.0 + 20 * batch
        )
        for batch in (1, 2, 4)
    )
    fleet.happen(PolicyChanged(time_ns=1, policy=Policy(budgets=budgets)), PointsMeasured(time_ns=1, points=points))
    fleet.promised = ListPromisesResponse(
        services=(ServiceStatus(workload_id="w-1", name="chat", objective_s=0.5, live_s=0.62, phase="rising"),),
        jobs=(JobStatus(workload_id="w-2", name="train", power_limit_w=250.0, slowdown=0.012, saving=0.185),),
    )
    fleet.seen = busy_overview(fleet.now_ns(), workload_id="w-1")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 768, 390])
async def test_no_view_has_anything_that_axe_finds_wrong(tmp_path, width, theme):
    async with shown(tmp_path, 12, share=1.0, prepare=prepare) as (_fleet, _door, tab):
        await tab.size(width, 900)
        await tab.theme(theme)
        for fragment, said in VIEWS.items():
            await tab.run(f"location.hash = {fragment!r}")
            await tab.until(f"document.querySelector('#panel').innerText.includes({said!r})")
            assert await tab.violations() == [], fragment
            assert not await tab.run("document.documentElement.scrollWidth > innerWidth"), fragment
            # What is above another thing does not lie over it.
            over = "[...document.querySelector('main').children].filter((one) => one.scrollHeight > one.clientHeight + 1 && getComputedStyle(one).overflowY === 'visible')"
            assert await tab.run(f"{over}.map((one) => one.id)") == [], fragment
            # No table scrolls sideways, which hides its last column.
            assert await tab.run("document.querySelectorAll('#panel .scroll[tabindex] table').length") == 0, fragment
            if width == 390:
                # Cards: nothing is cut off.
                cut = "[...document.querySelectorAll('#panel td, #panel code')].filter((one) => one.scrollWidth > one.clientWidth + 1)"
                assert await tab.run(f"{cut}.map((one) => one.outerHTML)") == [], fragment
