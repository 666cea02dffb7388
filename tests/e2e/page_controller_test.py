"""The page of a controller that runs: what agents report and what was decided stand on it, over restarts and TLS."""

import http.client
import json
import re
import ssl
import urllib.error
import urllib.request

import pytest
import trustme
from tests.e2e.processes import Cluster, fleet_of

from eelgrid_protos.messages import ResourceRequest, SubmitWorkloadRequest, WorkloadSpec
from eelgrid_protos.transport import TlsFiles

NODE = {"name": "solo", "cpu_milli": 8000, "memory_bytes": 2**35, "gpus": [{"product": "a10", "count": 2}]}


def picture(address):
    """Everything, as a page hears it first."""
    with urllib.request.urlopen(f"http://{address}/events", timeout=10) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                return json.loads(line[6:])
    raise AssertionError("the stream ended before its first frame")


def answer(address, path):
    """What the page asks for."""
    with urllib.request.urlopen(f"http://{address}/data/{path}", timeout=10) as found:
        return json.load(found)


def test_a_running_controller_shows_its_fleet_and_says_why(cluster):
    controller = cluster.controller("--page", "127.0.0.1:0")
    address = controller.said("serving listen=")["page"]
    cluster.set_policy(sample_interval_s=0.5, send_interval_s=0.5)
    cluster.agent(fleet_of(cluster.folder / "fleet.json", [NODE]))
    cluster.until(lambda: cluster.summary().nodes_ready == 1, what="the node joins")
    request = ResourceRequest(cpu_milli=1000, memory_bytes=2**30, gpu_count=1, gpu_milli=1000)
    spec = WorkloadSpec(name="job", request=request)
    (placement,) = cluster.operators.submit_workload(
        SubmitWorkloadRequest(workload_id="w-page", spec=spec), timeout=10.0
    ).workload.placements

    def shown():
        seen = picture(address)
        powers, held = seen["gpus"]["power_w"], seen["gpus"]["held_milli"]
        return seen if len(powers) == 2 and min(powers) > 0 and sum(held) == 1000 else None

    seen = cluster.until(shown, what="the page has readings and the placement")
    assert seen["nodes"]["name"] == ["solo"]
    placed = [change for change in seen["changes"] if change[2:4] == ["placed", "w-page"]]
    assert [change[5] for change in placed] == [[placement.gpu_indexes[0], 1000]]
    why = answer(address, "workload?id=w-page")
    best = why["explained"][0]["candidates"][0]
    assert (best["node"], tuple(best["gpus"])) == (placement.node_name, placement.gpu_indexes)
    assert sum(cost_w for _, cost_w in best["terms"]) == pytest.approx(best["cost_w"], abs=1e-3)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        answer(address, "workload?id=nobody")
    assert answer(address, "promises") == {"services": [], "jobs": [], "left_out": 0}
    # A slow decision's exemplar leads to the same explanation.
    asked = urllib.request.Request(
        f"http://{cluster.metrics}/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"}
    )
    with urllib.request.urlopen(asked, timeout=10) as found:
        (told,) = set(re.findall(r'# \{workload="([^"]*)"\}', found.read().decode()))
    assert answer(address, f"workload?id={told}")["decision"] == placed[0][0]
    assert controller.stop() == 0

    # What an earlier run decided is read of the journal, by the same number.
    controller = cluster.controller("--page", "127.0.0.1:0")
    address = controller.said("serving listen=")["page"]
    seen = picture(address)
    assert seen["changes_from"] > placed[0][0]
    past = answer(address, f"past?before={seen['changes_from']}")
    assert [change for change in past["changes"] if change[3] == "w-page"] == placed
    assert not past["has_more"]
    assert controller.stop() == 0


def test_over_tls_only_who_has_a_certificate_of_the_authority_sees_the_page(tmp_path):
    authority, stranger = trustme.CA(), trustme.CA()
    tls = written(tmp_path / "ours", authority, "127.0.0.1")
    with Cluster(tmp_path, tls=tls) as cluster:
        address = cluster.controller("--page", "127.0.0.1:0").said("serving listen=")["page"]
        viewer = written(tmp_path / "viewer", authority, "viewer@example.org")
        foreign = written(tmp_path / "foreign", stranger, "viewer@example.org")

        def first_line(files, path):
            context = ssl.create_default_context(cafile=tls.authority)
            if files is not None:
                context.load_cert_chain(files.certificate, files.key)
            with urllib.request.urlopen(f"https://{address}{path}", timeout=10, context=context) as found:
                return found.readline()

        assert first_line(viewer, "/") == b"<!doctype html>\n"
        assert first_line(viewer, "/events").startswith(b"id: ")
        for files in (None, foreign):
            # Under TLS 1.3 a server refuses after the client thinks that the handshake is done.
            with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
                first_line(files, "/")
        with pytest.raises((urllib.error.URLError, ConnectionError, http.client.HTTPException)):
            urllib.request.urlopen(f"http://{address}/", timeout=10)


def written(folder, authority, name):
    """A certificate of this name, as files."""
    folder.mkdir()
    leaf = authority.issue_cert(name)
    files = TlsFiles(folder / "c.pem", folder / "k.pem", folder / "a.pem")
    files.certificate.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    files.key.write_bytes(leaf.private_key_pem.bytes())
    files.authority.write_bytes(authority.cert_pem.bytes())
    return files


def test_without_tls_the_page_is_for_this_machine_alone(cluster):
    controller = cluster.begin_controller("--page", "0.0.0.0:0")
    assert controller.ended(60.0) == 2
    assert "has no TLS" in controller.text()
    assert "ssh -L" in controller.text()
