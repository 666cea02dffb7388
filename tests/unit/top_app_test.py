"""The screen of eelctl top, by its keys, against a served fake."""

import asyncio
import contextlib
import time
from dataclasses import replace

import pytest
from tests.fakes.operators import a_node, serving
from tests.fakes.overviewed import WatchedOperators

from eelgrid_controller.cli.connection import CliSettings, connect_operators
from eelgrid_controller.cli.top_app import TopApp
from eelgrid_controller.cli.top_feed import ROWS_MOST, TopFeed
from eelgrid_protos import faults
from eelgrid_protos.messages import (
    AttentionItem,
    AttentionKind,
    AttentionSeverity,
    AuditEntry,
    BudgetScope,
    BudgetStatus,
    ListPromisesResponse,
    Overview,
    PowerBudget,
    PowerOverview,
    ResourceRequest,
    SubmitWorkloadRequest,
    WhoAmIResponse,
    WorkloadKind,
    WorkloadSpec,
)

LOST_GPU = AttentionItem(
    severity=AttentionSeverity.CRITICAL,
    kind=AttentionKind.LOST_GPU,
    subject="node-0/1",
    message="GPU 1 of node-0 does not respond",
    since_ns=1,
    command="eelctl describe gpu node-0/1",
)


@pytest.fixture
def fake():
    found = WatchedOperators()
    found.nodes = [a_node(f"node-{number}", power_w=10.0 * number) for number in range(12)]
    found.overview = Overview(time_ns=1, power=PowerOverview(budget_w=400.0), attention=(LOST_GPU,), attention_total=1)
    for name, fits in (("bert", True), ("etl", False)):
        found.fits = lambda _, fits=fits: fits
        spec = WorkloadSpec(name=name, kind=WorkloadKind.BATCH_JOB, user="ada", request=ResourceRequest(cpu_milli=1000))
        found._submit(SubmitWorkloadRequest(spec=spec, workload_id=f"{name}-1"))
    return found


class Screen:
    """A running screen: its text, its keys, and waits for what it shows."""

    def __init__(self, app, pilot):
        self.app, self.pilot = app, pilot

    def text(self):
        """All lines as a terminal would have them."""
        lines = self.app.screen._compositor.render_strips()
        return "\n".join("".join(part.text for part in line) for line in lines[: self.app.size.height])

    async def press(self, *keys):
        await self.pilot.press(*keys)

    async def until(self, *pieces, absent=(), within_s=20.0):
        """Waits until the screen has all of these texts, and none of the others; returns the screen."""
        deadline_s = time.monotonic() + within_s
        while True:
            text = self.text()
            if all(piece in text for piece in pieces) and not any(piece in text for piece in absent):
                return text
            assert time.monotonic() < deadline_s, f"not shown: {pieces} without {absent}\n{text}"
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(address, size=(120, 40)):
    settings = CliSettings(controller=address, timeout_s=5.0)
    with connect_operators(settings) as client:
        app = TopApp(address, lambda report: TopFeed(client, settings, 0.2, report))
        async with app.run_test(size=size) as pilot:
            yield Screen(app, pilot)
    app.feed.join()


@pytest.fixture
async def screen(fake):
    with serving(fake) as address:
        async with running(address) as found:
            yield found


def rows_of(text):
    """The first words of the lines below the titles."""
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("NODE"))
    return [line.split()[0] for line in lines[at + 1 :] if line.startswith("node-")]


async def test_the_overview_shows_power_against_its_budget_and_what_needs_attention(screen):
    text = await screen.until("300.0 W of 400.0 W", "╌ budget 400.0 W", "GPU 1 of node-0 does not respond")
    assert "needs attention: 1" in text
    assert "no TLS: every right" in text
    assert "1 placed, 1 waiting" in text


@pytest.mark.parametrize(
    ("key", "pieces"),
    [
        ("2", ("nodes: 12", "node-11", "110.0 W")),
        ("3", ("gpus: 24", "25.0 %", "40.0 W")),
        ("4", ("workloads: 2", "bert", "ada", "placed")),
        ("5", ("queue: 1", "etl", "no free GPU")),
        ("6", ("budgets & promises: 1", "cluster", "over", "110.0 W")),
        ("7", ("changes: 1", "CancelWorkload", "eve")),
    ],
)
async def test_a_number_shows_its_tab(fake, screen, key, pieces):
    fake.promised.answer = ListPromisesResponse(
        budgets=(BudgetStatus(budget=PowerBudget(scope=BudgetScope.CLUSTER, limit_w=100.0), measured_w=110.0),)
    )
    fake.audited.entries = [AuditEntry(number=1, time_ns=10**18, user="eve", call="CancelWorkload", code="OK")]
    await screen.press(key)
    await screen.until(*pieces)


