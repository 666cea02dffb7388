"""The live page under people's hands: keys, fingers, small windows, other people's names, other clocks."""

import pytest
from tests.chromium_rig import CHROMIUM
from tests.page_rig import HEADING, newer, shown

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
HOSTILE = "<img src=x onerror=alert(1)><b>bold</b>"
LONG = "a-name-without-end-" * 13
IS_TOO_WIDE = "document.documentElement.scrollWidth > innerWidth"


async def test_what_keys_chose_stays_chosen_while_readings_come(tmp_path):
    async with shown(tmp_path, 3) as (fleet, _door, tab):
        await tab.until("eelgrid.map.drawn.all > 0")
        await tab.run("document.querySelector('#map').focus()")
        for key in ("ArrowRight", "ArrowRight", "End"):
            await tab.press(key)
        last = await tab.run("eelgrid.map.chosen")
        assert await tab.run("eelgrid.model.words(eelgrid.map.chosen)") == await tab.text("#said")
        assert last == 23
        await newer(fleet, tab)
        assert await tab.run("eelgrid.map.chosen") == last
        await tab.press("PageUp")
        assert (await tab.text("#said")).startswith("node-0000 GPU 7:")
        await tab.press("Enter", text="\r")
        await tab.until(f"{HEADING} === 'node-0000 GPU 7'")
        await tab.press("Escape")
        await tab.until(f"{HEADING} === 'Fleet'")
        assert await tab.run("[eelgrid.map.chosen, document.activeElement.id]") == [-1, "map"]


async def test_a_view_keeps_its_place_while_readings_come(tmp_path):
    def prepare(fleet):
        name = "rack-00{}-of-the-second-hall-by-the-river"
        budgets = tuple(PowerBudget(scope=BudgetScope.RACK, name=name.format(n), limit_w=1e5) for n in range(3))
        fleet.happen(PolicyChanged(time_ns=1, policy=Policy(budgets=budgets)))

    async with shown(tmp_path, 3, fragment="#/power", prepare=prepare) as (fleet, _door, tab):
        await tab.size(600, 844)
        await tab.until(f"{HEADING}?.startsWith('Power: ') && document.querySelector('#panel svg') !== null")
        await newer(fleet, tab)
        # What scrolls sideways can be reached by keys.
        await tab.run("window.kept = document.querySelector('#panel table').parentNode")
        await tab.until("kept.tabIndex === 0")
        await tab.run("kept.scrollLeft = 40")
        power = await tab.run(HEADING)
        await tab.run("getSelection().selectAllChildren(document.querySelector('#panel h3'))")
        for _ in range(3):
            await newer(fleet, tab)
        await tab.until(f"{HEADING} !== {power!r}")
        assert await tab.run("[kept.isConnected, kept.scrollLeft, `${getSelection()}`]") == [True, 40, "Budgets"]
        # Another view begins at its beginning.
        await tab.run("location.hash = '#/queue'")
        await tab.until(f"{HEADING} === '3 wait'")
        assert await tab.run("[...document.querySelectorAll('#panel .scroll')].every((one) => one.scrollLeft === 0)")


async def test_who_follows_a_link_by_keys_is_at_what_it_led_to(tmp_path):
    async with shown(tmp_path, 2, fragment="#/queue") as (_fleet, _door, tab):
        await tab.until(f"{HEADING} === '3 wait'")
        await tab.run("document.querySelector('#panel a').focus()")
        await tab.press("Enter", text="\r")
        await tab.until("document.querySelector('#panel')?.innerText.includes('What would help')")
        assert await tab.run("document.activeElement.id") == "panel"


