"""Every command of eelctl against a real controller, and every mistake with its exit code and its remedy."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
import yaml
from tests.e2e.processes import Cluster, fleet_of, free_address

from eelgrid_protos.messages import (
    GetWorkloadRequest,
    ListWorkloadsRequest,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadPhase,
    WorkloadSpec,
)

BIG = {
    "cpu_milli": 64_000,
    "memory_bytes": 2**38,
    "pool": "g2",
    "gpus": [{"product": "openb-g2", "model": "G2", "count": 4}],
}
SMALL = {
    "cpu_milli": 16_000,
    "memory_bytes": 2**36,
    "pool": "t4",
    "gpus": [{"product": "openb-t4", "model": "T4", "count": 2}],
}
FLEET = ({"name": "big-{index}", "count": 2, **BIG}, {"name": "small", **SMALL})
# One page more than the longest page.
CROWD = 1001


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """Three nodes, a placed service, a job that fills all T4s and one that waits for it; tests add their own."""
    with Cluster(tmp_path_factory.mktemp("eelctl")) as cluster:
        cluster.controller()
        cluster.set_policy(send_interval_s=0.5)
        cluster.agent(fleet_of(cluster.folder / "fleet.json", FLEET))
        cluster.until_ready(3)
        cluster.eelctl(
            "submit",
            "--id",
            "svc-1",
            "--name",
            "svc",
            "--kind",
            "inference_service",
            "--replicas",
            2,
            "--cpu",
            4,
            "--memory",
            "8GiB",
            "--gpu-share",
            0.5,
            "--gpu-model",
            "G2",
            "--namespace",
            "prod",
            "--user",
            "ann",
            "--queue",
            "calm",
            "--label",
            "team=a",
        )
        for name, gpus in (("fill", 2), ("wait", 1)):
            cluster.eelctl("submit", "--id", name, "--name", name, "--gpus", gpus, "--gpu-model", "T4", "--cpu", 1)
        cluster.until(lambda: cluster.summary().measured_gpus == 10, what="readings have come")
        yield cluster


def both(cluster, *arguments):
    """What a command prints as JSON and as YAML, each parsed; and its table. The power of workloads changes in between."""
    forms = ("json", "yaml", "table")
    with ThreadPoolExecutor(len(forms)) as pool:
        as_json, as_yaml, table = pool.map(lambda form: cluster.eelctl(*arguments, "-o", form).stdout, forms)
    plain = json.loads(as_json), yaml.safe_load(as_yaml)
    if arguments[0] in {"get", "workloads"}:
        for one in chain.from_iterable(found if isinstance(found, list) else [found] for found in plain):
            one.pop("power_w", None)
    return *plain, table


def together(call, cases):
    """What the call gives for each case, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(call, cases))


def fails(cluster, code, *arguments, **options):
    """Standard error of a command that fails: what happened, and what to do next."""
    done = cluster.eelctl(*arguments, code=code, **options)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    if code != 2:
        assert lines[0].startswith("eelctl: ")
        assert lines[-1].startswith("  next: ")
    return done.stderr


def test_nodes(live):
    as_json, as_yaml, table = both(live, "nodes")
    names = ["big-0", "big-1", "small"]
    assert [node["inventory"]["node_name"] for node in as_json] == names
    assert [node["inventory"] for node in as_yaml] == [node["inventory"] for node in as_json]
    assert {node["state"] for node in as_json} == {"ready"}
    title, *rows = table.splitlines()
    assert title.split()[:3] == ["NODE", "STATE", "POOL"]
    assert [row.split()[0] for row in rows] == names
    assert "W" in rows[0].split()
    wide = live.eelctl("-o", "wide", "nodes", "--no-headers").stdout.splitlines()
    assert len(wide) == 3
    assert all(len(line) > len(title) for line in wide)
    only = json.loads(live.eelctl("nodes", "--pool", "t4", "--gpu-model", "T4", "--name", "mal", "-o", "json").stdout)
    assert [node["inventory"]["node_name"] for node in only] == ["small"]
    nothing = live.eelctl("nodes", "--state", "lost")
    assert (nothing.stdout, "no node matches" in nothing.stderr) == ("", True)


