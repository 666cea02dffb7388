"""eelctl about promises: tables, files of points and prices, budgets, the running fleet's frontier, progress."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.fakes.operators import a_node
from tests.tables import strip_table

from eelgrid_protos.messages import (
    BudgetScope,
    BudgetStatus,
    JobStatus,
    ListPromisesResponse,
    LoadMetric,
    LoadTarget,
    NodeState,
    Placement,
    PowerBudget,
    ServiceStatus,
    WorkloadPhase,
)
from eelgrid_protos.progress import Reporter

ROOT = Path(__file__).parents[2]
SERVICE = """
id: chat
name: chat
kind: inference_service
request: {cpu: 4, gpus: 1}
service:
  profile: chat
  rate_hz: 10
  objectives: [{metric: response, quantile: 0.95, latency_s: 0.5}]
  replicas_most: 8
  metrics: {server: vllm, url: "http://{node}:8000/metrics"}
"""
JOB = """
id: train
name: train
kind: training_job
request: {cpu: 4, gpus: 2}
training: {slowdown_most: 0.05}
"""
POINTS = """workload,gpu_model,batch,throughput_hz,power_w,latency_p50_s,latency_p95_s,power_limit_w
chat,T4,1,8,60,0.1,0.2,
chat,T4,8,20,70,0.3,0.4,
chat,T4,8,18,55,0.3,0.45,60
"""


RISING = ServiceStatus(
    workload_id="chat",
    name="chat",
    replicas_serving=2,
    replicas_wanted=3,
    phase="rising",
    arrived_hz=12.0,
    live_s=0.62,
)


@pytest.fixture
def some_work(eelctl):
    eelctl("submit", "-f", "-", input=SERVICE)
    eelctl("submit", "-f", "-", input=JOB)


@pytest.mark.usefixtures("some_work")
def test_what_is_promised_comes_from_yaml_and_is_shown(eelctl, fake):
    spec = fake.workloads["chat"].spec
    assert (spec.service.profile, spec.service.objectives[0].latency_s) == ("chat", 0.5)
    assert "promised   response p95 within 0.5 s" in eelctl("get", "chat").stdout
    assert "promised   at most 5 % slower" in eelctl("get", "train").stdout
    fake.workloads["train"] = replace(fake.workloads["train"], power_limit_w=250.0)
    assert "limit      250 W per GPU" in eelctl("get", "train").stdout
    # What is printed can be submitted again.
    eelctl("submit", "-f", "-", input=eelctl("get", "train", "-o", "yaml").stdout)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"objectives": []}, "service.objectives"),
        ({"replicas_most": 8, "replicas_least": 9}, "service.replicas_least"),
        ({"objectives": [{"metric": "inter_token", "latency_s": 0.1}]}, "service.output_tokens"),
        ({"objectives": [{"metric": "first_token", "latency_s": 0.1}], "output_tokens": 9}, "service.objectives"),
        ({"metrics": {"server": "vllm", "url": "file:///etc/passwd"}}, "service.metrics.url"),
        ({"metrics": {"server": "vllm", "url": "http://{pod}/metrics"}}, "service.metrics.url"),
        ({"metrics": {"server": "generic", "url": "http://a/metrics"}}, "service.metrics.latency_histogram"),
    ],
)
def test_a_promise_that_contradicts_itself_is_refused_by_field(eelctl, change, field):
    document = yaml.safe_load(SERVICE)
    document["service"] |= change
    assert field in eelctl("submit", "-f", "-", input=yaml.safe_dump(document), code=5).stderr


@pytest.mark.parametrize(
    "training", [{}, {"slowdown_most": 0.05, "energy_weight": 0.5}, {"deadline_ns": 5}, {"work": 7.0}]
)
def test_a_job_has_one_promise(eelctl, training):
    document = yaml.safe_load(JOB) | {"training": training}
    assert "training." in eelctl("submit", "-f", "-", input=yaml.safe_dump(document), code=5).stderr


def test_promises(eelctl, fake):
    assert "nothing has an objective" in eelctl("promises").stdout
    fake.promised.answer = ListPromisesResponse(
        services=(replace(RISING, objective_s=0.5, reason="the promise is broken"),),
        jobs=(
            JobStatus(
                workload_id="train",
                name="train",
                phase="searching",
                power_limit_w=250.0,
                slowdown=0.012,
                saving=0.185,
                reason="250 W saves most",
                is_advice=True,
            ),
        ),
        budgets=(
            BudgetStatus(
                budget=PowerBudget(scope=BudgetScope.CLUSTER, limit_w=20_000.0),
                claimed_w=18_500.0,
                shortfall_w=120.0,
                measured_w=21_000.0,
                measured_gpus=3,
                gpus=4,
            ),
        ),
        price_ratio=1.3,
    )
    assert eelctl("promises").stdout == strip_table("""
