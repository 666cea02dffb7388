"""The tab Now in a real Chromium: its figures, what needs attention, who uses what, and what a click there shows."""

import json

import pytest
from tests.builders.overviews import busy_overview
from tests.chromium_rig import CHROMIUM
from tests.page_rig import HEADING, newer, shown

from eelgrid_protos.messages import Overview, WaitingReason

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; apt-get install chromium")
FIGURES = "[...document.querySelectorAll('#headlines .figure')].map((one) => one.innerText.split(/\\n+/))"
ROWS = "[...document.querySelectorAll('[data-table={}] tbody tr')].map((row) => [...row.cells].map((cell) => cell.innerText))"
CONSUMERS = ROWS.format("consumers")
BUSY = f"{HEADING} === 'Needs attention (4)'"


def prepare(fleet):
    fleet.place("w-mine", "node-0001", [2, 3], namespace="research", user="alice")
    fleet.place("w-theirs", "node-0001", [4], namespace="serving")
    fleet.seen = busy_overview(fleet.now_ns(), workload_id="w-mine")
    fleet.idle = frozenset({("node-0001", 3)})


async def test_the_page_opens_with_what_to_do_first(tmp_path):
    async with shown(tmp_path, 3, share=0.0, prepare=prepare) as (fleet, _door, tab):
        await tab.until(BUSY)
        assert await tab.text("nav a[aria-current]") == "Now"
        figures = {title: notes for title, *notes in await tab.run(FIGURES)}
        assert figures == {
            "Power": ["8,312 W", "of 10.00 kW (83 %)", "90 of 96 GPUs read"],
            "Today": ["83.25 kWh", "cost 20.50 EUR", "12.50 kWh (15 %) idle, cost 3.10 EUR"],
            "Waiting": ["3", "1: gpu_count", "2: budget"],
            "Promises broken": ["1", "4 kept"],
            "GPUs failing": ["9", "1 lost", "8 on 1 lost node"],
            "GPUs idle": ["3", "of 52 held", "36.5 free"],
        }
        items = await tab.run(
            "[...document.querySelectorAll('.attention li')].map((one) => one.innerText.split(/\\n+/))"
        )
        assert [item[0] for item in items] == ["critical", "critical", "warning", "info"]
        assert items[0][1] == "node-0000 GPU 2 It does not respond; 1 workload held it."
        assert "for 14 min" in items[0]
        links = await tab.run("[...document.querySelectorAll('.attention .message a')].map((one) => one.hash)")
        assert links == ["#/gpu/node-0000/2", "#/workload/w-mine", "#/node/node-0001", "#/queue"]
        assert await tab.run(CONSUMERS) == [
            ["research", "alice", "40", "2", "6,100 W", "60.00 kWh", "15.00 EUR"],
            ["serving", "-", "12.5", "1", "940 W", "10.75 kWh", "2.25 EUR"],
        ]
        # The line of the last minutes, with the budget's.
        fleet.report()
        await tab.until("document.querySelectorAll('#headlines .spark .line, #headlines .spark .limit').length === 2")
        label = await tab.run("document.querySelector('#headlines .spark').getAttribute('aria-label')")
        assert label == "Power of the last minute, with the line of the budget"


async def test_a_quiet_cluster_says_so_and_money_without_a_price_is_a_dash(tmp_path):
    def quiet(fleet):
        fleet.seen = Overview(time_ns=fleet.now_ns())

    async with shown(tmp_path, 1, share=0.0, prepare=quiet) as (fleet, _door, tab):
        await tab.until("document.querySelector('#panel').innerText.includes('Nothing needs attention.')")
        assert "Nobody holds a GPU." in await tab.text("#panel")
        figures = {title: notes for title, *notes in await tab.run(FIGURES)}
        assert figures["Power"] == ["-", "no budget for the cluster"]
        assert figures["Today"] == ["-", "the energy ledger has not answered yet"]
        assert figures["Waiting"] == ["0", "all work has its place"]
        assert figures["Promises broken"] == ["0", "nothing is promised"]
        fleet.seen = busy_overview(fleet.now_ns(), workload_id="w-1", currency="")
        await tab.until(BUSY)
        figures = {title: notes for title, *notes in await tab.run(FIGURES)}
        assert figures["Today"] == ["83.25 kWh", "cost -", "12.50 kWh (15 %) idle, cost -"]
        assert [row[-1] for row in await tab.run(CONSUMERS)] == ["-", "-"]


