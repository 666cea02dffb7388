"""A placement's decision time leads to its explanation by an exemplar, as a real Prometheus keeps it; and a page without a disk."""

import asyncio
import json
import shutil
import signal
import socket
import threading
import time
import urllib.parse
import urllib.request
from dataclasses import replace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.builders.cluster import build_node, build_request
from tests.builders.server import run_controller

from eelgrid_controller.server.http import metrics_server
from eelgrid_protos.messages import ExplainWorkloadRequest
from eelgrid_protos.openmetrics import prefers_openmetrics

OF_PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "wanted_openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        (OF_PROMETHEUS, True),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=2.0.0", False),
        ("application/openmetrics-text;q=0.1,text/plain;q=0.9", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=much", False),
        (";;,=;q=1", False),
    ],
)
def test_the_format_is_what_the_scraper_likes(accept, wanted_openmetrics):
    assert prefers_openmetrics(accept) is wanted_openmetrics


def got(address, accept=""):
    request = urllib.request.Request(f"http://{address}/metrics", headers={"aCCept": accept} if accept else {})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def exemplars(text):
    return {
        sample.exemplar.labels["workload"]: sample.exemplar.value
        for family in parse_openmetrics(text)
        for sample in family.samples
        if sample.exemplar is not None and sample.name == "eelgrid_decision_duration_seconds_bucket"
    }


async def test_both_formats_tell_the_same_and_one_has_exemplars_that_can_be_explained(tmp_path):
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node("n1"))
        await rig.operators.submit_workload(build_request("run-7"))
        kind, opened = await asyncio.to_thread(got, rig.metrics, OF_PROMETHEUS)
        assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        (found,) = exemplars(opened).items()
        assert found[0] == "run-7"
        assert found[1] > 0.0
        explained = await rig.operators.explain_workload(ExplainWorkloadRequest(workload_id=found[0]))
        assert explained.explanation.workload.placements[0].node_name == "n1"
        kind, text = await asyncio.to_thread(got, rig.metrics)
        assert kind.startswith("text/plain; version=")
        assert "run-7" not in text, "this format has no exemplars"
        # Series appear between two scrapes and never go: pages are compared where none came meanwhile.
        _, again = await asyncio.to_thread(got, rig.metrics, OF_PROMETHEUS)
        while names(parse_openmetrics(again)) != names(parse_openmetrics(opened)):
            opened = again
            _, text = await asyncio.to_thread(got, rig.metrics)
            _, again = await asyncio.to_thread(got, rig.metrics, OF_PROMETHEUS)
        assert names(parse_text(text)) == names(parse_openmetrics(opened))
        assert not any(name.endswith("_created") for name in names(parse_text(text)))


def names(families):
    return {sample.name for family in families for sample in family.samples}


async def test_what_is_only_imagined_and_what_is_too_long_has_no_exemplar(tmp_path):
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node("n1"))
        await rig.operators.submit_workload(replace(build_request("imagined"), dry_run=True))
        await rig.operators.submit_workload(build_request("l" * 128))
        assert exemplars((await rig.controller.metrics.render_page(opened=True)).decode()) == {}
        await rig.operators.submit_workload(build_request("l" * 120))
        assert set(exemplars((await rig.controller.metrics.render_page(opened=True)).decode())) == {"l" * 120}


async def test_while_the_disk_stalls_the_page_comes_with_its_lag_and_without_the_state(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_server, "_SETTLED_WITHIN_S", 0.05)
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node("n1"))
        journal, gate = rig.controller.loop.journal, threading.Event()
        append, rig.controller.loop._writer._quick = journal.append, 0

        def stalls(entries, audited=()):
            gate.wait(10.0)
            return append(entries, audited)

        monkeypatch.setattr(journal, "append", stalls)
        begun_s = time.monotonic()
        waits = asyncio.create_task(rig.operators.submit_workload(build_request("w1")))
        await asyncio.sleep(0.3)
        text = (await rig.controller.metrics.render_page()).decode()
        (lag,) = [s.value for f in parse_text(text) for s in f.samples if s.name == "eelgrid_journal_lag_seconds"]
        assert 0.0 < lag <= time.monotonic() - begun_s
        assert "eelgrid_workloads{" not in text
        assert "eelgrid_plan_changes_total" not in text
        gate.set()
        await waits
        text = (await rig.controller.metrics.render_page()).decode()
        assert "eelgrid_journal_lag_seconds 0.0" in text
        assert 'eelgrid_workloads{phase="placed"} 1.0' in text


CONFIG = """
global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs:
  - job_name: controller
    static_configs: [{targets: ["%s"]}]
"""


def asked(address, path, **query):
    """What Prometheus answers; an empty list while it is not there."""
    try:
        with urllib.request.urlopen(
            f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=5
        ) as got:
            return json.load(got)["data"]
    except OSError:
        return []


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not on the PATH (Debian: prometheus)")
async def test_a_real_prometheus_keeps_the_exemplar_of_a_decision(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = [
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address={own}",
        "--enable-feature=exemplar-storage",
        "--log.level=warn",
    ]
    async with run_controller(tmp_path / "controller") as rig:
        await rig.join(build_node("n1"))
        await rig.operators.submit_workload(build_request("run-7"))
        (tmp_path / "prometheus.yml").write_text(CONFIG % rig.metrics)
        with (tmp_path / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec("prometheus", *flags, cwd=tmp_path, stdout=log, stderr=log)
        try:
            query, now_s, found = "eelgrid_decision_duration_seconds_bucket", time.time(), []
            async with asyncio.timeout(30.0):
                while not found:
                    assert process.returncode is None, (tmp_path / "log").read_text()
                    found = await asyncio.to_thread(
                        asked, own, "query_exemplars", query=query, start=now_s - 60, end=now_s + 60
                    )
                    await asyncio.sleep(0.2)
            (series,) = found
            assert [one["labels"] for one in series["exemplars"]] == [{"workload": "run-7"}]
            up = await asyncio.to_thread(asked, own, "query", query="up")
            assert up["result"][0]["value"][1] == "1", (tmp_path / "log").read_text()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                await process.wait()