async def test_two_fingers_zoom_the_map(tmp_path):
    async with shown(tmp_path, 3, fragment="#/fleet") as (_fleet, _door, tab):
        await tab.until("eelgrid.map.drawn.all > 0")
        await tab.call("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=2)
        before = await tab.run("eelgrid.map.zoom")
        x, y = await tab.run(
            "(() => { const b = eelgrid.map.canvas.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        for kind, apart in (("touchStart", 40), ("touchMove", 60), ("touchMove", 80)):
            points = [{"x": x - apart, "y": y, "id": 1}, {"x": x + apart, "y": y, "id": 2}]
            await tab.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)
        await tab.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        assert await tab.run("eelgrid.map.zoom") == pytest.approx(2.0 * before, rel=0.2)
        assert await tab.run(HEADING) == "Fleet", "the end of a pinch is no tap"


@pytest.mark.parametrize("width", [320, 390, 1280])
async def test_names_of_others_are_text_and_push_nothing_out_of_sight(tmp_path, width):
    def prepare(fleet):
        fleet.place("w-hostile", "node-0000", [1], name=HOSTILE)
        fleet.place("w-long", "node-0000", [2], name=LONG)
        fleet.wait("w-waits", name=LONG)

    async with shown(tmp_path, 3, share=0.0, prepare=prepare) as (_fleet, _door, tab):
        await tab.size(width, 800)
        for fragment, said in (
            ("#/fleet", "Latest changes"),
            ("#/queue", "4 wait"),
            ("#/workloads", HOSTILE),
            ("#workload/w-hostile", HOSTILE),
            ("#workload/w-long", LONG),
            ("#gpu/node-0000/1", HOSTILE),
            ("#/history", HOSTILE),
            ("#node/node-0000", "GPU 7"),
            ("#/promises", "Nothing is promised"),
            ("#/power", "Budgets"),
            ("#/workload/100%", "no such workload"),
        ):
            await tab.run(f"location.hash = {fragment!r}")
            await tab.until(f"document.querySelector('#panel').innerText.includes({said!r})")
            assert not await tab.run(IS_TOO_WIDE), fragment
            assert await tab.run("document.querySelectorAll('#panel img, #panel b').length") == 0, fragment
        assert all("404" in one for one in tab.complaints), "only the address that leads nowhere"
        tab.complaints.clear()


async def test_a_node_is_found_by_its_name_and_leads_to_its_gpus(tmp_path):
    async with shown(tmp_path, 12, fragment="#/workloads") as (_fleet, _door, tab):
        await tab.until("document.querySelector('#search') !== null")
        await tab.run(
            "(() => { const f = document.querySelector('#search'); f.value = 'NODE-001'; f.dispatchEvent(new Event('input')) })()"
        )
        await tab.until("document.querySelector('#panel').innerText.includes('Nodes: node-0010, node-0011')")
        await tab.run("document.querySelector('#panel a[href=\"#/node/node-0011\"]').click()")
        await tab.until(f"{HEADING} === 'node-0011'")
        assert "rack-000" in await tab.text("#panel")
        assert await tab.run("eelgrid.map.chosen === eelgrid.model.cellOf('node-0011', 0)")
        await tab.run("document.querySelector('#panel td a').click()")
        await tab.until(f"{HEADING} === 'node-0011 GPU 0'")


async def test_promises_are_shown_with_the_late_first(tmp_path):
    def prepare(fleet):
        fleet.promised = ListPromisesResponse(
            services=(
                ServiceStatus(workload_id="calm", name="calm", objective_s=0.5, live_s=0.1, phase="steady"),
                ServiceStatus(
                    workload_id="late", name="chat", objective_s=0.5, live_s=0.62, phase="rising", replicas_wanted=3
                ),
                ServiceStatus(workload_id="mute", name="mute", objective_s=0.5),
            ),
            jobs=(
                JobStatus(
                    workload_id="j",
                    name="train",
                    power_limit_w=250.0,
                    slowdown=0.012,
                    saving=0.185,
                    reason="250 W saves most",
                    is_advice=True,
                ),
            ),
        )

    async with shown(tmp_path, 1, fragment="#/promises", prepare=prepare) as (_fleet, _door, tab):
        await tab.until(f"{HEADING} === 'Promises'")
        said = await tab.text("#panel")
        assert "Services: 1 of 3 kept, 1 late, 1 not measured" in said
        assert await tab.run(
            "[...document.querySelectorAll('#panel tbody tr td:first-child')].map((one) => one.innerText)"
        ) == [
            "chat",
            "calm",
            "mute",
            "train",
        ]
        for piece in ("620 ms", "250 W", "+1.2 %", "+18.5 %", "would: 250 W saves most"):
            assert piece in said


async def test_the_frontier_is_of_the_gpu_model_that_the_reader_chose(tmp_path):
    def prepare(fleet):
        points = tuple(
            MeasuredPoint(profile="bert", gpu_model=model, batch=batch, throughput_hz=rate * batch, power_w=watts)
            for model, rate, watts in (("H100", 90.0, 600.0), ("L4", 7.0, 60.0))
            for batch in (1, 2, 4)
        )
        fleet.happen(PointsMeasured(time_ns=1, points=points))

    async with shown(tmp_path, 1, fragment="#/frontier", prepare=prepare) as (_fleet, _door, tab):
        await tab.until("document.querySelectorAll('#panel circle').length === 3")
        assert "600 W" in await tab.text("#panel")
        await tab.run(
            "(() => { const f = document.querySelector('#gpu-model'); f.focus(); f.value = 'L4'; f.dispatchEvent(new Event('change')) })()"
        )
        await tab.until("document.querySelector('#panel').innerText.includes('60 W')")
        assert "600 W" not in await tab.text("#panel")
        assert await tab.run("[location.hash, document.activeElement.id]") == ["#/frontier/bert/L4", "gpu-model"]


async def test_days_are_those_of_the_readers_clock(tmp_path):
    async with shown(tmp_path, 1, fragment="#/history") as (_fleet, _door, tab):
        await tab.call("Emulation.setTimezoneOverride", timezoneId="Asia/Tokyo")
        # Half past eight in the morning there is the day before in UTC.
        assert (
            await tab.run("import('./dom.js').then((dom) => dom.moment(Date.UTC(2026, 0, 1, 23, 30)))")
            == "2026-01-02 08:30:00"
        )
        await tab.run("location.hash = '#/power'")
        await tab.until("document.querySelector('#panel').innerText.includes('Times are of Asia/Tokyo.')")
