"""Our own trace format: good files in full, the example of the page, and bad cells with file, line, column and remedy."""

import re
from pathlib import Path

import pytest

from eelgrid_controller.replay import site_csv, trace_loading
from eelgrid_controller.replay.csv_reader import TraceError, TraceMalformed, TraceMissing, TraceTooLarge
from eelgrid_controller.replay.openb import TraceNode, TraceTask
from eelgrid_controller.replay.openb_protocol import build_trace
from eelgrid_controller.replay.simulation import build_schedule
from eelgrid_controller.replay.site_csv import FailureRow, TariffRow
from eelgrid_controller.replay.trace_loading import TraceSearch
from eelgrid_protos import catalogue
from eelgrid_protos.quantities import MIB

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "trace-format.md"
NODES = "name,cpu_milli,memory_mib,gpus,gpu_model,gpu_idle_w,gpu_full_w\n"
TASKS = "name,arrival_s,duration_s,cpu_milli,memory_mib,gpus,gpu_share,gpu_models,priority\n"


@pytest.fixture
def written(tmp_path):
    def write(text, name="x.csv"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def nodes(path):
    return site_csv.read_nodes(path, catalogue.load_catalogue())


def test_nodes_and_where_their_watts_come_from(written):
    text = (
        NODES
        + "a,64000,1024,4,H100-80GB-HBM3,,\nb,1,1,1,h100-sxm5-80gb,,\nc,1,1,2,Own,20,180.5\nd,1,1,0,,,\ne,1,1,1,G3,,\n"
    )
    a, b, c, d, e = nodes(written(text))
    product = catalogue.load_catalogue().products["h100-sxm5-80gb"]
    assert a == TraceNode(
        name="a",
        cpu_milli=64_000,
        memory_bytes=1024 * MIB,
        gpu_count=4,
        gpu_model="H100-80GB-HBM3",
        gpu_idle_w=product.idle_w,
        gpu_full_w=product.busy_w,
    )
    assert (b.gpu_idle_w, b.gpu_full_w) == (product.idle_w, product.busy_w)
    assert (c.gpu_idle_w, c.gpu_full_w) == (20.0, 180.5)
    assert (d.gpu_count, d.gpu_model, d.gpu_idle_w) == (0, "", None)
    task = TraceTask(name="t", cpu_milli=1, memory_bytes=0, gpu_count=1, gpu_milli=1000)
    fleet = build_trace("x", (a, b, c, d, e), (task,)).fleet
    assert fleet.busy_w.tolist() == [product.busy_w, product.busy_w, 180.5, 0.0, 400.0]


def test_tasks_with_all_columns_and_with_the_fewest(written):
    full, empty = site_csv.read_tasks(written(TASKS + "a,1.5,60,500,10,1,0.125,T4|A10|T4,7\nb,0,,500,10,2,,,\n"))
    assert full == TraceTask(
        name="a",
        cpu_milli=500,
        memory_bytes=10 * MIB,
        gpu_count=1,
        gpu_milli=125,
        gpu_models=("T4", "A10"),
        arrival_s=1.5,
        duration_s=60.0,
        priority=7,
    )
    assert (empty.gpu_milli, empty.duration_s, empty.gpu_models, empty.priority) == (1000, None, (), 0)
    (least,) = site_csv.read_tasks(written("gpus,name,arrival_s,memory_mib,cpu_milli\n0,a,3,0,1\n"))
    assert (least.gpu_count, least.gpu_milli, least.arrival_s) == (0, 0, 3.0)


def test_the_example_of_the_page_is_a_trace(written, tmp_path):
    blocks = dict(re.findall(r"^\$ cat site/(\w+\.csv)\n(.*?)(?=^\$)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    assert set(blocks) == {"nodes.csv", "tasks.csv", "failures.csv", "tariff.csv"}
    for name, text in blocks.items():
        written(text, f"site/{name}")
    here = TraceSearch(environment={}, directory=tmp_path, project=tmp_path, cache=tmp_path, fetch=None)
    for named in ("site", "site/tasks.csv"):
        found = trace_loading.find_trace(str(tmp_path / named), "default", None, here)
        assert (len(found.nodes), len(found.tasks), found.timed) == (3, 4, True)
    plan = build_schedule(build_trace(found.name, found.nodes, found.tasks), found.tasks)
    assert (plan.begin_s, plan.end_s) == (0.0, 7800.0)
    assert site_csv.read_failures(tmp_path / "site/failures.csv", found.nodes) == (FailureRow("a", 3000.0, 4000.0),)
    assert site_csv.read_tariffs(tmp_path / "site/tariff.csv", 0.0)[1] == TariffRow(3600.0, 0.18, 240.0)


@pytest.mark.parametrize(
    ("line", "column", "said"),
    [
        ("a,x,1,1,T4,,", "cpu_milli", "holds 'x', not a whole number; write a number from 0"),
        ("a,1,1,1,,,", "gpu_model", "is '' with 1 GPUs; name a model exactly where there are GPUs"),
        ("a,1,1,65,T4,,", "gpus", "holds 65, more than 64"),
        ("a,1,1,1,Voodoo,,", "gpu_model", "so its watts are not known; "),
        ("a,1,1,1,Own,20,", "gpu_full_w", "holds '', not a number"),
        ("a,1,1,1,Own,20,-5", "gpu_full_w", "holds '-5', not a number"),
        ("a,1,1,1,Own,200,100", "gpu_idle_w", "more than gpu_full_w; swap the two"),
        ("a,1,1,1,Own,1e3,1e4", "gpu_idle_w", "holds '1e3', not a number"),
        (",1,1,0,,,", "name", "is empty or too long"),
        ("z,1,1,0,,,", "name", "repeats 'z' of line 2"),
    ],
)
def test_a_bad_node(written, line, column, said):
    with pytest.raises(TraceMalformed, match=re.escape(f"x.csv, line 3, column {column}: ")) as refused:
        nodes(written(f"{NODES}z,1,1,1,T4,,\n{line}\n"))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("line", "column", "said"),
    [
        ("a,,1,1,1,0,,,", "arrival_s", "holds '', not a number"),
        ("a,1,-1,1,1,0,,,", "duration_s", "holds '-1', not a number"),
        ("a,1,inf,1,1,0,,,", "duration_s", "holds 'inf', not a number"),
        ("a,99999999999,1,1,1,0,,,", "arrival_s", "check the unit"),
        ("a,1,1,1,1,1,1.5,,", "gpu_share", "more than 1"),
        ("a,1,1,1,1,1,0.0001,,", "gpu_share", "is 0 with 1 GPUs; make both 0, or both more"),
        ("a,1,1,1,1,0,0.5,,", "gpu_share", "is 0.5 with 0 GPUs"),
        ("a,1,1,1,1,2,0.5,,", "gpu_share", "several GPUs are whole: write 1"),
        ("a,1,1,0,0,0,,,", "cpu_milli", "asks for nothing; remove the line"),
        ("a,1,1,1,1,0,,T4,", "gpu_models", "names T4 for a task without GPU"),
        ("a,1,1,1,1,0,,,-1", "priority", "not a whole number"),
        ("a,1,1,1,1,0,,", "priority", "8 cells under 9 columns"),
    ],
)
def test_a_bad_task(written, line, column, said):
    with pytest.raises(TraceMalformed, match=re.escape(f"x.csv, line 2, column {column}: ")) as refused:
        site_csv.read_tasks(written(TASKS + line + "\n"))
    assert said in str(refused.value)


def test_titles_that_are_missing_misspelt_or_twice(written):
    with pytest.raises(
        TraceMalformed, match=r"line 1, column arrival_s: is missing; begin the file with name,arrival_s"
    ):
        site_csv.read_tasks(written("name,duration_s\n"))
    with pytest.raises(TraceMalformed, match=r"column 'priorty': is unknown; remove it, or write one of .*priority"):
        site_csv.read_tasks(written(TASKS.replace("priority", "priorty")))
    with pytest.raises(TraceMalformed, match=r"column name: is there twice"):
        site_csv.read_tasks(written("name," + TASKS))


def test_more_rows_than_this_program_takes(written):
    rows = "\n".join(f"n{index},1,1,0,,," for index in range(100_001))
    with pytest.raises(TraceTooLarge, match=r"line 100002: is past 100000 rows; split the file"):
        nodes(written(NODES + rows))


FLEET = (TraceNode(name="a", cpu_milli=1, memory_bytes=1, gpu_count=0, gpu_model=""),)


def test_failures_in_order_and_for_good(written):
    rows = site_csv.read_failures(written("node,down_s,up_s\na,9,\na,1,2\na,2,3.5\n"), FLEET)
    assert rows == (FailureRow("a", 1.0, 2.0), FailureRow("a", 2.0, 3.5), FailureRow("a", 9.0, None))


@pytest.mark.parametrize(
    ("lines", "place", "said"),
    [
        ("b,1,2", "line 2, column node", "names 'b', which is no node of the trace"),
        ("a,2,2", "line 2, column up_s", "is not after down_s"),
        ("a,1,5\na,4,6", "line 3, column down_s", "falls into another failure of a"),
        ("a,1,\na,4,6", "line 3, column down_s", "falls into another failure of a"),
    ],
)
def test_bad_failures(written, lines, place, said):
    with pytest.raises(TraceMalformed, match=f"{place}: .*{said}"):
        site_csv.read_failures(written(f"node,down_s,up_s\n{lines}\n"), FLEET)


@pytest.mark.parametrize(
    ("lines", "place", "said"),
    [
        ("6,1,1", "line 2, column from_s", "is 6 in the first row; begin at the trace's first arrival, 5, or before"),
        ("0,1,1\n0,1,1", "line 3, column from_s", "is not after the row before; sort the rows"),
        ("0,x,1", "line 2, column price_per_kwh", "not a number"),
        ("", "x.csv", "has no row"),
    ],
)
def test_bad_tariffs(written, lines, place, said):
    with pytest.raises(TraceMalformed, match=f"{place}: .*{said}"):
        site_csv.read_tariffs(written(f"from_s,price_per_kwh,carbon_g_per_kwh\n{lines}\n"), 5.0)


def test_what_is_no_trace(written, tmp_path):
    here = TraceSearch(environment={}, directory=tmp_path, project=tmp_path, cache=tmp_path, fetch=None)

    def find(path, nodes=None):
        return trace_loading.find_trace(str(path), "default", nodes, here)

    with pytest.raises(TraceMissing, match="is neither a folder nor a file"):
        find(tmp_path / "nowhere")
    with pytest.raises(
        TraceMissing, match=r"has no nodes.csv or openb_node_list_gpu_node.csv beside it; name its nodes"
    ):
        find(written(TASKS + "a,1,1,1,1,0,,,\n"))
    with pytest.raises(TraceError, match="column name: is missing"):
        find(written("a,b\n1,2\n"), written("sn,cpu_milli,memory_mib,gpu,model\nn,1,1,1,T4\n", "n.csv"))
    openb = find(
        written("name,cpu_milli,memory_mib,num_gpu,gpu_milli\np,1,1,1,5\n", "openb_pod_list_mine.csv"),
        written("sn,cpu_milli,memory_mib,gpu,model\nn,1,1,1,T4\n", "n.csv"),
    )
    assert (openb.name, len(openb.nodes), openb.timed) == ("mine", 1, False)
    timeless = build_trace("mine", openb.nodes, openb.tasks)
    with pytest.raises(TraceMalformed, match="trace mine, task p: has no time of arrival; give a list with times"):
        build_schedule(timeless, openb.tasks)