async def test_a_consumer_and_an_item_show_their_gpus_on_the_map(tmp_path):
    only = "eelgrid.map.only && [...eelgrid.map.only].flatMap((is, cell) => is ? [cell] : [])"
    async with shown(tmp_path, 3, share=0.0, prepare=prepare) as (fleet, _door, tab):
        await tab.until(BUSY)
        # Anywhere on the row.
        x, y = await tab.run(
            "(() => { const cell = document.querySelector('[data-table=consumers] tbody td:nth-child(3)');"
            "cell.scrollIntoView(); const box = cell.getBoundingClientRect(); return [box.x + 5, box.y + 5] })()"
        )
        await tab.click(x, y)
        await tab.until(f"JSON.stringify({only}) === '[10,11]'")
        assert (await tab.text("#highlighted")).startswith("The map shows 2 GPUs of research, alice.")
        assert await tab.run("eelgrid.map.shade(10) >= 0 && eelgrid.map.shade(12) === -2")
        # It stays while readings and overviews come.
        await newer(fleet, tab)
        assert await tab.run(only) == [10, 11]
        pressed = "document.querySelectorAll('[aria-pressed=true]').length"
        assert await tab.run(pressed) == 1
        await tab.run("document.querySelector('.attention .pick').focus()")
        await tab.press("Enter", text="\r")
        await tab.until("eelgrid.map.chosen === 2")
        assert await tab.run(only) == list(range(8))
        assert (await tab.text("#highlighted")).startswith("The map shows node-0000 GPU 2.")
        await tab.run("document.querySelector('#highlighted button').click()")
        assert await tab.run("[eelgrid.map.only, eelgrid.map.chosen]") == [None, -1]
        assert await tab.run(pressed) == 0
        await tab.run("document.querySelector('.attention .pick').click()")
        await tab.until("eelgrid.map.chosen === 2")
        await tab.run("document.querySelector('#map').focus()")
        await tab.press("Escape")
        assert await tab.run("[eelgrid.map.only, eelgrid.map.chosen]") == [None, -1]
        assert await tab.run(pressed) == 0


async def test_a_command_is_copied_and_announced(tmp_path):
    async with shown(tmp_path, 2, share=0.0, prepare=prepare) as (_fleet, door, tab):
        await tab.until(BUSY)
        origin = f"http://127.0.0.1:{door.port}"
        await tab.call("Browser.grantPermissions", origin=origin, permissions=["clipboardReadWrite"])
        copy = "document.querySelector('.attention .copy')"
        await tab.run(f"{copy}.focus()")
        await tab.press("Enter", text="\r")
        await tab.until(f"{copy}.innerText === 'Copied'")
        assert await tab.text("#said") == "Copied: eelctl describe node-0000/2"
        assert await tab.run("navigator.clipboard.readText()") == "eelctl describe node-0000/2"
        # Over http to another machine there is no such interface: the page copies by a selection.
        await tab.run("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        await tab.run(
            "document.execCommand = (what) => { window.copied = [what, `${document.activeElement.value}`]; return true }"
        )
        await tab.run("document.querySelectorAll('.attention .copy')[1].click()")
        await tab.until("window.copied !== undefined")
        assert await tab.run("window.copied") == ["copy", "eelctl promises"]
        assert await tab.run("document.activeElement.dataset.copy") == "eelctl promises"


