"""What the live page is told: deltas make the same picture as telling all anew, and the past is now less what came later."""

import pytest
from bench.page_fleet import PageFleet
from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_controller.server.http.live_model import (
    BUDGETS_MOST,
    NO_READING,
    POINTS_MOST,
    PROMISES_MOST,
    QUEUE_MOST,
    CellState,
    ChangeHistory,
    LiveView,
    gpu_details,
    list_objectives,
    list_points,
    read_earlier_changes,
    search_workloads,
    workload_details,
)
from eelgrid_controller.state.events import (
    GpuLost,
    NodeLost,
    PolicyChanged,
    WorkloadCancelled,
    WorkloadLimited,
    WorkloadMoved,
)
from eelgrid_controller.state.measurement_events import PointsMeasured
from eelgrid_protos.messages import (
    BudgetScope,
    ListPromisesResponse,
    MeasuredPoint,
    Placement,
    Policy,
    PowerBudget,
    ServiceStatus,
    WorkloadPhase,
)


class Watched:
    """A board over a made-up fleet, and a viewer that applies deltas as the page does."""

    def __init__(self, nodes=3, **shape):
        self.fleet = PageFleet(nodes, **shape)
        self.board = LiveView()
        self.board.sync_nodes(self.fleet.state)
        self.fleet.hub = self
        self.frames = []
        self.turn()
        self.seen = self.whole()

    def on_commit(self, committed):
        self.board.on_commit(committed.events, self.fleet.state, committed.revision)

    def whole(self):
        return self.board.full_frame(now_ns=5)

    def turn(self):
        """One frame; the viewer has taken it."""
        fleet = self.fleet
        is_new = self.board.sync_nodes(fleet.state)
        now_s, now_ns = fleet.now_s(), fleet.now_ns()
        self.board.add_power_point(
            fleet.telemetry.fresh_power(now_s=now_s, now_ns=now_ns), now_ns=self.board.frame * 10**9
        )
        for name, record in fleet.state.nodes.items():
            self.board.fleet.update_node(record, fleet.telemetry.fresh_tick(name, now_s=now_s, now_ns=now_ns))
        frame = self.board.delta_frame(fleet.state, fleet.budgets(), now_ns=5)
        if is_new or not hasattr(self, "seen"):
            self.seen = self.whole()
        else:
            applied(self.seen, frame)
        return frame


def applied(seen, frame):
    """What model.js does with a delta."""
    seen["frame"] = frame["frame"]
    for name in ("power_w", "held_milli", "state"):
        news = frame.get(name, {})
        if "all" in news:
            seen["gpus"][name] = news["all"]
        for cell, value in zip(news.get("at", ()), news.get("to", ()), strict=True):
            seen["gpus"][name][cell] = value
    seen["slices"] |= frame.get("slices", {})
    if "power" in frame and frame["power"] not in seen["power_line"]:
        seen["power_line"].append(frame["power"])
    seen["changes"] += frame.get("changes", [])
    seen["changes_from"] = frame.get("changes_from", seen["changes_from"])
    seen |= {name: frame[name] for name in ("counts", "queue", "budgets") if name in frame}


def held_after(seen, position):
    """What model.js shows of the past."""
    held = list(seen["gpus"]["held_milli"])
    for change in seen["changes"][position + 1 :]:
        for cell, milli in zip(change[5][0::2], change[5][1::2], strict=True):
            held[cell] -= milli
    return held


def cell(watched, node_name, index):
    return watched.board.fleet.cell(node_name, f"GPU-{node_name}-{index}")


def test_the_first_picture_has_every_gpu_and_no_reading_that_never_came():
    watched = Watched(2, gpus=4)
    whole = watched.whole()
    assert whole["nodes"]["name"] == ["node-0000", "node-0001"]
    assert whole["nodes"]["first"] == [0, 4]
    assert whole["nodes"]["rack"] == ["zone-0/rack-000"] * 2
    assert whole["gpus"]["power_w"] == [NO_READING] * 8
    assert [whole["models"][number] for number in whole["gpus"]["model"]] == ["H100"] * 4 + ["A100"] * 4
    assert whole["slices"] == {"4": [[0, 4, "3g.40gb", 0], [4, 2, "2g.20gb", 0], [6, 1, "1g.10gb", 0]]}
    assert whole["gpus"]["state"] == [0, 0, 0, 0, int(CellState.CUT), 0, 0, 0]
    assert whole["counts"]["nodes"] == 2


