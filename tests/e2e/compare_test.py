"""`eelctl replay --policies` as a user runs it: files, table, refusals, interruption, and the same on any processes."""

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench.openb.__main__ import main as bench
from tests.fork_server import run_program

from eelgrid_controller.replay.openb import NODE_LIST, task_list_name
from eelgrid_controller.replay.trace_loading import synthesize_openb
from eelgrid_protos.quantities import MIB

ROOT = Path(__file__).resolve().parents[2]
TASKS = "name,arrival_s,duration_s,cpu_milli,memory_mib,gpus,gpu_share,gpu_models,priority\n"
POLICIES = "fgd,pwr,pwr200,eelgrid,eelgrid-energy"


def command(*arguments):
    return [sys.executable, "-m", "eelgrid_controller.cli", "replay", *map(str, arguments)]


def environment_of(**variables):
    return {**os.environ, "EELGRID_DATA": "", "NO_COLOR": "1", "EELGRID_CONTROLLER": "127.0.0.1:1", **variables}


def eelctl(*arguments, cwd, **variables):
    """The program from its start, with the processes that it makes."""
    environment = environment_of(**variables)
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, cwd=cwd, env=environment, timeout=120, check=False
    )


def forked_eelctl(*arguments, cwd):
    """The same forked from what has imported it: for runs that end before they make a process."""
    words = ("replay", *map(str, arguments))
    return run_program("eelgrid_controller.cli", words, env=environment_of(), cwd=cwd, timeout_s=120.0)