async def test_commands_inside_a_remedy_can_be_copied_and_nothing_else_can(tmp_path):
    sentences = {
        "No pool is the partition planner's. To help: eelctl policy set --partition POOL=on.": [
            "eelctl policy set --partition POOL=on"
        ],
        "To help: eelctl partition plan, and apply what it finds.": ["eelctl partition plan"],
        "To help: eelctl policy set --budget cluster=60000W --budget rack:r-1=9000W. 3 workloads are tried before it.": [
            "eelctl policy set --budget cluster=60000W --budget rack:r-1=9000W"
        ],
        "when the limit is raised: eelctl policy set --spend 'namespace=a gpu-hours=25 per month'.": [
            "eelctl policy set --spend 'namespace=a gpu-hours=25 per month'"
        ],
        "look at what node a holds beyond the journal, then eelctl reconcile it: there is room for the work": [],
        "bring the agents of lost nodes back, eelctl reconcile nodes that are ahead, or cancel": [],
    }
    async with shown(tmp_path, 1, share=0.0) as (_fleet, _door, tab):
        for sentence, commands in sentences.items():
            found = await tab.run(
                f"import('./command.js').then((one) => {{ const box = document.createElement('p'); box.append(...one.withCommands({json.dumps(sentence)}));"
                "return [[...box.querySelectorAll('code')].map((code) => code.textContent), box.textContent.replaceAll('Copy', '')] })"
            )
            assert found == [commands, sentence]


async def test_what_comes_between_others_takes_none_of_them_away(tmp_path):
    async with shown(tmp_path, 1, share=0.0) as (_fleet, _door, tab):
        found = await tab.run(
            "import('./dom.js').then(({el, refresh}) => { const box = el('div', {}, el('p', {}, 'a'), el('p', {}, 'b'), el('p', {}, 'c'));"
            "refresh(box, el('p', {}, 'a'), el('b', {}, 'new'), el('p', {}, 'b'), el('p', {}, 'c'));"
            "return [...box.children].map((one) => one.textContent) })"
        )
        assert found == ["a", "new", "b", "c"]


async def test_a_table_is_sorted_and_filtered_by_keys_alone(tmp_path):
    def waiting(fleet):
        for number, name in enumerate(("crane", "heron", "owl", "egret", "ibis", "tern", "gull")):
            fleet.wait(f"w-{100 + number}", gpus=1 + number % 4, name=name)

    async with shown(tmp_path, 1, share=0.0, fragment="#/queue", prepare=waiting) as (fleet, _door, tab):
        names = "[...document.querySelectorAll('[data-table=queue] tbody tr')].map((row) => row.cells[1].innerText)"
        await tab.until(f"{names}.length === 10")
        before = await tab.run(names)
        heading = "document.querySelector('[data-table=queue] th:nth-child(2)')"
        sign = f"{heading}.getAttribute('aria-sort')"
        await tab.run(f"{heading}.firstChild.focus()")
        await tab.press("Enter", text="\r")
        assert await tab.run(sign) == "ascending"
        assert await tab.run(names) == sorted(before)
        assert await tab.text("#said") == "sorted by name, ascending"
        # The heading keeps the focus, and readings that come keep the order.
        await newer(fleet, tab)
        assert await tab.run(f"document.activeElement.closest('th') === {heading}")
        await tab.press("Enter", text="\r")
        assert [await tab.run(sign), await tab.run(names)] == ["descending", sorted(before, reverse=True)]
        await tab.press("Enter", text="\r")
        assert [await tab.run(sign), await tab.run(names)] == [None, before]
        # Numbers begin with the largest.
        await tab.run("document.querySelector('[data-table=queue] th:nth-child(6) button').click()")
        amounts = await tab.run(names.replace("cells[1]", "cells[5]"))
        assert amounts == sorted(amounts, reverse=True)
        await tab.run("document.querySelector('#filter-queue').focus()")
        await tab.call("Input.insertText", text="egret")
        assert await tab.run(names) == ["egret"]
        assert "1 of 10" in await tab.text("[data-table=queue] .filter")
        await newer(fleet, tab)
        assert await tab.run("[document.activeElement.id, document.activeElement.value]") == ["filter-queue", "egret"]
        assert await tab.run(names) == ["egret"]