def test_power_that_grew_old_is_no_reading():
    watched = Watched(1)
    watched.fleet.report()
    watched.turn()
    assert min(watched.seen["gpus"]["power_w"]) > 0
    watched.fleet.telemetry.fresh_s = -1.0
    watched.turn()
    assert watched.seen["gpus"]["power_w"] == [NO_READING] * 8


def test_a_quiet_fleet_is_reported_in_a_few_words():
    watched = Watched(3)
    watched.fleet.report()
    watched.turn()
    frame = watched.turn()
    assert set(frame) == {"frame", "at_ms", "power"}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["place", "wait", "end", "move", "lose", "node", "report", "turn"]),
            st.integers(0, 5),
            st.integers(0, 7),
        ),
        max_size=25,
    )
)
def test_deltas_come_to_the_whole_and_the_past_to_what_was(steps):
    watched, held = Watched(4), {}
    fleet = watched.fleet
    for number, (step, node, index) in enumerate(steps):
        name, key = f"node-{node % 4:04d}", f"w-{number + 1}"
        record = fleet.state.nodes[name]
        uuid = f"GPU-{name}-{index}"
        is_whole = uuid not in record.lost_gpus and not record.inventory.gpus[index].mig_enabled
        is_free = record.is_ready and is_whole and not record.gpu_milli.get(uuid)
        live = [one for one in fleet.state.workloads.values() if one.phase is WorkloadPhase.PLACED]
        match step:
            case "place" if is_free:
                fleet.place(key, name, [index], milli=500)
            case "wait":
                fleet.wait(key)
            case "end" if live:
                fleet.happen(WorkloadCancelled(time_ns=number, workload_id=live[0].workload_id))
            case "move" if live and is_free:
                there = Placement(replica=0, node_name=name, gpu_uuids=(uuid,), gpu_indexes=(index,))
                fleet.happen(WorkloadMoved(time_ns=1, workload_id=live[0].workload_id, placements=(there,)))
            case "lose" if uuid not in record.lost_gpus:
                fleet.happen(GpuLost(time_ns=number, node_name=name, gpu_uuid=uuid))
            case "node":
                fleet.happen(NodeLost(time_ns=number, node_name=name))
            case "report":
                fleet.report(part=0.5)
            case _:
                watched.turn()
        held[watched.board.history.number] = [
            one.gpu_milli.get(gpu.uuid, 0) for one in fleet.state.nodes.values() for gpu in one.inventory.gpus
        ]
    watched.turn()
    assert watched.seen == watched.whole()
    for position, change in enumerate(watched.seen["changes"]):
        if change[0] in held:
            assert held_after(watched.seen, position) == held[change[0]]
    # What the journal tells of before any row is what the viewer saw then.
    whole, has_more = read_earlier_changes(fleet.read_history(), 10**9)
    assert not has_more
    assert [row for row in watched.board.change_rows(whole) if row[2] != "node joined"] == watched.seen["changes"]


def test_the_journal_goes_on_where_the_list_of_this_run_begins():
    watched = Watched(2)
    fleet = watched.fleet
    for number in range(6):
        fleet.place(f"w-{number}", "node-0000", [number])
    fleet.state = fleet.state.copy()  # as after a restart
    watched.turn()
    assert watched.seen["changes"] == []
    begun = watched.seen["changes_from"]
    assert begun == fleet.state.revision + 1
    fleet.happen(WorkloadCancelled(time_ns=9, workload_id="w-3"))
    watched.turn()
    found, has_more = read_earlier_changes(fleet.read_history(), begun, most=4)
    assert has_more
    assert [(one.kind, one.workload_id) for one in found] == [("placed", f"w-{number}") for number in (2, 3, 4, 5)]
    watched.seen["changes"][:0] = watched.board.change_rows(found)
    assert [sum(held_after(watched.seen, position)) for position in range(5)] == [3000, 4000, 5000, 6000, 5000]
    oldest, has_more = read_earlier_changes(fleet.read_history(), found[0].number)
    assert not has_more
    assert [one.workload_id for one in oldest if one.workload_id] == ["w-0", "w-1"]


