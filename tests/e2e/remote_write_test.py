"""Remote write tried for real: Prometheus and VictoriaMetrics take it, figures are those of the pages, and an outage loses nothing.

A Prometheus that only receives stands beside one that scrapes the same daemons, so that what is written can be compared
with what is scraped, query by query.
"""

import contextlib
import itertools
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from tests.builders.cluster import build_request
from tests.e2e.processes import STOP_S, Cluster, fleet_of, free_address, metric, scrape

PROGRAMS = ("prometheus", "victoria-metrics")
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
WITHIN_S = 90.0
OF_NODES = '{__name__=~"eelgrid_gpu_.*|eelgrid_host_.*|eelgrid_node_.*", job="eelgrid-agent"}'
WRITTEN = "eelgrid_remote_write_samples_total"


class Receiver:
    """A program with an address of its own that can be stopped, killed and started again on its data."""

    def __init__(self, folder, name, write_path):
        self.folder, self.name = folder, name
        self.address = free_address()
        self.url = f"http://{self.address}{write_path}"
        self.process = None

    def command(self):
        """How it is started."""
        if self.name == "victoria-metrics":
            return (
                "victoria-metrics",
                f"-httpListenAddr={self.address}",
                f"-storageDataPath={self.folder / 'vm'}",
                "-retentionPeriod=5y",
                "-search.latencyOffset=0s",
                "-memory.allowedBytes=128MB",
            )
        config = self.folder / "receive.yml"
        config.write_text("{}")
        return (
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={self.folder / 'tsdb'}",
            f"--web.listen-address={self.address}",
            "--web.enable-remote-write-receiver",
        )

    def start(self):
        """Runs it."""
        with (self.folder / f"{self.name}.log").open("ab") as out:
            self.process = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def kill(self):
        """SIGKILL, and gone when this returns."""
        self.process.kill()
        self.process.wait(STOP_S)

    def result(self, query, at_s=None, path="query", **more):
        """What it answers; none while it does not."""
        given = {"query": query, "nocache": 1, **({} if at_s is None else {"time": at_s}), **more}
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(given)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.loads(answer.read())["data"]["result"]
        except (urllib.error.URLError, ConnectionError):
            return []

    def points(self, name, within_s):
        """Times and values of all samples of a metric, by device."""
        found = self.result(f"{name}[{int(within_s)}s]", time.time() + 5.0)
        return {one["metric"].get("gpu", ""): [(float(at), float(v)) for at, v in one["values"]] for one in found}


@contextlib.contextmanager
def receiving(folder, name, write_path="/api/v1/write"):
    """A receiver that runs until the block ends."""
    folder.mkdir(exist_ok=True)
    receiver = Receiver(folder, name, write_path)
    receiver.start()
    try:
        yield receiver
    finally:
        receiver.kill()


def counted(cluster, result):
    family = scrape(cluster.metrics)[WRITTEN.removesuffix("_total")]
    return sum(s.value for s in family.samples if s.name == WRITTEN and s.labels["result"] == result)


def start(cluster, tmp_path, url, *, interval="1"):
    controller = cluster.controller("--remote-write", url, "--remote-write-interval", interval,
                                    "--remote-write-label", "cluster=berlin")  # fmt: skip
    agent = cluster.agent(fleet_of(tmp_path / "fleet.json", [NODE]), "--energy-window", "2")
    cluster.until_ready(1)
    cluster.set_policy(send_interval_s=1.0)
    cluster.operators.submit_workload(build_request("alpha", name="alpha", namespace="ml"), timeout=10.0)
    return controller, agent


def page_of(address):
    """Values of a page by name and labels."""
    return {
        (sample.name, frozenset((name, value) for name, value in sample.labels.items() if value)): sample.value
        for family in scrape(address).values()
        for sample in family.samples
    }


def stored(receiver, selector):
    """The newest values by name and labels of the page, without what names the target."""
    found = {}
    for one in receiver.result(selector):
        labels = dict(one["metric"])
        name = labels.pop("__name__")
        assert labels.pop("cluster") == "berlin"
        assert labels.pop("job") in ("eelgrid-agent", "eelgrid-controller")
        labels.pop("instance")
        found[name, frozenset(labels.items())] = float(one["value"][1])
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_series_have_the_names_the_labels_and_the_figures_of_the_pages(tmp_path, name):
    with Cluster(tmp_path) as cluster, receiving(tmp_path / "r", name) as receiver:
        _, agent = start(cluster, tmp_path, receiver.url)
        cluster.until(
            lambda: receiver.result('eelgrid_workload_gpu_energy_joules_total{owner="workload"}'),
            within_s=WITHIN_S,
            what="energy of the workload came",
        )
        # All that the agent has ever measured came, and its page stands still as soon as it is stopped.
        told = page_of(cluster.agents[agent]["metrics"])
        cluster.until(
            lambda: (
                {key for key in told if key[0].startswith("eelgrid_gpu_power_watts")}
                <= stored(receiver, OF_NODES).keys()
            ),
            within_s=WITHIN_S,
            what="devices came",
        )
        found = stored(receiver, OF_NODES)
        unknown = {
            key
            for key in found.keys() - told.keys()
            # The page begins to show these when they are first looked at, in whichever order.
            if not key[0].startswith("eelgrid_gpu_unattributed")
        }
        assert unknown == set(), "what is written is on the page under the same name and labels"
        steady = [key for key in found if key[0].endswith(("_info", "_limit_watts", "_size_bytes", "_gpu_up"))]
        assert len(steady) > 12
        assert {key: found[key] for key in steady} == {key: told[key] for key in steady}
        # The agent shows each tick; one that was on a page is written with the same figure for every device.
        pages = []

        def is_written():
            pages.append({
                dict(labels)["gpu"]: value
                for (metric_name, labels), value in page_of(cluster.agents[agent]["metrics"]).items()
                if metric_name == "eelgrid_gpu_energy_joules_total"
            })  # fmt: skip
            points = receiver.points("eelgrid_gpu_energy_joules_total", 600)
            written = {gpu: [value for _, value in found] for gpu, found in points.items()}
            return any(
                len(page) == 4
                and all(
                    any(one == pytest.approx(value, rel=1e-12) for one in written.get(gpu, ()))
                    for gpu, value in page.items()
                )
                for page in pages
            )

        cluster.until(is_written, within_s=WITHIN_S, what="the figures of a page")
        # The controller's page, too.
        own = stored(receiver, 'eelgrid_nodes{job="eelgrid-controller"}')
        assert own == {key: value for key, value in page_of(cluster.metrics).items() if key[0] == "eelgrid_nodes"}