async def test_a_column_has_one_unit(tmp_path):
    async with shown(tmp_path, 1, share=0.0) as (_fleet, _door, tab):
        write = "import('./units.js').then((units) => {0}.map(units.{1}({0})))"
        for unit, values, written in (
            ("powerUnit", [412_300, 61, 0], ["412.3 kW", "0.1 kW", "0.0 kW"]),
            ("powerUnit", [22_300, 4], ["22.30 kW", "<0.01 kW"]),
            ("powerUnit", [950, 61.4], ["950 W", "61 W"]),
            ("powerUnit", [12e6, 4e4], ["12.00 MW", "0.04 MW"]),
            ("energyUnit", [3.6e9, 3.6e5], ["1,000.0 kWh", "0.1 kWh"]),
            ("moneyUnit('EUR')", [1234.5, 0.001, 0], ["1,234.50 EUR", "<0.01 EUR", "0.00 EUR"]),
            ("latencyUnit", [0.62, 0.005], ["620 ms", "5 ms"]),
        ):
            assert await tab.run(write.format(json.dumps(values), unit)) == written


async def test_each_colour_of_the_map_has_its_own_true_legend(tmp_path):
    async with shown(tmp_path, 3, share=0.0, fragment="#/fleet", prepare=prepare) as (_fleet, _door, tab):
        assert await tab.run("document.querySelector('#colour-by').value") == "share"

        async def choose(by):
            await tab.run(
                f"(() => {{ const f = document.querySelector('#colour-by'); f.value = {by!r}; f.dispatchEvent(new Event('change')) }})()"
            )

        shade = "eelgrid.map.colouring.shade({})"
        signs = ["MIG", "cordoned", "lost"]
        legend = "[...document.querySelectorAll('#legend .sign')].map((one) => one.innerText)"
        await choose("utilization")
        await tab.until(f"{shade.format(0)} === 32")
        await tab.until("document.querySelector('#legend').textContent.startsWith('0100 %')")
        await choose("temperature")
        await tab.until(f"{shade.format(0)} === Math.round(63 * (61 - 20) / 70)")
        assert (await tab.run("document.querySelector('#legend').textContent")).startswith("20 °C90 °C")
        await choose("idle")
        await tab.until(f"{shade.format(11)} >= 64")
        assert await tab.run(f"[9, 10, 11].map((cell) => {shade.format('cell')} - 64)") == [8, 0, 1]
        assert await tab.run(legend) == ["not held", "works", "held but idle", *signs]
        assert (await tab.run("eelgrid.map.words(11)")).endswith(", held but idle")
        await choose("user")
        await tab.until(f"{shade.format(10)} >= 64")
        assert await tab.run(legend) == ["alice", "no user", "not held", *signs]
        await choose("namespace")
        await tab.until(f"{legend}[0] === 'research'")
        assert await tab.run(legend) == ["research", "serving", "not held", *signs]
        assert await tab.run(f"[9, 10, 12].map((cell) => {shade.format('cell')} - 64)") == [8, 0, 1]
        await choose("model")
        assert await tab.run(legend) == ["H100", "A100", "L4", *signs]
        await choose("failing")
        assert await tab.run(legend) == ["no fault", "failing", *signs]


async def test_singulars_are_singular(tmp_path):
    def one(fleet):
        fleet.wait("w-only", name="only")
        fleet.seen = Overview(
            time_ns=fleet.now_ns(), workloads_waiting=1, waiting=(WaitingReason(reason="gpu_count", workloads=1),)
        )

    async with shown(tmp_path, 1, share=0.0, fragment="#/queue", prepare=one, waiting=0) as (_fleet, _door, tab):
        await tab.until(f"{HEADING} === '1 waits'")
        assert "1 waits" in await tab.text("#counts")
        assert "8 GPUs in 1 node " in await tab.text("#counts")