def rows(path):
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Three nodes under more work than they hold, with a failure and a tariff."""
    folder = tmp_path_factory.mktemp("site")
    lines = ["name,cpu_milli,memory_mib,gpus,gpu_model"] + [f"n{i},32000,100000,{2 + i},T4" for i in range(3)]
    (folder / "nodes.csv").write_text("\n".join(lines) + "\n")
    tasks = [f"t{i:03d},{i * 7},{60 + i % 13 * 20},{1000 + i % 5 * 900},100,1,{(i % 4 + 1) / 4},,0" for i in range(150)]
    tasks += ["whole,100,300,4000,100,3,,,5", "huge,1,1,1000,100,9,,,"]
    (folder / "tasks.csv").write_text(TASKS + "\n".join(tasks) + "\n")
    (folder / "failures.csv").write_text("node,down_s,up_s\nn1,200,500\n")
    (folder / "tariff.csv").write_text("from_s,price_per_kwh,carbon_g_per_kwh\n0,0.3,400\n600,0.1,100\n")
    return folder


ASKED = ("--policies", POLICIES, "--seeds", 2, "--failures", "failures.csv", "--tariff", "tariff.csv", "--pue", 1.5)


@pytest.fixture(scope="module")
def compared(site):
    done = eelctl("--trace", ".", *ASKED, "--processes", 1, "--out", "one", cwd=site)
    assert done.returncode == 0, done.stderr
    return site, done.stdout


def test_the_files_and_the_table(compared):
    site, printed = compared
    summary, series = rows(site / "one" / "summary.csv"), rows(site / "one" / "series.csv")
    assert [(row["policy"], row["seed"]) for row in summary] == [
        (p, s) for p in POLICIES.split(",") for s in ("42", "43")
    ]
    for row in summary:
        assert row["trace"] == site.name
        ends = sum(int(row[name]) for name in ("finished", "running", "waiting", "refused"))
        assert (ends, row["tasks"], row["refused"]) == (152, "152", "1")
        assert int(row["restarts"]) > 0
        assert float(row["lost_gpu_h"]) > 0.0
        assert float(row["wait_p95_s"]) >= float(row["wait_mean_s"]) > 0.0
        assert float(row["gpus_allocated_mean"]) < float(row["gpus_allocated_peak"]) <= 9.0
        assert 0.0 < float(row["energy_over_idle_kwh"]) < float(row["energy_kwh"])
        assert 0.1 < float(row["cost"]) / float(row["energy_kwh"]) < 0.3
        assert 0.1 < float(row["carbon_kg"]) / float(row["energy_kwh"]) < 0.4
        mine = [
            float(line["power_w"]) for line in series if (line["policy"], line["seed"]) == (row["policy"], row["seed"])
        ]
        assert len(mine) == 500
        mean_w = sum(mine) / len(mine)
        assert 1.5 * mean_w * float(row["span_h"]) / 1e3 == pytest.approx(float(row["energy_kwh"]), rel=1e-6)
    for policy in POLICIES.split(","):
        assert f"\n {policy} " in printed
    assert "3 nodes, 9 GPUs" in printed
    assert "means over 2 seeds; saved against fgd" in printed
    assert "\x1b" not in printed


def test_other_processes_and_another_run_give_the_same_to_the_byte(compared):
    site, _ = compared
    done = eelctl("--trace", "tasks.csv", *ASKED, "--processes", 2, "--out", "two", "--no-plots", cwd=site)
    assert done.returncode == 0, done.stderr
    assert (site / "two" / "series.csv").read_bytes() == (site / "one" / "series.csv").read_bytes()
    one, two = rows(site / "one" / "summary.csv"), rows(site / "two" / "summary.csv")
    assert [row | {"trace": ""} for row in one] == [row | {"trace": ""} for row in two]
    assert not (site / "two" / "comparison.png").exists()


def test_the_picture_where_there_is_something_to_draw_with(compared):
    site, _ = compared
    pytest.importorskip("matplotlib")
    assert (site / "one" / "comparison.png").read_bytes()[:4] == b"\x89PNG"


def test_arrivals_are_those_of_the_bench(tmp_path):
    """The published protocol, on every fortieth node and task of the generated trace: the same figures."""
    nodes, tasks = synthesize_openb()
    lines = ["sn,cpu_milli,memory_mib,gpu,model"]
    lines += [f"{n.name},{n.cpu_milli},{n.memory_bytes // MIB},{n.gpu_count},{n.gpu_model}" for n in nodes[::40]]
    (tmp_path / NODE_LIST).write_text("\n".join(lines) + "\n")
    lines = ["name,cpu_milli,memory_mib,num_gpu,gpu_milli"]
    lines += [f"{t.name},{t.cpu_milli},{t.memory_bytes // MIB},{t.gpu_count},{t.gpu_milli}" for t in tasks[::40]]
    (tmp_path / task_list_name("small")).write_text("\n".join(lines) + "\n")
    done = eelctl(
        "--trace",
        ".",
        "--list",
        "small",
        "--policies",
        POLICIES,
        "--seeds",
        2,
        "--out",
        "ours",
        "-o",
        "json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    asked = ["--data", str(tmp_path), "--policies", POLICIES, "--seeds", "2", "--bound-seeds", "0", "--no-plots"]
    assert bench([*asked, "--processes", "1", "--out", str(tmp_path / "theirs")]) == 0
    theirs = {row["policy"]: row for row in rows(tmp_path / "theirs" / "summary.csv")}
    ours = json.loads(done.stdout)
    assert [row["policy"] for row in ours] == POLICIES.split(",")
    for row in ours:
        for column in ("saving_mean_pct", "grar_1", "alloc_100_pct", "alloc_130_pct"):
            assert row[column] == pytest.approx(float(theirs[row["policy"]][column]), abs=5.1e-4), (
                column
            )  # three digits are written
    placed = {(row["policy"], row["seed"]): row["placed"] for row in rows(tmp_path / "theirs" / "runs.csv")}
    assert placed == {(row["policy"], row["seed"]): row["placed"] for row in rows(tmp_path / "ours" / "summary.csv")}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--policies", "fgd,magic"), 2, "there is no policy 'magic'"),
        (("--policies", ","), 2, "names 0 policies"),
        (("--policies", "fgd", "--prefix", "x"), 2, "--prefix is for submitting to a controller"),
        (("--seeds", "2"), 2, "--seeds is for comparing policies"),
        (("--policies", "fgd", "--mttr", "3"), 2, "--mttr needs --mtbf"),
        (("--policies", "fgd", "--failures", "failures.csv", "--mtbf", "9"), 2, "both define when nodes fail"),
        (("--policies", "fgd", "--mode", "arrivals", "--pue", "2"), 2, "--pue has no effect with --mode arrivals"),
        (("--policies", "fgd", "--tariff-repeat", "24"), 2, "name the price file with --tariff"),
        (("--policies", "fgd", "--tariff", "tariff.csv", "--tariff-repeat", "0.1"), 2, "cannot repeat every 360 s"),
        (("--policies", "fgd", "--tariff", "failures.csv"), 5, "failures.csv, line 1, column from_s: is missing"),
        (("--policies", "fgd", "--trace", "nowhere"), 4, "is neither a folder nor a file"),
        (("--policies", "fgd", "--trace", "generated", "--mode", "times"), 5, "has no time of arrival"),
        (("--policies", "fgd", "--out", "nodes.csv/out"), 1, "choose another folder with --out"),
        (("--policies", "fgd", "--mtbf", "0.001", "--mttr", "0.001", "--until", "500000"), 5, "more than this program"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(site, arguments, code, said):
    trace = () if "--trace" in arguments else ("--trace", ".")
    out = () if "--out" in arguments or "--policies" not in arguments else ("--out", "never")
    done = forked_eelctl(*trace, *arguments, *out, cwd=site)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr
    assert not (site / "never" / "summary.csv").exists()


def test_parquet_without_its_library_says_how_to_get_it(site, tmp_path):
    (tmp_path / "pyarrow.py").write_text("raise ModuleNotFoundError('not here')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    asked = ("--trace", ".", "--policies", "fgd", "--format", "parquet", "--out", "never")
    done = eelctl(*asked, cwd=site, PYTHONPATH=path)
    assert done.returncode == 1
    assert "--format parquet needs pyarrow, which is not installed" in done.stderr
    assert "pip install 'eelgrid[parquet]', or take --format csv" in done.stderr


def test_parquet_holds_what_the_csv_holds(compared):
    parquet = pytest.importorskip("pyarrow.parquet")
    site, _ = compared
    done = eelctl("--trace", ".", *ASKED, "--format", "parquet", "--out", "three", "--no-plots", cwd=site)
    assert done.returncode == 0, done.stderr
    for name in ("summary", "series"):
        table, text = (
            parquet.read_table(site / "three" / f"{name}.parquet").to_pydict(),
            rows(site / "one" / f"{name}.csv"),
        )
        assert list(table) == list(text[0])
        for column, values in table.items():
            kind = type(values[0])
            assert values == pytest.approx([kind(row[column]) for row in text], rel=1e-9) if kind is not str else True


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_ray_without_its_library_says_how_to_get_it(site):
    done = forked_eelctl("--trace", ".", "--policies", "fgd", "--backend", "ray", "--out", "never", cwd=site)
    assert done.returncode == 1
    assert "--backend ray needs ray, which is not installed" in done.stderr
    assert "pip install 'ray[default]'" in done.stderr


def test_a_ray_cluster_gives_the_same(compared):
    pytest.importorskip("ray")
    site, _ = compared
    done = eelctl("--trace", ".", *ASKED, "--backend", "ray", "--out", "ray", "--no-plots", cwd=site)
    assert done.returncode == 0, done.stderr
    for name in ("summary.csv", "series.csv"):
        assert (site / "ray" / name).read_bytes() == (site / "one" / name).read_bytes()


def anybody(group):
    """Whether a process of the group is there."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupt_ends_it_in_two_lines(site, processes):
    """The signal goes to the whole group, as a terminal sends it."""
    asked = ("--trace", ".", "--policies", "all", "--seeds", 500, "--processes", processes, "--out", "cut")
    child = subprocess.Popen(
        command(*asked), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=site, start_new_session=True
    )
    first = child.stderr.readline()  # a line of progress: it is at work
    assert "runs" in first
    begun = time.monotonic()
    os.killpg(child.pid, signal.SIGINT)
    printed, said = child.communicate(timeout=60)
    assert time.monotonic() - begun < 20.0
    assert child.returncode == 1
    assert "Traceback" not in said, said
    assert "eelctl: interrupted after " in said
    assert "nothing was written" in said
    assert printed == ""
    assert not (site / "cut" / "summary.csv").exists()
    deadline_s = time.monotonic() + 20.0
    while anybody(child.pid):
        assert time.monotonic() < deadline_s, "somebody of the group is left"
        time.sleep(0.1)


def test_the_command_begins_without_what_only_a_comparison_needs():
    program = (
        "import sys; from eelgrid_controller.cli.__main__ import COMMANDS, cli; import eelgrid_controller.cli.replay; "
        "heavy = {'numba', 'numpy', 'joblib', 'matplotlib', 'rich'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