def test_energy_of_workloads_adds_up_to_that_of_devices_over_a_restart_of_the_controller(tmp_path):
    with Cluster(tmp_path) as cluster, receiving(tmp_path / "r", "prometheus") as receiver:
        controller, agent = start(cluster, tmp_path, receiver.url)

        def windows():
            found = receiver.points("eelgrid_workload_gpu_energy_joules_total", 600)
            return max((len(points) for points in found.values()), default=0)

        cluster.until(lambda: windows() > 1, within_s=WITHIN_S, what="windows came")
        before = windows()
        # Right after one: what a killed controller has not sent yet is in its ledger alone.
        cluster.until(lambda: windows() > before, within_s=WITHIN_S, what="another window came")
        controller.kill()
        killed = windows()
        cluster.controller("--remote-write", receiver.url, "--remote-write-interval", "1",
                           "--remote-write-label", "cluster=berlin")  # fmt: skip
        cluster.until(lambda: windows() > killed + 1, within_s=WITHIN_S, what="windows went on after the kill")
        agent.stop()

        def balance():
            """Joules of the ledger, and of the counters over resets, with what had no owner."""
            at_s = time.time() + 5.0
            ledger = metric(cluster.metrics, "eelgrid_ledger_energy_joules_total")
            total = 0.0
            for name in ("eelgrid_workload_gpu_energy_joules_total", "eelgrid_gpu_unattributed_energy_joules_total"):
                for one in receiver.result(f"{name}[10m]", at_s):
                    values = [float(value) for _, value in one["values"]]
                    assert values[0] == 0.0, "a counter begins at 0"
                    total += sum(b - a if b >= a else b for a, b in itertools.pairwise(values))
            return ledger, total

        def is_balanced():
            ledger, total = balance()
            return ledger > 0.0 and total == pytest.approx(ledger, rel=1e-9)

        cluster.until(is_balanced, within_s=WITHIN_S, what=f"energy adds up: {balance()}")
        assert receiver.result("sum(resets(eelgrid_workload_gpu_energy_joules_total[10m]))", time.time() + 5.0)
        assert counted(cluster, "dropped") == 0


def test_an_outage_of_the_receiver_loses_no_sample_within_the_buffer(tmp_path):
    with Cluster(tmp_path) as cluster, receiving(tmp_path / "r", "prometheus") as receiver:
        start(cluster, tmp_path, receiver.url)
        cluster.until(lambda: receiver.points("eelgrid_gpu_power_watts", 600), within_s=WITHIN_S, what="samples came")
        receiver.kill()
        cluster.until(
            lambda: metric(cluster.metrics, "eelgrid_remote_write_buffered_samples") > 1000,
            within_s=WITHIN_S,
            what="samples wait",
        )
        receiver.start()
        began_s = time.time()

        def resumed():
            points = receiver.points("eelgrid_gpu_power_watts", 600)
            return points if points and min(p[-1][0] for p in points.values()) > began_s + 5.0 else None

        points = cluster.until(resumed, within_s=WITHIN_S, what="samples of after the outage came")
        assert len(points) == 4
        for found in points.values():
            times = [at_s for at_s, _ in found]
            assert times == sorted(times)
            # Samples are a second apart, and none of the outage is missing; agents' ticks are not exact.
            assert max(b - a for a, b in itertools.pairwise(times)) < 3.0
        assert counted(cluster, "dropped") == 0
        assert metric(cluster.metrics, "eelgrid_remote_write_requests_total") > 0


def test_a_wrong_address_is_told_and_costs_the_controller_nothing(tmp_path):
    with Cluster(tmp_path) as cluster, receiving(tmp_path / "r", "prometheus", "/api/v2/nothing") as receiver:
        controller, _ = start(cluster, tmp_path, receiver.url)
        cluster.until(lambda: counted(cluster, "refused") > 0, within_s=WITHIN_S, what="refusals are counted")
        assert counted(cluster, "written") == 0
        assert "remote_write=refused" in controller.text()
        assert controller.stop() == 0