async def test_tab_goes_round_all_tabs_in_both_directions(screen):
    await screen.press("tab")
    await screen.until("nodes: 12")
    await screen.press("shift+tab", "shift+tab")
    await screen.until("changes: 0", "nobody requested a change")


async def test_only_the_visible_tab_is_read(fake, screen):
    await screen.press("2")
    await screen.until("nodes: 12")
    assert "list_gpus" not in fake.calls
    assert "list_workloads" not in fake.calls
    await screen.press("3")
    await screen.until("gpus: 24")
    count = fake.calls.count("list_nodes")
    reads = fake.calls.count("list_gpus")
    while fake.calls.count("list_gpus") < reads + 2:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    assert fake.calls.count("list_nodes") == count


async def test_s_sorts_by_power_and_again_in_the_other_direction(screen):
    await screen.press("2")
    await screen.until("nodes: 12")
    await screen.press("s")
    text = await screen.until("by POWER▾")
    assert rows_of(text)[:2] == ["node-11", "node-10"]
    await screen.press("s")
    text = await screen.until("by POWER▴")
    assert rows_of(text)[:2] == ["node-0", "node-1"]
    await screen.press("greater_than_sign")
    await screen.until("by MODEL▴")
    await screen.press("less_than_sign", "less_than_sign", "less_than_sign")
    await screen.until("by STATE▴")


async def test_a_click_on_a_title_sorts_by_it(screen):
    await screen.press("2")
    await screen.until("nodes: 12")
    await screen.pilot.click("#rows", offset=(1, 0))
    text = await screen.until("by NODE▾")
    assert rows_of(text)[0] == "node-11"


async def test_a_click_on_a_tab_shows_it(screen):
    await screen.until("needs attention")
    await screen.pilot.click("#tabs", offset=(15, 0))
    await screen.until("nodes: 12")


async def test_the_filter_narrows_while_it_is_typed_and_escape_clears_it(screen):
    await screen.press("2")
    await screen.until("nodes: 12")
    await screen.press("slash", "n", "o", "d", "e", "minus", "1")
    text = await screen.until("filter 'node-1'", absent=("node-2",))
    assert rows_of(text)[:3] == ["node-1", "node-10", "node-11"]
    await screen.press("enter", "j")
    await screen.until("filter 'node-1'")
    await screen.press("escape")
    await screen.until("node-2", absent=("filter '",))


async def test_keys_that_are_letters_go_into_the_filter_while_it_is_open(screen):
    await screen.press("2")
    await screen.until("nodes: 12")
    await screen.press("slash", "q", "s")
    await screen.until("filter 'qs'")
    assert screen.app.is_running


async def test_enter_describes_a_node_and_escape_closes_the_pane(screen):
    await screen.press("2")
    await screen.until("nodes: 12")
    await screen.press("j", "enter")
    await screen.until("node node-1", "driver", "580.1", "GPUs:")
    await screen.press("escape")
    await screen.until("nodes: 12", absent=("GPUs:",))


async def test_enter_explains_a_waiting_workload(screen):
    await screen.press("5")
    await screen.until("queue: 1")
    await screen.press("enter")
    await screen.until("etl-1: pending", "free 1 T4")


async def test_an_attention_item_opens_with_its_message_and_its_gpu(fake, screen):
    await screen.until("does not respond")
    await screen.press("enter")
    await screen.until("command   eelctl describe gpu node-0/1", "GPU 1 of node node-0")


async def test_something_gone_is_said_in_the_pane(fake, screen):
    await screen.press("2")
    await screen.until("nodes: 12")
    await screen.press("space")
    await screen.until("PAUSED")
    fake.nodes = fake.nodes[1:]
    await screen.press("enter")
    await screen.until("no node is called 'node-0'")


async def test_c_copies_the_command_of_the_row(screen):
    await screen.until("does not respond")
    await screen.press("c")
    assert screen.app.clipboard == "eelctl describe gpu node-0/1"
    await screen.press("2")
    await screen.until("nodes: 12")
    await screen.press("y")
    assert screen.app.clipboard == "eelctl describe node node-0"


async def test_help_lists_every_key(screen):
    await screen.press("question_mark")
    text = await screen.until("OSC 52", "suspend")
    for key in ("1 … 7", "Tab", "Enter", "Esc", "Space", "Ctrl-C"):
        assert key in text


async def test_the_cursor_stays_on_its_row_when_rows_come_before_it(fake, screen):
    await screen.press("2")
    await screen.until("nodes: 12")
    await screen.press("j", "j")
    assert screen.app.table.cursor_key() == "node-2"
    fake.nodes = [a_node("a-0"), *fake.nodes]
    await screen.until("nodes: 13")
    assert screen.app.table.cursor_key() == "node-2"


