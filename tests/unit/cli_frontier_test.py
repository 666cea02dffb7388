"""eelctl frontier from files to files, and every way in which a file can be wrong."""

import csv
import json
import os
import subprocess
import sys

import pytest
import yaml
from click.testing import CliRunner

from eelgrid_controller.cli.__main__ import cli

TITLES = "workload,gpu_model,mig_profile,gpus,batch,processes,power_limit_w,throughput_hz,power_w,"
TITLES += "latency_p50_s,latency_p95_s,latency_p99_s,source\n"
TIGHT = "chat,H200,,1,1,1,,10,200,,0.1,,mine\n"
POINTS = TITLES + TIGHT + "chat,H200,,1,2,1,,20,300.0,1e-1,2E-1,.4,mine\nchat,X9,,1,2,1,,20,,,,,\n"
SERVICES = """
services:
  - {name: s, workload: chat, rate_hz: 20, quantile: 0.95}
fleet:
  H200: 4
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "points.csv").write_text(POINTS)
    (tmp_path / "services.yaml").write_text(SERVICES)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(cli, ["frontier", "--points", "points.csv", "--services", "services.yaml", *arguments])


def test_the_table(folder):
    done = run()
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        "OBJECTIVE  WATTS  J/REQUEST  RATES  GPUS    MARK",
        "    0.1 s  552.0       27.6     x2  2xH200  performance,balanced",
        "    0.2 s  528.0       26.4     x4  1xH200  energy",
    ]  # two of 76 W idle beside 400 W, three beside 300 W
    assert "below 0.1 s: s has no measured point that fast" in done.stderr
    assert "1 point skipped: X9: not in the fleet" in done.stderr


TRAINED = SERVICES.replace("fleet:", "training:\n  - {name: t, workload: bert, rate_hz: 5}\nfleet:")


@pytest.fixture
def trained(folder):
    (folder / "points.csv").write_text(POINTS + "bert,H200,,2,1,1,700,10,900,,,,mine\n")
    (folder / "services.yaml").write_text(TRAINED)
    return folder


def test_training_beside_services(trained):
    """Half of the time two GPUs train at 900 W, else they are idle; with the other two, or with one and an idle one."""
    done = run()
    assert done.exit_code == 0, done.output
    table, steps = done.stdout.split("\n\n")
    assert table.splitlines() == [
        "OBJECTIVE  WATTS  RATES  TRAINING  GPUS    MARK",
        "    0.1 s  926.0     x1        x2  4xH200  performance,balanced",
        "    0.2 s  902.0     x2        x2  3xH200  energy",
    ]
    assert steps.splitlines()[:2] == [
        "OBJECTIVE  TRAINING  UNITS/S    WATTS  J/UNIT",
        "    0.1 s        x0        0    552.0       -",
    ]
    # 900 W are 748 more than two idle GPUs draw, for 10 units a second.
    assert [line.split()[-1] for line in steps.splitlines()[2:10]] == ["74.8"] * 8
    assert steps.splitlines()[9].split()[2:5] == ["x2", "10", "1,299.9"]


def test_training_in_json_and_in_the_picture(trained):
    pytest.importorskip("matplotlib")
    found = json.loads(run("-o", "json", "--plot", "f.png", "--out", "out.csv").stdout)
    assert (found["training_hz"], found["rows"][0]["largest_training_factor"]) == (5.0, 2.0)
    assert found["rows"][0]["energy_per_request_j"] is None
    assert {placed["service"] for placed in found["rows"][0]["instances"]} == {"s", "t"}
    assert found["training"][0] == {"latency_s": 0.1, "factor": 0.0, "power_w": 552.0}
    assert len(found["training"]) == 18
    plain = (trained / "f.png").stat().st_size
    (trained / "services.yaml").write_text(SERVICES)
    assert run("--plot", "f.png").exit_code == 0
    assert (trained / "f.png").stat().st_size < plain


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("rate_hz: 5", "rate_hz: 0", "training 1: rate_hz is 0"),
        ("rate_hz: 5", "rate_hz: many", "training 1: rate_hz: is 'many'"),
        ("workload: bert", "workload: gpt", "no point of gpt on a model of the fleet with watts"),
        ("name: t,", "name: s,", "s is there twice"),
        ("{name: t, workload: bert, rate_hz: 5}", "{name: t, workload: bert}", "training 1: rate_hz is missing"),
        ("training:\n  - {name: t, workload: bert, rate_hz: 5}", "training: 5", "training is not a list"),
    ],
)
def test_training_that_is_refused(trained, old, new, complaint):
    (trained / "services.yaml").write_text(TRAINED.replace(old, new))
    done = run()
    assert done.exit_code == 5, done.output
    assert complaint in done.stderr


def test_json_yaml_and_the_file_of_results(folder):
    found = json.loads(run("-o", "json", "--out", "out.csv").stdout)
    assert found == yaml.safe_load(run("-o", "yaml").stdout)
    assert (found["rate_hz"], found["tightest"]) == (20.0, {"service": "s", "latency_s": 0.1})
    first, last = found["rows"]
    assert (first["power_w"], first["serving_w"], first["energy_per_request_j"]) == (552.0, 400.0, 27.6)
    assert (last["largest_factor"], last["largest_rate_hz"], last["mark"]) == (4.0, 80.0, "energy")
    (placed,) = first["instances"]
    assert (placed["service"], placed["gpu_model"], placed["instances"]) == ("s", "H200", 2)
    with (folder / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["latency_s"], row["power_w"], row["gpus"], row["carried"]) for row in rows] == [
        ("0.1", "552.0", "2xH200", "1"),
        ("0.2", "528.0", "1xH200", "1"),
    ]


def test_a_fleet_that_is_short(folder):
    (folder / "services.yaml").write_text(SERVICES.replace("rate_hz: 20", "rate_hz: 1e2"))
    done = run("-o", "json")
    assert done.exit_code == 1
    rows = json.loads(done.stdout)["rows"]
    assert [(row["carried"], row["power_w"], row["lacks"]) for row in rows] == [
        (False, None, {"H200": 6}),
        (False, None, {"H200": 1}),
    ]
    assert "carries at most 0.8 of the rates, at 0.2 s" in done.stderr
    assert json.loads(done.stderr)["remedy"].startswith("add 1 more H200")
    assert "lacks 6 more H200" in run().stdout


def test_idle_watts_may_be_given(folder):
    (folder / "services.yaml").write_text(SERVICES.replace("H200: 4", "H200: {gpus: 4, idle_w: 10}"))
    assert json.loads(run("-o", "json").stdout)["rows"][0]["power_w"] == 420.0


def test_the_picture(folder):
    pytest.importorskip("matplotlib")
    assert run("--plot", "f.png").exit_code == 0
    assert (folder / "f.png").read_bytes().startswith(b"\x89PNG")
    done = run("--plot", "f.xyz")
    assert done.exit_code == 1
    assert "next: name another file with --plot" in done.stderr
    (folder / "services.yaml").write_text(SERVICES.replace("H200: 4", "H200: 1"))
    assert run("--plot", "short.png").exit_code == 0
    (folder / "services.yaml").write_text(SERVICES.replace("H200: 4", "H200: 0"))
    assert run("--plot", "none.png").exit_code == 1
    assert (folder / "none.png").stat().st_size > 1000


SLICES = "chat,A30,1g.6gb,1,1,1,,5,20,,0.1,,mine\nchat,A30,2g.12gb,,1,1,,10,36,,0.1,,mine\n"
SLICED = SERVICES.replace("H200: 4", "A30: {gpus: 2, idle_w: 30, idle_mig_w: 40}\n  H200: 1")


@pytest.fixture
def sliced(folder):
    (folder / "points.csv").write_text(TITLES + TIGHT + SLICES)
    (folder / "services.yaml").write_text(SLICED)
    return folder


def test_slices_in_the_table(sliced):
    """Two slices of 36 W on a GPU that draws 40 W with MIG on, beside idle ones of 30 and 76 W."""
    done = run()
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        "OBJECTIVE  WATTS  J/REQUEST  RATES  GPUS   PARTITIONED  MARK",
        "    0.1 s  218.0       10.9   x2.5  1xA30  1xA30        performance,balanced,energy",
        "",
        "OBJECTIVE  SERVICE  WHOLE GPUS  SLICES",
        "    0.1 s  s        -           2x2g.12gb of A30",
    ]


def test_slices_in_json_and_in_the_file_of_results(sliced):
    found = json.loads(run("-o", "json", "--out", "out.csv").stdout)
    (row,) = found["rows"]
    assert (row["power_w"], row["serving_w"], row["partitioned"]) == (218.0, 112.0, {"A30": 1})
    assert row["layouts"] == [{"gpu_model": "A30", "slices": {"2g.12gb": 2}, "gpus": 1}]
    assert [(one["mig_profile"], one["instances"]) for one in row["instances"]] == [("2g.12gb", 2)]
    with (sliced / "out.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert (line["gpus"], line["partitioned"], line["slices"]) == ("1xA30", "1xA30", "2x2g.12gb of A30")


def test_slices_and_training_in_the_picture(sliced):
    pytest.importorskip("matplotlib")
    assert run("--plot", "f.png").exit_code == 0
    plain = (sliced / "f.png").stat().st_size
    (sliced / "points.csv").write_text(TITLES + TIGHT + SLICES + "bert,A30,2g.12gb,,1,1,,10,36,,,,mine\n")
    (sliced / "services.yaml").write_text(
        SLICED.replace("fleet:", "training: [{name: t, workload: bert, rate_hz: 5}]\nfleet:")
    )
    done = run("--plot", "f.png")
    assert done.exit_code == 0, done.output
    assert "1x2g.12gb of A30" in done.stdout
    assert (sliced / "f.png").stat().st_size > plain


def test_watts_with_mig_on_are_the_catalogues_unless_given(sliced):
    (sliced / "services.yaml").write_text(SLICED.replace(", idle_mig_w: 40", ""))
    assert json.loads(run("-o", "json").stdout)["rows"][0]["power_w"] == 210.0  # the A30's 32 W
    (sliced / "services.yaml").write_text(SLICED.replace("idle_w: 30, idle_mig_w: 40", "idle_w: 35"))
    assert json.loads(run("-o", "json").stdout)["rows"][0]["power_w"] == 218.0  # not less than without
    (sliced / "services.yaml").write_text(SLICED.replace("idle_mig_w: 40", "idle_mig_w: 10"))
    assert "10 W idle with MIG on, less than 30 W without" in run().stderr
    (sliced / "services.yaml").write_text(SLICED.replace("idle_mig_w: 40", "idle_mig_w: -1"))
    assert "fleet: A30: idle_mig_w: is -1" in run().stderr


def test_slices_of_a_model_that_the_catalogue_does_not_know_are_counted(sliced):
    (sliced / "points.csv").write_text(TITLES + TIGHT + SLICES.replace("A30", "X9"))
    (sliced / "services.yaml").write_text(SLICED.replace("A30", "X9").replace("H200: 1", "H200: 2"))
    done = run()
    assert done.exit_code == 0, done.output
    assert "1 point skipped: 2g.12gb: no MIG layout of X9 is known" in done.stderr
    assert "PARTITIONED" not in done.stdout


@pytest.mark.parametrize(
    ("option", "module", "remedy"),
    [
        ("--plot=f.png", "matplotlib", "eelgrid[replay]"),
        ("-otable", "highspy", "eelgrid[controller]"),
        ("-otable", "scipy", "eelgrid[controller]"),
    ],
)
def test_a_library_that_lacks(folder, option, module, remedy):
    """A process of its own, in which the library cannot be found."""
    code = f"import sys; sys.modules[{module!r}] = None; from eelgrid_controller.cli.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "frontier", "--points=points.csv", "--services=services.yaml", option],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert f"needs {module}, which is not installed" in done.stderr
    assert remedy in done.stderr
    assert "Traceback" not in done.stderr


def test_help_loads_no_arithmetic():
    """The start of eelctl stays quick."""
    code = "import sys, eelgrid_controller.cli.frontier; print([m for m in ('numpy', 'scipy', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("chat,H200,,1,1,1,,,200,,0.1,,\n", "line 3, column throughput_hz: is empty"),
        ("chat,H200,,1,1,1,,ten,200,,0.1,,\n", "line 3, column throughput_hz: is 'ten'"),
        ("chat,H200,,1,1,1,,10,-5,,0.1,,\n", "line 3, column power_w: is '-5'"),
        ("chat,H200,,1,1,1,,10,nan,,0.1,,\n", "line 3, column power_w: is 'nan'"),
        ("chat,H200,,1,1,1,,10,200,,0,,\n", "line 3, column latency_p95_s: is '0'"),
        ("chat,H200,,1,1,1,,10,200,,0.2,0.1,\n", "line 3, column latency_p99_s: is 0.1, less than a lower quantile"),
        ("chat,H200,,0,1,1,,10,200,,0.1,,\n", "line 3, column gpus: is 0"),
        ("chat,H200,,1,1.5,1,,10,200,,0.1,,\n", "line 3, column batch: holds '1.5', not a whole number"),
        ("chat,,,1,1,1,,10,200,,0.1,,\n", "line 3, column gpu_model: is empty"),
        ("chat,H200,,1\n", "line 3, column batch: 4 cells under 13 columns"),
        ("chat,H200,,1,1,1,,10,1,,0.1,,\n", "draws 1 W, less than 76 W idle"),
        (
            "chat,H200,1g.10gb,1,1,1,,10,20,,0.1,,\n",
            "line 3, column mig_profile: is 1g.10gb: H200 has no profile 1g.10gb",
        ),
        ("chat,L40S,1g.10gb,1,1,1,,10,20,,0.1,,\n", "column mig_profile: is 1g.10gb: no MIG layout of L40S is known"),
        ("chat,H200,1g.18gb,2,1,1,,10,20,,0.1,,\n", "line 3, column gpus: is 2: 2 of 1g.18gb, but a process sees one"),
        (TIGHT * 10_000, "line 10002: is past 10000 rows"),
    ],
)
def test_points_that_are_refused(folder, line, complaint):
    (folder / "points.csv").write_text(TITLES + TIGHT + line)
    done = run()
    assert done.exit_code == 5, done.output
    assert complaint in done.stderr
    assert "  next: " in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (TITLES, "contains no point"),
        (TITLES.replace("gpu_model", "gpu") + TIGHT, "line 1, column gpu_model: is missing"),
        (TITLES.replace("source", "sauce") + TIGHT, "line 1, column 'sauce': is unknown"),
    ],
)
def test_titles_that_are_refused(folder, text, complaint):
    (folder / "points.csv").write_text(text)
    done = run()
    assert done.exit_code == 5
    assert complaint in done.stderr


def test_columns_that_nobody_measured_may_be_left_out(folder):
    (folder / "points.csv").write_text("workload,gpu_model,throughput_hz,power_w,latency_p95_s\nchat,H200,20,300,0.1\n")
    assert "528.0" in run().stdout


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("fleet:", "fleets:", "services.yaml: fleet is missing"),
        ("fleet:", "more: 1\nfleet:", "services.yaml: more is unknown"),
        ("rate_hz: 20", "rate_hz: 0", "service 1: rate_hz is 0"),
        ("rate_hz: 20", "rate_hz: many", "service 1: rate_hz: is 'many'"),
        ("rate_hz: 20", "rate_hz: .nan", "service 1: rate_hz: is nan"),
        ("quantile: 0.95", "quantile: 95", "service 1: quantile is 95"),
        ("quantile: 0.95", "quantile: [0.95]", "service 1: quantile is [0.95]"),
        ("name: s", "name: 7", "service 1: name is 7"),
        (", quantile: 0.95", "", "service 1: quantile is missing"),
        ("H200: 4", "H200: many", "fleet: H200: gpus is 'many'"),
        ("H200: 4", "H200: {idle_w: 3}", "fleet: H200: gpus is missing"),
        ("H200: 4", "H2000: 4", "fleet: H2000: is 'H2000', which is no known GPU model"),
        ("H200: 4", "H200: {gpus: 1, idle_w: -3}", "fleet: H200: idle_w: is -3"),
        ("H200: 4", "H200: 1000000", "fleet H200: 1000000 GPUs"),
        ("  H200: 4", "  []", "fleet is not a mapping"),
        ("workload: chat", "workload: talk", "no point of talk on a model of the fleet"),
        ("{name", "{{name", "services.yaml, line 4, column 1"),
        ("services:", "services: 3\nx:", "services.yaml: x is unknown"),
    ],
)
def test_services_that_are_refused(folder, old, new, complaint):
    (folder / "services.yaml").write_text(SERVICES.replace(old, new))
    done = run()
    assert done.exit_code == 5, done.output
    assert complaint in done.stderr
    assert "  next: " in done.stderr