SERVICE  PHASE   SERVE  RATE    LIVE  PROMISED  WHY
chat     rising    2/3  12/s  620 ms    500 ms  the promise is broken

JOB    PHASE      LIMIT    TIME    SAVES  WHY
train  searching  250 W  +1.2 %  +18.5 %  would: 250 W saves most

BUDGET      LIMIT  MEASURED   CLAIMED     OVER  SHORT
cluster  20,000 W  21,000 W  18,500 W  1,000 W  120 W
energy now costs 1.30 times the mean of the coming day
""")
    assert json.loads(eelctl("promises", "-o", "json").stdout)["services"][0]["live_s"] == 0.62


def test_a_service_that_follows_a_load_shows_what_each_replica_carries(eelctl, fake):
    document = yaml.safe_load(SERVICE)
    metrics = document["service"]["metrics"]
    document["service"] = {"load_target": {"metric": "tokens", "per_replica": 2500}, "metrics": metrics}
    eelctl("submit", "-f", "-", input=yaml.safe_dump(document))
    target = fake.workloads["chat"].spec.service.load_target
    assert target == LoadTarget(metric=LoadMetric.TOKENS, per_replica=2500.0)
    assert "replicas   2,500 tokens a second each" in eelctl("get", "chat").stdout
    fake.promised.answer = ListPromisesResponse(
        services=(
            replace(
                RISING,
                reason="6,100 tokens a second in 45 s need 3",
                start_s=45.0,
                load_target=target,
            ),
        )
    )
    assert eelctl("promises", "-o", "wide").stdout == strip_table("""
SERVICE  PHASE   SERVE  RATE    LIVE                    PROMISED  MODEL  SLOWNESS        START  WHY
chat     rising    2/3  12/s  620 ms  2,500 tokens a second each      -         -  45 s stated  6,100 tokens a second in 45 s need 3
""")


@pytest.mark.usefixtures("some_work")
def test_scale(eelctl, fake):
    assert "replica 2" in eelctl("scale", "chat", "3").stdout
    fake.promised.room = 4
    found = eelctl("scale", "chat", "6")
    assert "4 of 6 replicas have room now" in found.stderr
    assert "Invalid value" in eelctl("scale", "chat", "0", code=2).stderr


def test_points_are_imported_and_listed(eelctl, tmp_path):
    path = tmp_path / "points.csv"
    path.write_text(POINTS)
    assert eelctl("profile", "import", str(path)).stdout == "3 of 3 points are new or changed\n"
    assert eelctl("profile", "import", str(path)).stdout == "0 of 3 points are new or changed\n"
    assert eelctl("profile", "list").stdout == strip_table("""