async def test_a_pause_keeps_the_rows_until_it_ends(fake, screen):
    await screen.press("2")
    await screen.until("nodes: 12")
    await screen.press("space")
    await screen.until("PAUSED")
    fake.nodes = fake.nodes[:3]
    reads = fake.calls.count("list_nodes")
    # The watch goes on beside it, so time passes.
    await asyncio.sleep(1.0)
    assert "nodes: 12" in screen.text()
    assert fake.calls.count("list_nodes") <= reads + 1
    await screen.press("space")
    await screen.until("nodes: 3", absent=("PAUSED",))


async def test_a_lost_gpu_appears_and_goes_again(fake, screen):
    await screen.until("does not respond")
    fake.overview = replace(fake.overview, attention=(), attention_total=0)
    await screen.until("nothing needs attention", absent=("does not respond",))
    fake.overview = replace(fake.overview, attention=(LOST_GPU,), attention_total=1)
    await screen.until("does not respond", absent=("nothing needs attention",))


async def test_a_refused_tab_says_so_and_the_others_work(fake):
    async def refuse(request, context):
        raise faults.PermissionDenied("needs the role admin")

    fake.audited.list_audit_entries = refuse
    with serving(fake) as address:
        async with running(address) as screen:
            await screen.press("7")
            await screen.until("needs the role admin", "● live")
            await screen.press("2")
            await screen.until("nodes: 12")


async def test_a_controller_that_goes_away_is_followed_when_it_is_back(fake):
    with contextlib.ExitStack() as controllers:
        address = controllers.enter_context(serving(fake))
        async with running(address) as screen:
            await screen.until("● live", "does not respond")
            await screen.press("2")
            await screen.until("nodes: 12")
            await asyncio.to_thread(controllers.close)
            await screen.until("○ connection lost, reconnecting", "no controller answers", "node-11")
            fake.nodes = fake.nodes[:4]
            controllers.enter_context(serving(fake, address))
            await screen.until("● live", "nodes: 4", absent=("connection lost",), within_s=40.0)


async def test_the_role_is_shown(fake):
    fake.caller = WhoAmIResponse(subject="CN=ada", roles=("viewer",), not_after_ns=2**62)
    with serving(fake) as address:
        async with running(address) as screen:
            await screen.until("role viewer")


@pytest.mark.parametrize("size", [(40, 24), (80, 24), (80, 12), (150, 40)])
async def test_every_size_shows_the_tabs_the_rows_and_the_status(screen, size):
    await screen.until("does not respond")
    await screen.pilot.resize_terminal(*size)
    text = await screen.until("1 Overview", "needs attention: 1", "critical", "● live")
    assert max(map(len, text.splitlines())) <= size[0]
    await screen.press("2")
    await screen.until("2 Nodes", "nodes: 12", "node-0", "● live")
    await screen.press("enter")
    await screen.until("node node-0", "state")
    await screen.press("escape", "question_mark")
    await screen.until("show a tab")


async def test_columns_scroll_sideways_beside_the_first(screen):
    await screen.press("2")
    await screen.until("nodes: 12")
    await screen.pilot.resize_terminal(40, 24)
    await screen.until("STATE", absent=("AGE",))
    await screen.press("right", "right", "right", "right")
    await screen.until("node-0", "WORKLOADS", absent=("STATE",))
    await screen.press("left", "left", "left", "left")
    await screen.until("STATE")


async def test_a_fleet_of_thousands_is_read_to_a_bound_and_only_visible_rows_are_formatted(fake):
    fake.nodes = [a_node(f"n-{number:05d}", gpus=1) for number in range(ROWS_MOST + 700)]
    with serving(fake) as address:
        async with running(address, size=(100, 30)) as screen:
            await screen.press("2")
            await screen.until("nodes: 5,000", "the first 5,000 of 5,700", within_s=60.0)
            await screen.press("end")
            await screen.until("n-04999")
            begin_s = time.process_time()
            screen.app.table.refresh()
            await screen.pilot.pause()
            assert time.process_time() - begin_s < 1.0


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_q_quits_and_no_thread_is_left_reading(fake, key):
    with serving(fake) as address:
        async with running(address) as screen:
            await screen.until("● live")
            await screen.press(key)
            assert not screen.app.is_running
            assert screen.app.return_code == 0
        assert not any(thread.is_alive() for thread in screen.app.feed._threads)


async def test_names_cannot_write_to_the_terminal(fake):
    fake.overview = replace(fake.overview, attention=(replace(LOST_GPU, message="a\x1b[31mb\u202ec [red]"),))
    with serving(fake) as address:
        async with running(address) as screen:
            text = await screen.until("a\\x1b[31mb\\u202ec [red]")
            assert "\x1b" not in text
            await screen.press("enter")
            await screen.until("message")
            assert "\x1b" not in screen.text()
