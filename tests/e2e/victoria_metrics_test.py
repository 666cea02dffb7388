"""A long-term store tried for real: VictoriaMetrics scrapes our daemons, and a Prometheus sends on what it scraped.

Both ways end in the same store, told apart by the label `way`; joules by namespace must be the ledger's, over a controller
that is killed between.
"""

import contextlib
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request

import pytest
from tests.builders.cluster import build_request
from tests.e2e.processes import STOP_S, Cluster, fleet_of, free_address

from eelgrid_controller.energy.ledger import namespace_label
from eelgrid_protos.messages import QueryEnergyRequest

PROGRAMS = ("victoria-metrics", "prometheus")
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, PROGRAMS)),
    reason=f"no {' or no '.join(PROGRAMS)} here; Debian has packages of these names",
)
NODE = {
    "name": "gpu-0",
    "cpu_milli": 64_000,
    "memory_bytes": 2**37,
    "gpus": [{"product": "h100-sxm5-80gb", "count": 4}],
}
WAYS = {"scrape", "write"}
JOULES = "eelgrid_ledger_energy_joules_total"
HOUR_NS = 3600 * 10**9
WITHIN_S = 120.0


@contextlib.contextmanager
def started(folder, *command):
    """A program that runs until the block ends; its log is named after it."""
    with (folder / f"{command[0]}.log").open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=folder)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)


def written(path, way, jobs, **more):
    """A configuration that scrapes these each second, as docs/how-to/energy-ledger.md has it."""
    document = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "external_labels": {"way": way}},
        "scrape_configs": [
            {"job_name": name, "honor_labels": True, "static_configs": [{"targets": [target]}]}
            for name, target in jobs.items()
        ],
    }
    path.write_text(json.dumps(document | more))
    return path


@contextlib.contextmanager
def store(folder, jobs):
    """VictoriaMetrics that scrapes, and a Prometheus that scrapes and writes to it; the store's address."""
    address, prometheus = free_address(), free_address()
    scraped = written(folder / "scrape.yml", "scrape", jobs)
    kept = {"source_labels": ["__name__"], "regex": "eelgrid_ledger_.*|eelgrid_gpu_energy_.*", "action": "keep"}
    remote = [
        {
            "url": f"http://{address}/api/v1/write",
            "write_relabel_configs": [kept],
            "queue_config": {"batch_send_deadline": "1s"},
        }
    ]
    sent = written(folder / "prometheus.yml", "write", jobs, remote_write=remote)
    victoria = (
        "victoria-metrics",
        f"-httpListenAddr={address}",
        f"-storageDataPath={folder / 'store'}",
        "-retentionPeriod=5y",
        f"-promscrape.config={scraped}",
        "-search.latencyOffset=0s",
        "-memory.allowedBytes=128MB",
    )
    with (
        started(folder, *victoria),
        started(
            folder,
            "prometheus",
            f"--config.file={sent}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address={prometheus}",
        ),
    ):
        yield address


def values(address, query, *labels):
    """What the store answers now, by the values of these labels."""
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query, 'nocache': 1})}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        found = json.loads(answer.read())["data"]["result"]
    return {tuple(one["metric"].get(label, "") for label in labels): float(one["value"][1]) for one in found}


def by_namespace(cluster):
    """Joules in the ledger, by the names that the metric has for them."""
    now_ns = time.time_ns()
    request = QueryEnergyRequest(begin_ns=now_ns - HOUR_NS, end_ns=now_ns + HOUR_NS, group_by=("kind", "namespace"))
    answer = cluster.operators.query_energy(request, timeout=10.0)
    parts = [(namespace_label(*group.values), group.spent) for group in answer.groups]
    parts += [("(unallocated)", answer.unallocated), ("(unattributed)", answer.unattributed)]
    found_mj = {}
    for name, spent in parts:
        energy_mj = spent.bare_idle_mj + spent.context_idle_mj + spent.active_mj
        found_mj[name] = found_mj.get(name, 0) + energy_mj
    assert sum(found_mj.values()) == answer.measured_mj
    return {name: energy_mj / 1000.0 for name, energy_mj in found_mj.items() if energy_mj}


def submit(cluster, name, **spec):
    cluster.operators.submit_workload(build_request(name, name=name, **spec), timeout=10.0)


def test_joules_by_namespace_are_the_ledgers_in_a_long_term_store_by_both_ways(tmp_path):
    with Cluster(tmp_path) as cluster:
        controller = cluster.controller()
        agent = cluster.agent(fleet_of(tmp_path / "fleet.json", [NODE]), "--energy-window", "1")
        cluster.until_ready(1)
        submit(cluster, "alpha", namespace="ml")
        submit(cluster, "beta", namespace="web")
        jobs = {"eelgrid-controller": cluster.metrics, "eelgrid-agent": cluster.agents[agent]["metrics"]}
        with store(tmp_path, jobs) as address:

            def known(above_j):
                found = values(address, f'{JOULES}{{namespace="ml"}}', "way")
                return found if {way for (way,), joules in found.items() if joules > above_j} == WAYS else None

            before = cluster.until(lambda: known(0.0), within_s=WITHIN_S, what="both ways told of joules")
            controller.kill()
            cluster.controller()
            cluster.until(
                lambda: known(max(before.values())), within_s=WITHIN_S, what="they went on after the controller's end"
            )
            devices = values(address, "count by (way) (eelgrid_gpu_energy_joules_total)", "way")
            assert devices == {("scrape",): 4.0, ("write",): 4.0}
            # Without an agent the ledger stands still, and the store comes to what it has.
            agent.stop()

            def differing():
                expected = {(way, name): joules for way in WAYS for name, joules in by_namespace(cluster).items()}
                found = values(address, f"sum by (way, namespace) ({JOULES})", "way", "namespace")
                return {
                    key: (expected.get(key), found.get(key))
                    for key in expected.keys() | found.keys()
                    if found.get(key) != pytest.approx(expected.get(key))
                }

            cluster.until(lambda: not differing(), within_s=WITHIN_S, what="the store has the ledger's sums")
            assert {"ml", "web", "(unallocated)"} <= by_namespace(cluster).keys()
            # No counter went back when the controller began anew.
            resets = values(address, f"sum by (way) (resets({JOULES}[1h]))", "way")
            assert resets == {("scrape",): 0.0, ("write",): 0.0}