def test_rows_of_one_commit_are_forgotten_together():
    fleet = PageFleet(1)
    history = ChangeHistory(most=3)
    history.reset_history({}, 0)
    for number in range(2):
        fleet.place(f"w-{number}", "node-0000", [number])
    limits = [WorkloadLimited(time_ns=1, workload_id=f"w-{number}", power_limit_w=300.0) for number in range(2)]
    history.on_commit(limits, fleet.state.workloads, 12)
    history.on_commit(limits, fleet.state.workloads, 14)
    assert [(one.number, one.commit) for one in history.changes] == [(13, 14), (14, 14)]
    assert history.oldest == 13


def test_a_new_node_gives_cells_again_and_keeps_what_was_read():
    watched = Watched(2)
    watched.fleet.report()
    watched.turn()
    before = watched.seen["gpus"]["power_w"]
    from bench.page_fleet import inventory

    from eelgrid_controller.state.events import NodeJoined

    era = watched.board.fleet.era
    watched.fleet.happen(NodeJoined(time_ns=1, inventory=inventory(7)))
    watched.turn()
    assert watched.board.fleet.era == era + 1
    assert watched.seen["gpus"]["power_w"][:16] == before
    assert watched.seen["gpus"]["power_w"][16:] == [NO_READING] * 8


def test_the_history_is_bounded_in_rows_and_in_differences():
    fleet = PageFleet(1)
    few, small = ChangeHistory(most=3), ChangeHistory(differences_most=4)
    for history in (few, small):
        history.reset_history({}, 0)
    for number in range(8):
        fleet.place(f"w-{number}", "node-0000", [number])
        event = WorkloadLimited(time_ns=1, workload_id=f"w-{number}", power_limit_w=300.0)
        for history in (few, small):
            history.on_commit([event], fleet.state.workloads, number + 1)
    assert [change.number for change in few.changes] == [6, 7, 8]
    assert few.oldest == 6
    assert few.is_cut
    assert few.changes[-1].words == "train: to 300 W a GPU"
    assert sum(len(change.milli) for change in small.changes) <= 4


def test_the_queue_and_the_budgets_are_cut_and_counted():
    watched = Watched(3)
    for number in range(QUEUE_MOST + 5):
        watched.fleet.wait(f"w-{number + 1}")
    racks = tuple(PowerBudget(scope=BudgetScope.RACK, name=f"rack-{n:03d}", limit_w=1e4 + n) for n in range(80))
    cluster = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=5e4)
    watched.fleet.happen(PolicyChanged(time_ns=1, policy=Policy(budgets=(*racks, cluster))))
    watched.fleet.report()
    watched.turn()
    queue, budgets = watched.seen["queue"], watched.seen["budgets"]
    assert len(queue["rows"]) == QUEUE_MOST
    assert queue["rows"][0][0] == "w-1"
    assert queue["reasons"] == [["gpu_count: no node has enough whole GPUs free", QUEUE_MOST + 5]]
    assert len(budgets) == BUDGETS_MOST
    fleet = watched.fleet
    total_w = round(fleet.telemetry.fresh_power(now_s=fleet.now_s(), now_ns=fleet.now_ns()).power_w)
    assert budgets[0] == ["cluster", 5e4, total_w, 24, 24, 0]
    assert budgets[1] == ["rack/rack-000", 1e4, total_w, 24, 24, 0]


def test_a_state_that_came_back_from_the_journal_begins_the_history_again():
    watched = Watched(2)
    watched.fleet.place("w-1", "node-0000", [0])
    watched.turn()
    assert watched.seen["changes"]
    watched.fleet.state = watched.fleet.state.copy()
    watched.turn()
    assert watched.seen["changes"] == []
    assert watched.seen["gpus"]["held_milli"][0] == 1000
    watched.fleet.happen(WorkloadCancelled(time_ns=9, workload_id="w-1"))
    watched.turn()
    assert watched.seen["changes"][-1][2:] == ["ended", "w-1", "train", [0, -1000]]