def test_gpus(live):
    as_json, as_yaml, table = both(live, "gpus", "--node", "small")
    assert [gpu["gpu"] for gpu in as_yaml] == [gpu["gpu"] for gpu in as_json]
    assert [gpu["allocated_milli"] for gpu in as_json] == [1000, 1000]
    assert all(gpu["power_w"] > 0 for gpu in as_json)
    assert len(table.splitlines()) == 3
    free = json.loads(live.eelctl("gpus", "--free", 0.6, "-o", "json").stdout)
    assert {gpu["gpu"]["model"] for gpu in free} == {"G2"}
    assert all(gpu["allocated_milli"] <= 400 for gpu in free)
    assert len(json.loads(live.eelctl("gpus", "--limit", 2, "-o", "json").stdout)) == 2
    assert fails(live, 4, "gpus", "--node", "nowhere").count("nowhere") == 1


def test_workloads_with_filters_and_pages(live):
    request = ResourceRequest(cpu_milli=1, gpu_count=1, gpu_milli=1000, gpu_models=("T4",))
    crowd = [
        SubmitWorkloadRequest(
            workload_id=f"crowd-{number}",
            spec=WorkloadSpec(name=f"crowd-{number}", request=request, namespace="crowd"),
        )
        for number in range(CROWD)
    ]
    live.submit(crowd)
    listed = json.loads(live.eelctl("workloads", "--namespace", "crowd", "-o", "json").stdout)
    assert sorted(w["workload_id"] for w in listed) == sorted(w.workload_id for w in crowd)
    times = [w["submitted_ns"] for w in listed]
    assert times == sorted(times)
    limited = json.loads(live.eelctl("workloads", "--namespace", "crowd", "--limit", 3, "-o", "json").stdout)
    assert limited == listed[:3]
    first = live.operators.list_workloads(ListWorkloadsRequest(namespace="crowd", page_size=7), timeout=5.0)
    assert (len(first.workloads), first.total) == (7, CROWD)
    filters = (
        ("--user", "ann"),
        ("--queue", "calm"),
        ("--phase", "placed", "--name", "svc"),
        ("--node", "big-0", "--name", "svc"),
    )
    for done in together(lambda arguments: live.eelctl("workloads", *arguments, "-o", "json"), filters):
        assert [workload["workload_id"] for workload in json.loads(done.stdout)] == ["svc-1"]
    as_json, as_yaml, table = both(live, "workloads", "--namespace", "prod")
    assert as_json == as_yaml
    assert table.splitlines()[0].split()[0] == "ID"
    assert "4 CPU, 8 GiB, 0.5 GPU (G2)" in live.eelctl("workloads", "--namespace", "prod", "-o", "wide").stdout
    assert "--all" in fails(live, 2, "workloads", "--all", "--phase", "placed")
    name = as_json[0]["spec"]["name"]
    assert json.loads(live.eelctl("get", name, "-o", "json").stdout)["workload_id"] == "svc-1"
    watched = live.eelctl("workloads", "--watch", "--namespace", "prod", "--limit", 1, "-o", "json").stdout
    assert json.loads(watched)["workload_id"] == "svc-1"


def test_queue(live):
    as_json, as_yaml, table = both(live, "queue", "--reason", "gpu_count")
    (row,) = [row for row in as_json["waiting"] if row["workload"]["workload_id"] == "wait"]
    assert row["constraint"] == "gpu_count"
    assert 0.0 < row["waits_s"] < 3600.0
    assert [one["workload"]["workload_id"] for one in as_yaml["waiting"]] == [
        one["workload"]["workload_id"] for one in as_json["waiting"]
    ]
    (reason,) = as_json["reasons"]
    assert f"{reason['first']}, the first of them: {reason['remedy']}" in table
    assert "To help: " in reason["remedy"]
    places = json.loads(live.eelctl("queue", "-o", "json").stdout)["waiting"]
    assert [row["place"] for row in places] == list(range(1, len(places) + 1))
    sums = json.loads(live.eelctl("queue", "--by", "reason", "-o", "json").stdout)
    assert {one["reason"]: one["workloads"] for one in sums}["gpu_count"] == len(as_json["waiting"])