PROFILE  GPU  SLICE  BATCH  LIMIT  THROUGHPUT     P95   POWER
chat     T4   -          1      -         8/s  200 ms  60.0 W
chat     T4   -          8      -        20/s  400 ms  70.0 W
chat     T4   -          8   60 W        18/s  450 ms  55.0 W
""")
    unknown = eelctl("profile", "list", "nothing", code=4).stderr
    assert "there is no profile 'nothing'" in unknown
    assert "known are chat; or import measurements with `eelctl profile import FILE`" in unknown


def test_budgets(eelctl, fake):
    shown = eelctl("policy", "set", "--budget", "cluster=200kW", "--budget", "rack:r1=20.5kW", "--ahead").stdout
    assert "budget cluster     200,000 W" in shown
    assert "budget rack r1     20,500 W" in shown
    eelctl("policy", "set", "--budget", "cluster=none", "--budget", "node:n7=5600W", "--ahead")
    assert {(one.scope, one.name): one.limit_w for one in fake.policy.budgets} == {
        (BudgetScope.RACK, "r1"): 20_500.0,
        (BudgetScope.NODE, "n7"): 5600.0,
    }


@pytest.mark.parametrize("text", ["cluster", "cluster:a=5", "rack=5", "row:a=5", "cluster=much", "cluster=5kVA"])
def test_budgets_that_say_nothing(eelctl, text):
    assert "--budget" in eelctl("policy", "set", "--budget", text, code=2).stderr


def test_prices(eelctl, fake, tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text(
        "currency: EUR\npue: 1.3\ncarbon_price_per_kg: 0.08\nperiods:\n"
        "- {from: '07:00', price_per_kwh: 0.30, carbon_kg_per_kwh: 0.4}\n"
        "- {from: '22:00', price_per_kwh: 0.15, carbon_kg_per_kwh: 0.3}\n"
        "- {from: 'sat 07:00', price_per_kwh: 0.15}\n"
    )
    shown = eelctl("policy", "set", "--prices", str(path)).stdout
    assert "0.15 to 0.3 EUR/kWh in 14 periods a week, PUE 1.3, 0.08 EUR/kg of CO2" in shown
    periods = {one.begins_minute: one.price_per_kwh for one in fake.policy.prices.periods}
    assert (periods[7 * 60], periods[5 * 1440 + 7 * 60], periods[6 * 1440 + 7 * 60]) == (0.30, 0.15, 0.30)
    path.write_text("none\n")
    eelctl("policy", "set", "--prices", str(path))
    assert fake.policy.prices is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("periods: 5", "no list"),
        ("periods: [{price_per_kwh: 1}]", "period 1: has no `from`"),
        ("periods: [{from: '25:00', price_per_kwh: 1}]", "from is '25:00'"),
        ("periods: [{from: 'someday 07:00', price_per_kwh: 1}]", "from is"),
        ("periods: [{from: '07:00', price_per_kwh: -1}]", "price_per_kwh"),
        ("pue: 0.5\nperiods: [{from: '07:00', price_per_kwh: 1}]", "pue"),
        ("periods: [", "cannot be read as YAML"),
    ],
)
def test_prices_that_say_nothing(eelctl, tmp_path, text, complaint):
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    assert complaint in eelctl("policy", "set", "--prices", str(path), code=5).stderr


@pytest.mark.usefixtures("some_work")
def test_the_frontier_of_the_running_fleet(eelctl, fake, tmp_path):
    assert "profile import" in eelctl("frontier", "--running", code=5).stderr
    path = tmp_path / "points.csv"
    path.write_text(POINTS)
    eelctl("profile", "import", str(path))
    fake.nodes = [a_node(gpus=4)]
    found = json.loads(eelctl("-o", "json", "frontier", "--running").stdout)
    # 10 requests a second: two of batch 1 within 200 ms, one of batch 8 within 400 ms.
    assert next((row["latency_s"], row["gpus"]) for row in found["rows"] if row["efficient"]) == (0.2, {"T4": 2})
    assert {row["latency_s"]: row["gpus"] for row in found["rows"]}[0.4] == {"T4": 1}
    fake.promised.answer = ListPromisesResponse(
        services=(ServiceStatus(workload_id="chat", name="chat", arrived_hz=20.0),)
    )
    doubled = json.loads(eelctl("-o", "json", "frontier", "--running", "--rates", "2").stdout)
    assert doubled["rate_hz"] == 40.0
    assert "--running" in eelctl("frontier", code=2).stderr


@pytest.mark.usefixtures("some_work")
def test_the_frontier_of_the_running_fleet_has_its_training_jobs(eelctl, fake, tmp_path):
    """One job of two GPUs, at the rate that its promise of 5 % allows; its own points before those of its profile."""
    lines = "job/train,T4,2,1,10,130,,,70\njob/train,T4,2,1,9.8,100,,,60\nchat,T4,1,8,20,70,0.3,0.4,\n"
    titles = "workload,gpu_model,gpus,batch,throughput_hz,power_w,latency_p50_s,latency_p95_s,power_limit_w\n"
    (tmp_path / "points.csv").write_text(titles + lines)
    eelctl("profile", "import", str(tmp_path / "points.csv"))
    node = a_node(gpus=4)
    uuids = tuple(gpu.uuid for gpu in node.inventory.gpus)
    for key, held in (("chat", uuids[:1]), ("train", uuids[1:3])):
        place = Placement(replica=0, node_name=node.inventory.node_name, gpu_uuids=held)
        fake.workloads[key] = replace(fake.workloads[key], phase=WorkloadPhase.PLACED, placements=(place,))
    fake.nodes = [node]
    found = json.loads(eelctl("-o", "json", "frontier", "--running").stdout)
    assert found["training_hz"] == pytest.approx(10.0 / 1.05)
    (row,) = found["rows"]
    assert row["largest_training_factor"] == pytest.approx(1.05)
    # It may do 5 % less at 60 W, so that it does: at 9.8 units a second for nearly all of the time.
    (job,) = (one for one in row["instances"] if one["service"] == "train")
    assert (job["gpus"], job["instances"]) == (2, 1)


@pytest.mark.usefixtures("some_work")
@pytest.mark.parametrize("why", ["slices alone", "its node is lost", "a deadline"])
def test_the_running_frontier_leaves_out_a_job_that_it_cannot_plan(eelctl, fake, tmp_path, why):
    profile = "1g.10gb" if why == "slices alone" else ""
    lines = f"job/train,T4,1,1,10,130,,,{profile}\nchat,T4,1,8,20,70,0.3,0.4,\n"
    titles = "workload,gpu_model,gpus,batch,throughput_hz,power_w,latency_p50_s,latency_p95_s,mig_profile\n"
    (tmp_path / "points.csv").write_text(titles + lines)
    eelctl("profile", "import", str(tmp_path / "points.csv"))
    near, far = a_node("near", gpus=2), a_node("far", gpus=1)
    far = replace(far, state=NodeState.LOST) if why == "its node is lost" else far
    for key, node in (("chat", near), ("train", far)):
        place = Placement(replica=0, node_name=node.inventory.node_name, gpu_uuids=(node.inventory.gpus[0].uuid,))
        fake.workloads[key] = replace(fake.workloads[key], phase=WorkloadPhase.PLACED, placements=(place,))
    if why == "a deadline":
        spec, begun_ns = fake.workloads["train"].spec, fake.workloads["train"].placed_ns
        due = replace(spec.training, slowdown_most=None, work=400.0, deadline_ns=begun_ns + 100 * 10**9)
        fake.workloads["train"] = replace(fake.workloads["train"], spec=replace(spec, training=due))
    fake.nodes = [near, far]
    found = json.loads(eelctl("-o", "json", "frontier", "--running").stdout)
    assert found.get("training_hz", 0.0) == pytest.approx(4.0 if why == "a deadline" else 0.0)
    assert {one["service"] for one in found["rows"][0]["instances"]} == {"chat"} | (
        {"train"} if why == "a deadline" else set()
    )


@pytest.mark.usefixtures("some_work")
@pytest.mark.parametrize("capable", [True, False])
def test_the_running_frontier_uses_slices_of_gpus_that_can_be_partitioned(eelctl, fake, tmp_path, capable):
    lines = "chat,A30,1,20,100,0.3,0.4,\nchat,A30,1,5,10,0.3,0.4,1g.6gb\n"
    titles = "workload,gpu_model,batch,throughput_hz,power_w,latency_p50_s,latency_p95_s,mig_profile\n"
    (tmp_path / "points.csv").write_text(titles + lines)
    eelctl("profile", "import", str(tmp_path / "points.csv"))
    node = a_node(model="A30", gpus=3)
    gpus = [
        replace(gpu, catalogue_key="a30", mig_capable=capable, mig_enabled=capable and gpu.index == 0)
        for gpu in node.inventory.gpus
    ]
    fake.nodes = [replace(node, inventory=replace(node.inventory, gpus=tuple(gpus)))]
    del fake.workloads["train"]
    done = eelctl("frontier", "--running")
    # 10 requests a second: two slices of 10 W beside 32 W idle, or 100 W.
    assert ("A30: MIG mode is on for 1 of 3 GPUs now; to change it, the GPU is reset" in done.stderr) is capable
    assert ("chat: runs on slices only if it is submitted with `slices: true`" in done.stderr) is capable
    assert ("2x1g.6gb of A30" in done.stdout) is capable
    assert ("1 point skipped: 1g.6gb: no MIG layout of A30 is known" in done.stderr) is not capable
    (row,) = json.loads(eelctl("-o", "json", "frontier", "--running").stdout)["rows"]
    assert row["power_w"] == (3 * 32.0 + 2 * 10.0 if capable else 2 * 32.0 + 100.0)


@pytest.mark.usefixtures("some_work")
def test_progress_from_the_command_line_and_from_a_training_loop(eelctl, fake):
    eelctl("progress", "train", "12.5")
    reporter = Reporter({"EELGRID_CONTROLLER": eelctl.address, "EELGRID_WORKLOAD": "train"}, every_s=0.05)
    begun_s = time.monotonic()
    for step in range(1, 200):
        reporter.report(step)
        time.sleep(0.002)
    took_s = time.monotonic() - begun_s
    deadline_s = time.monotonic() + 10.0
    while not reporter.told and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert fake.promised.progress[0] == ("train", 12.5)
    assert fake.promised.progress[1][0] == "train"
    assert 1 <= reporter.told <= took_s / 0.05 + 2


def test_a_controller_that_is_away_does_not_stop_a_job(caplog):
    reporter = Reporter({"EELGRID_CONTROLLER": "127.0.0.1:1", "EELGRID_WORKLOAD": "train"}, every_s=0.0)
    reporter.report(1.0)
    deadline_s = time.monotonic() + 10.0
    while not reporter.failed and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert (reporter.told, reporter.failed) == (0, 1)
    assert "progress=unheard" in caplog.text
    nobody = Reporter({})
    nobody.report(1.0)
    assert (nobody.told, nobody.failed) == (0, 0)


def test_what_was_never_measured_is_predicted_with_intervals(eelctl):
    points = str(ROOT / "docs" / "examples" / "frontier-points.csv")
    asked = ("profile", "predict", "chat", "--points", points, "--gpu", "H100-80GB-HBM3", "--batch", "8,12")
    found = json.loads(eelctl(*asked, "-o", "json").stdout)
    eight, twelve = (row["throughput_hz"] for row in found)
    assert (eight["basis"], twelve["basis"]) == ("measured", "interpolated")
    assert eight["median"] == pytest.approx(13.56, rel=0.02)
    assert eight["median"] < twelve["median"] < 24.0
    assert twelve["lower"] < twelve["median"] < twelve["upper"]
    shown = eelctl(*asked).stdout
    assert "THROUGHPUT /s" in shown
    assert "90 % intervals" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (("--batch", "x"), 2, "--batch"),
        (("--batch", "1.5"), 2, "whole numbers"),
        (("--limit", "-5"), 2, "--limit"),
        (("--slice", "9g.999gb"), 5, "9g.999gb"),
    ],
)
def test_configurations_that_cannot_be(eelctl, arguments, code, complaint):
    points = str(ROOT / "docs" / "examples" / "frontier-points.csv")
    asked = ("profile", "predict", "chat", "--points", points, "--gpu", "H100-80GB-HBM3", *arguments)
    assert complaint in eelctl(*asked, code=code).stderr


def test_nothing_is_predicted_from_nothing(eelctl):
    assert "profile import" in eelctl("profile", "predict", "chat", "--gpu", "T4", code=5).stderr


def test_budgets_are_imagined(eelctl, fake):
    fake.policy = replace(fake.policy, budgets=(PowerBudget(scope=BudgetScope.CLUSTER, limit_w=9000.0),))
    fake.promised.answer = ListPromisesResponse(
        jobs=(JobStatus(workload_id="train", name="train", phase="imagined", power_limit_w=200.0, slowdown=0.08),)
    )
    shown = eelctl("promises", "--budget", "rack:r1=4kW").stdout
    assert "train  imagined  200 W  +8.0 %" in shown
    assert "cluster  9,000 W         -  8,100 W" in shown
    assert "rack r1  4,000 W         -  3,600 W" in shown
    assert fake.policy.budgets == (PowerBudget(scope=BudgetScope.CLUSTER, limit_w=9000.0),)