def test_answers_name_what_a_viewer_opens():
    watched = Watched(2)
    fleet = watched.fleet
    fleet.place("w-1", "node-0000", [0, 3], name="llm")
    fleet.wait("w-2", name="big")
    fleet.report()
    watched.turn()
    record = fleet.state.nodes["node-0000"]
    gpu = record.inventory.gpus[3]
    readings = fleet.telemetry.gpu("node-0000", gpu.uuid, now_s=fleet.now_s(), now_ns=fleet.now_ns())
    answer = gpu_details(fleet.state, record, gpu, readings, 0.5)
    assert answer["holders"] == [{"workload_id": "w-1", "name": "llm", "replica": 0, "milli": 1000, "slice": ""}]
    assert answer["power_w"] == pytest.approx(readings.power_w)
    from eelgrid_protos.messages import Explanation

    workload = fleet.state.workloads["w-1"]
    why = Explanation(workload=workload, replicas=fleet.state.explanations.get("w-1"))
    told = workload_details(why, watched.board.fleet)
    assert told["placements"][0]["cells"] == [0, 3]
    assert told["explained"][0]["candidates"][0]["terms"] == [["power", 212.5], ["fragmentation", 31.0]]
    assert [row["id"] for row in search_workloads(fleet.state, "BIG")["rows"]] == ["w-2"]
    assert [row["id"] for row in search_workloads(fleet.state, "")["rows"]] == ["w-2", "w-1"]


def test_points_of_the_profile_that_is_asked_for():
    fleet = PageFleet(1)
    nothing = {"profiles": [], "profile": "", "models": [], "model": "", "points": [], "points_in_all": 0}
    assert list_points(fleet.state.points, "x") == nothing
    points = tuple(
        MeasuredPoint(profile=profile, gpu_model="H100", throughput_hz=rate, power_w=300.0, batch=batch)
        for profile, rate, batch in (("bert", 10.0, 1), ("bert", 18.0, 2), ("t5", 4.0, 1))
    )
    fleet.happen(PointsMeasured(time_ns=1, points=points))
    answer = list_points(fleet.state.points, "t5")
    assert answer["profiles"] == ["bert", "t5"]
    assert [(one["rate_hz"], one["power_w"], one["limit_w"]) for one in answer["points"]] == [(4.0, 300.0, None)]
    assert list_points(fleet.state.points, "")["profile"] == "bert"


def test_points_are_of_one_gpu_model_and_no_model_is_lost_behind_another():
    fleet = PageFleet(1)
    points = tuple(
        MeasuredPoint(profile="bert", gpu_model=model, throughput_hz=1.0 + batch, power_w=300.0, batch=batch)
        for model in ("A100", "H100")
        for batch in range(1, POINTS_MOST + 4)
    )
    fleet.happen(PointsMeasured(time_ns=1, points=points))
    answer = list_points(fleet.state.points, "bert", "H100")
    assert (answer["models"], answer["model"]) == (["A100", "H100"], "H100")
    assert {one["model"] for one in answer["points"]} == {"H100"}
    assert (len(answer["points"]), answer["points_in_all"]) == (POINTS_MOST, POINTS_MOST + 3)
    assert list_points(fleet.state.points, "bert", "gone")["model"] == "A100"


def test_promises_are_cut_and_the_latest_come_first():
    services = tuple(
        ServiceStatus(workload_id=f"s-{n}", name=f"s-{n}", objective_s=0.5, live_s=None if n == 0 else n / 100.0)
        for n in range(PROMISES_MOST + 2)
    )
    answer = list_objectives(ListPromisesResponse(services=services))
    ids = [one["id"] for one in answer["services"]]
    assert (len(ids), ids[0], answer["left_out"]) == (PROMISES_MOST, f"s-{PROMISES_MOST + 1}", 2)
    assert answer["jobs"] == []