def test_get(live):
    as_json, as_yaml, lines = both(live, "get", "svc-1")
    assert as_json == as_yaml
    assert as_json["spec"]["labels"] == {"team": "a"}
    assert as_json["phase"] == "placed"
    assert [p["replica"] for p in as_json["placements"]] == [0, 1]
    assert lines.startswith("svc-1: placed\n")
    assert "replica 1" in lines
    assert "pending (gpu_count: no node has enough whole GPUs free)" in live.eelctl("get", "wait").stdout
    assert "nobody" in fails(live, 4, "get", "nobody")


def test_submit_from_flags(live):
    dry = live.eelctl("submit", "--id", "dry", "--name", "dry", "--cpu", 1, "--dry-run")
    assert dry.stdout.startswith("dry run: nothing was changed\ndry: placed\n")
    fails(live, 4, "get", "dry")
    flags = ("submit", "--id", "flags", "--name", "flags", "--cpu", "500m", "--memory", "1GiB", "-o", "json")
    first, again = (json.loads(live.eelctl(*flags).stdout) for _ in range(2))
    assert first == again
    assert first["spec"]["request"] == {
        "cpu_milli": 500,
        "memory_bytes": 2**30,
        "gpu_count": 0,
        "gpu_milli": 0,
        "gpu_models": [],
    }
    assert "another spec" in fails(live, 5, "submit", "--id", "flags", "--name", "flags", "--cpu", 7)
    drawn = json.loads(live.eelctl("submit", "--name", "drawn", "--cpu", 1, "-o", "json").stdout)
    assert drawn["workload_id"].startswith("w-")


def test_a_gpu_goes_by_any_of_its_names(live):
    tried = ("submit", "--dry-run", "--name", "n", "--gpus", 1, "--cpu", 1, "--gpu-model")
    shown = json.loads(live.eelctl(*tried, "openb-g2,NVIDIA H100 80GB HBM3", "-o", "json").stdout)
    assert shown["spec"]["request"]["gpu_models"] == ["G2", "H100-80GB-HBM3"]
    said = fails(live, 5, *tried, "H10O")
    assert "--gpu-model: is 'H10O'" in said
    assert "did you mean H100-80GB-HBM3" in said
    assert len(json.loads(live.eelctl("gpus", "--gpu-model", "OPENB G2", "-o", "json").stdout)) == 8
    for name in ("NVIDIA-H100-80GB-HBM3", "h100", "H100-SXM5-80GB"):
        live.eelctl("whatif", "--add", f"1:{name}:8")
    assert "did you mean A100-SXM4-40GB" in fails(live, 5, "capacity", "--node", "a100:8")


def test_submit_from_yaml(live):
    path = live.folder / "jobs.yaml"
    path.write_text(
        "id: y-1\nname: one\nrequest: {cpu: 1.5, memory: 2GiB, gpu_share: 0.25, gpus: 1, gpu_models: [G2]}\n"
        "---\nid: y-2\nname: two\nkind: training_job\nreplicas: 2\nrequest: {cpu_milli: 1000}\n"
    )
    lines = live.eelctl("submit", "-f", path).stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["y-1: placed", "y-2: placed"]
    told = live.eelctl("get", "y-1", "-o", "yaml").stdout
    assert yaml.safe_load(told)["spec"]["request"]["gpu_milli"] == 250
    again = live.eelctl("submit", "-f", "-", "-o", "yaml", stdin=told).stdout
    same = [{key: value for key, value in yaml.safe_load(text).items() if key != "power_w"} for text in (again, told)]
    assert same[0] == same[1], "what get prints can be submitted again, and is the same workload"


BAD_DOCUMENTS = (
    ("name: a\nrequest: {cpu: 1, gpu_shre: 0.5}\n", ("document 2", "request.gpu_shre", "gpu_milli")),
    ("name: a\nrequest: {cpu: lots}\n", ("document 2", "request.cpu", "lots", "2.5")),
    ("name: a\nkind: banana\nrequest: {cpu: 1}\n", ("document 2", "kind", "banana", "batch_job")),
    ("name: a\nrequest: {cpu: -1}\n", ("document 2", "request.cpu")),
    ("name: a\nrequest: {gpus: 2, gpu_share: 0.5}\n", ("document 2", "request.gpu_milli", "several GPUs")),
    ("name: a\n  request: : {\n", ("line 6, column 10", "correct the YAML")),
)


