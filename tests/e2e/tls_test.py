"""Mutual TLS between real processes, certificates that change under them, and addresses that demand it."""

import ssl

import pytest
import trustme
from tests.e2e.processes import fleet_of, metric, pages

from eelgrid_protos.messages import GetInventoryRequest, ListNodesRequest
from eelgrid_protos.transport import TlsFiles

pytestmark = pytest.mark.usefixtures("compiled_kernels")

NODE = {"name": "solo", "cpu_milli": 8000, "memory_bytes": 2**35, "gpus": [{"product": "a10", "count": 2}]}
# The agent looks at its files every five seconds.
ROTATED_S = 40.0


def files(folder, who):
    """Where one party keeps its certificates."""
    (folder / who).mkdir(exist_ok=True)
    return TlsFiles(folder / who / "certificate.pem", folder / who / "key.pem", folder / who / "authority.pem")


def put(path, *blobs):
    """Replaces a file whole, as certificate managers do."""
    aside = path.with_suffix(".new")
    aside.write_bytes(b"".join(blob.bytes() for blob in blobs))
    aside.replace(path)


def issue(authority, tls):
    """A new leaf of an authority, and that authority, in the files of one party; the leaf in PEM."""
    leaf = authority.issue_cert("127.0.0.1")
    put(tls.key, leaf.private_key_pem)
    put(tls.certificate, *leaf.cert_chain_pems)
    put(tls.authority, authority.cert_pem)
    return leaf.cert_chain_pems[0].bytes().decode()


def presented(address):
    """The certificate with which a server answers now."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)))


def check_ticks(cluster, agent):
    """Every tick of the agent's life has come, none twice, none lost."""
    address = cluster.agents[agent]["metrics"]

    def counts():
        (node,) = pages(cluster.operators.list_nodes, ListNodesRequest(), "nodes")
        return node.samples_received, node.samples_lost

    taken = metric(address, "eelgrid_agent_samples_total")
    cluster.until(lambda: counts()[0] >= taken, what=f"{taken:.0f} ticks are received")
    received, lost = counts()
    assert received <= metric(address, "eelgrid_agent_samples_total")
    assert lost == metric(address, "eelgrid_agent_dropped_samples_total") == 0


def connections(cluster, agent):
    return metric(cluster.agents[agent]["metrics"], "eelgrid_agent_connections_total")


@pytest.fixture
def parties(cluster):
    """Certificates of one authority for the controller, the agent and the operator, whose files the cluster uses."""
    old = trustme.CA()
    found = {who: files(cluster.folder, who) for who in ("controller", "agent", "operator", "stranger")}
    for who in ("controller", "agent", "operator"):
        issue(old, found[who])
    cluster.tls = found["operator"]
    return old, found


def test_certificates_are_demanded_and_may_change_at_any_time(cluster, parties):
    old, tls = parties
    controller = cluster.controller(tls=tls["controller"])
    cluster.set_policy(sample_interval_s=0.5, send_interval_s=0.5)
    fleet = fleet_of(cluster.folder / "fleet.json", [NODE])

    issue(trustme.CA(), tls["stranger"])
    refused = cluster.agent(fleet, "--verbose", tls=tls["stranger"])
    cluster.until(lambda: refused.said("event=stream_ended"), what="the stranger is refused")
    assert metric(cluster.metrics, "eelgrid_agents_connected") == 0
    assert cluster.summary().nodes_ready == 0
    assert refused.stop() == 0
    assert f"TLS with {cluster.address} failed" in cluster.eelctl("nodes", tls=tls["stranger"], code=3).stderr

    agent = cluster.agent(fleet, tls=tls["agent"])
    cluster.until_ready(1)
    assert cluster.eelctl("nodes", "--no-headers").stdout.split()[:2] == ["solo", "ready"]
    assert cluster.node_api(agent).get_inventory(GetInventoryRequest(), timeout=5.0).inventory.node_name == "solo"
    check_ticks(cluster, agent)
    assert connections(cluster, agent) == 1

    # A new leaf of the same authority, as every few weeks.
    fresh = issue(old, tls["controller"])
    fresh_agent = issue(old, tls["agent"])
    cluster.until(lambda: connections(cluster, agent) >= 2, within_s=ROTATED_S, what="the agent has moved")
    assert presented(cluster.address) == fresh
    assert presented(cluster.agents[agent]["listen"]) == fresh_agent
    check_ticks(cluster, agent)
    moved = connections(cluster, agent)

    # Another authority, whose leaves the old one's holders cannot know.
    for who in ("certificate", "key", "authority"):
        getattr(tls["stranger"], who).write_bytes(getattr(tls["operator"], who).read_bytes())
    new = trustme.CA()
    fresh = issue(new, tls["controller"])
    issue(new, tls["agent"])
    cluster.until(lambda: connections(cluster, agent) > moved, within_s=ROTATED_S, what="the agent has moved again")
    assert presented(cluster.address) == fresh
    cluster.eelctl("nodes", code=3)
    issue(new, tls["operator"])
    assert cluster.eelctl("nodes", "--no-headers").stdout.split()[:2] == ["solo", "ready"]
    cluster.eelctl("nodes", tls=tls["stranger"], code=3)
    cluster.reconnect()
    check_ticks(cluster, agent)
    assert cluster.node_api(agent).get_inventory(GetInventoryRequest(), timeout=5.0).inventory.node_name == "solo"
    assert (agent.stop(), controller.stop()) == (0, 0)


def test_an_address_that_others_reach_demands_certificates_or_a_word(cluster, parties):
    _, tls = parties
    flags = ("--tls-certificate", "--tls-key", "--tls-authority")
    paths = (tls["controller"].certificate, tls["controller"].key, tls["controller"].authority)
    secured = [str(part) for pair in zip(flags, paths, strict=True) for part in pair]

    def controller(name, *arguments):
        return cluster.run(
            name,
            "-m",
            "eelgrid_controller",
            "--listen",
            "0.0.0.0:0",
            "--metrics",
            "127.0.0.1:0",
            "--data",
            name,
            *arguments,
        )

    def serves(child):
        cluster.until(lambda: child.said("serving listen="), within_s=120.0, what=f"{child.name} serves")
        return child.text()

    open_door, insecure, mutual = (
        controller("open"),
        controller("insecure", "--insecure"),
        controller("mutual", *secured),
    )
    half, absent = controller("half", *secured[:4]), controller("absent", *secured[:5], "absent.pem")
    agent = cluster.run(
        "agent",
        "-m",
        "eelgrid_agent",
        "--simulate",
        str(fleet_of(cluster.folder / "f.json", [NODE])),
        "--controller",
        cluster.address,
        "--listen",
        "0.0.0.0:0",
        "--metrics",
        "127.0.0.1:0",
    )
    refusals = (
        (open_door, 2, "0.0.0.0:0 can be reached from other machines; give --tls-certificate"),
        (half, 2, "--tls-certificate, --tls-key and --tls-authority belong together: give all three"),
        (absent, 2, "absent.pem: No such file or directory; name a readable PEM file"),
        (agent, 2, "0.0.0.0:0 can be reached from other machines; give --tls-certificate"),
    )
    for child, code, words in refusals:
        assert child.ended(within_s=120.0) == code, child.text()
        assert words in child.text()
        assert "Traceback" not in child.text()
    assert "anyone who reaches this address can command this process" in serves(insecure)
    assert "anyone who reaches" not in serves(mutual)
    assert (insecure.stop(), mutual.stop()) == (0, 0)