def test_a_bad_document_submits_nothing(live):
    def submit(number):
        path = live.folder / f"bad-{number}.yaml"
        path.write_text("id: never-1\nname: good\nrequest: {cpu: 1}\n---\n" + BAD_DOCUMENTS[number][0])
        return fails(live, 5, "submit", "-f", path)

    for number, said in enumerate(together(submit, range(len(BAD_DOCUMENTS)))):
        for words in (f"bad-{number}.yaml", *BAD_DOCUMENTS[number][1]):
            assert words in said
    fails(live, 4, "get", "never-1")


def test_an_impossible_task_is_refused_with_the_limit(live):
    cases = {
        "--gpus: is 9; no registered node has more than 4": ("--gpus", 9),
        "--gpu-model: is 'Z9'": ("--gpus", 1, "--gpu-model", "Z9"),
        "--memory: is ": ("--memory", "2TiB"),
    }

    def submit(needs):
        return fails(live, 5, "submit", "--id", "never-2", "--name", "never", *needs)

    for words, said in zip(cases, together(submit, cases.values()), strict=True):
        assert words in said
    fails(live, 4, "get", "never-2")


def test_explain(live):
    as_json, as_yaml, lines = both(live, "explain", "svc-1")
    assert as_json == as_yaml
    terms = {term["name"]: term["cost_w"] for term in as_json["replicas"][0]["candidates"][0]["terms"]}
    assert sum(terms.values()) == pytest.approx(as_json["replicas"][0]["candidates"][0]["cost_w"])
    assert "Cost in watts-equivalent" in lines
    assert "1 node ruled out by gpu model" in lines
    waiting = live.eelctl("explain", "wait").stdout
    assert waiting.startswith("wait (batch_job wait) is pending: gpu_count:")
    assert "What would help:" in waiting
    assert "nobody" in fails(live, 4, "explain", "nobody")


def test_plan(live):
    live.until(lambda: "waiting" not in live.eelctl("plan", "small").stdout, what="the plan is applied")
    as_json, as_yaml, table = both(live, "plan", "small")
    assert as_json == as_yaml
    assigned = [each["workload_id"] for each in as_json[0]["plan"]["assignments"]]
    assert "fill" in assigned, "beside what other tests left there"
    assert as_json[0]["applied"]["status"] == "applied"
    epoch = str(as_json[0]["plan"]["epoch"])
    assert table.splitlines()[1].split()[:4] == ["small", epoch, epoch, "applied"]
    assert len(live.eelctl("plan", "--no-headers").stdout.splitlines()) == 3
    assert "nowhere" in fails(live, 4, "plan", "nowhere")


def test_policy(live):
    before = json.loads(live.eelctl("policy", "get", "-o", "json").stdout)
    changed = live.eelctl(
        "policy", "set", "--objective", "energy", "--pool-mode", "lab=enforce", "--ahead", "-o", "json"
    ).stdout
    as_json, as_yaml, lines = both(live, "policy", "get")
    assert json.loads(changed) == as_json == as_yaml
    assert (as_json["objective"], as_json["revision"]) == ("energy", before["revision"] + 1)
    assert as_json["pools"] == [{"pool": "lab", "mode": "enforce", "partitioned": False}]
    assert as_json["send_interval_s"] == before["send_interval_s"]
    assert "pool lab" in lines
    back = json.loads(
        live.eelctl("policy", "set", "--objective", "balanced", "--pool-mode", "lab=observe", "-o", "json").stdout
    )
    assert back["weights"] == before["weights"]
    assert "use one of observe, enforce" in fails(live, 2, "policy", "set", "--pool-mode", "lab=maybe")
    fails(live, 2, "policy", "set")


def test_cancel(live):
    for name in ("c-1", "c-2"):
        live.eelctl("submit", "--id", name, "--name", name, "--cpu", 1)
    assert live.eelctl("cancel", "c-1", "c-2", "--yes").stdout == "c-1: cancelled\nc-2: cancelled\n"
    assert json.loads(live.eelctl("cancel", "c-1", "-o", "json").stdout)["phase"] == "cancelled"
    assert "nobody" in fails(live, 4, "cancel", "nobody")


def test_top(live):
    picture = live.eelctl("top", "--once").stdout
    for words in ("3 ready, 10 GPUs", "waiting for", "busiest nodes", "samples"):
        assert words in picture
    assert "\x1b" not in picture
    summary = json.loads(live.eelctl("top", "--once", "-o", "json").stdout)
    assert (summary["nodes_ready"], summary["gpus"], summary["samples_lost"]) == (3, 10, 0)
    assert yaml.safe_load(live.eelctl("top", "-o", "yaml").stdout)["nodes_ready"] == 3


TRACE = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos\nr-1,1000,1024,1,300,G2,LS\nr-2,500,256,0,0,,BE\n"


def test_overview(live):
    found = json.loads(live.eelctl("overview", "-o", "json").stdout)
    gpus = json.loads(live.eelctl("gpus", "-o", "json").stdout)
    assert found["capacity"]["gpus"] == len(gpus)
    assert found["capacity"]["held_milli"] == sum(gpu.get("allocated_milli", 0) for gpu in gpus)
    assert sum(one["held_milli"] for one in found["consumers"]) == found["capacity"]["held_milli"]
    assert {one["user"] for one in found["consumers"]} >= {"ann"}
    lines = live.eelctl("overview").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("NEEDS ATTENTION") for line in lines)


def test_replay(live):
    path = live.folder / "tasks.csv"
    path.write_text(TRACE)
    done = live.eelctl("replay", "--yes", "--pods", path, "--prefix", "t/", "-o", "json")
    figures = json.loads(done.stdout)
    assert (figures["tasks"], figures["placed"], figures["refused"], figures["repeats"]) == (2, 2, 0, 0)
    assert "answered   2 of 2" in live.eelctl("replay", "--yes", "--pods", path, "--prefix", "t/").stdout
    found = live.operators.list_workloads(ListWorkloadsRequest(namespace="openb"), timeout=5.0).workloads
    assert sorted(w.workload_id for w in found) == ["t/r-1", "t/r-2"], "a repeated replay places nothing twice"
    task = live.operators.get_workload(GetWorkloadRequest(workload_id="t/r-1"), timeout=5.0).workload
    assert (task.phase, task.spec.request.gpu_models, task.spec.queue) == (WorkloadPhase.PLACED, ("G2",), "ls")
    for row, column in (
        ("r-3,1000,many,1,300,G2,LS", "memory_mib"),
        ("r-1,1,1,0,0,,BE", "name"),
        ("r-4,1", "memory_mib"),
    ):
        path.write_text(f"{TRACE}{row}\n")
        said = fails(live, 5, "replay", "--pods", path, "--prefix", "bad/")
        assert f"{path}, line 4, column {column}" in said
    path.write_text(TRACE + "r-5,1000,1024,8,1000,G2,LS\n")
    refused = live.eelctl("replay", "--yes", "--pods", path, "--prefix", "t/", code=1)
    assert "refused t/r-5" in refused.stderr
    assert "1 task was refused" in refused.stderr
    listed = live.operators.list_workloads(ListWorkloadsRequest(namespace="openb"), timeout=5.0).workloads
    assert len(listed) == 2
    assert "holds both files" in fails(live, 4, "replay", "--trace", live.folder)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(live, shell):
    assert "_EELCTL_COMPLETE" in live.eelctl("completion", shell).stdout
    words = {"COMP_WORDS": "eelctl wor", "COMP_CWORD": "wor" if shell == "fish" else "1"}
    offered = live.eelctl(env={"_EELCTL_COMPLETE": f"{shell}_complete", **words}).stdout
    assert "workloads" in offered
    assert "nodes" not in offered


def test_a_wrong_command_line_is_reported_by_its_usage(live):
    cases = (
        ("frobnicate",),
        ("get",),
        ("submit", "--gpus", "two"),
        ("nodes", "--state", "sad"),
        ("-o", "xml", "nodes"),
    )
    for said in together(lambda arguments: fails(live, 2, *arguments), cases):
        assert "Usage: eelctl" in said


def test_nobody_answers(live):
    address = free_address()
    cases = (("nodes",), ("submit", "--name", "a", "--cpu", 1), ("top", "--once"), ("policy", "get"))
    for said in together(lambda arguments: fails(live, 3, *arguments, address=address), cases):
        assert f"no controller answers at {address}" in said
        assert "start eelgrid-controller" in said
    assert "--insecure" in fails(live, 2, "nodes", address="192.0.2.1:7443")
