"""Roles between real processes: who may what, over rotation, on the page, and what doctor and whoami say of it."""

import datetime as dt
import json
import ssl
import urllib.error
import urllib.request

import pytest
from tests.e2e.processes import fleet_of, metric

from eelgrid_protos import rpc, transport
from eelgrid_protos.faults import PermissionDenied, Unavailable
from eelgrid_protos.messages import ListNodesRequest

NODE = {"cpu_milli": 8000, "memory_bytes": 2**35, "gpus": [{"product": "a10", "count": 1}]}
SUBMIT = ("submit", "--name", "job", "--gpus", "1", "--cpu", "1", "--memory", "1GiB")
ROTATED_S = 60.0


def names(cluster, files):
    """The nodes that somebody sees, over a connection of its own."""
    with transport.open_blocking_channel(cluster.address, tls=files) as channel:
        answer = rpc.build_client(rpc.OPERATOR_SERVICE, channel).list_nodes(ListNodesRequest(), timeout=20.0)
    return [node.inventory.node_name for node in answer.nodes]


def looked(address, files):
    """The status with which the page answers."""
    context = ssl.create_default_context(cafile=files.authority)
    context.load_cert_chain(files.certificate, files.key)
    try:
        with urllib.request.urlopen(f"https://{address}/", timeout=20, context=context) as found:
            return found.status, ""
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_each_party_may_what_its_role_allows_and_no_more(cluster, parties):
    server = parties("controller", ("CN", "controller"), names=("127.0.0.1",))
    controller = cluster.controller(
        "--roles", "require", "--grant", "viewer=DNS:grafana.example", "--page", "127.0.0.1:0", tls=server
    )
    line = controller.said("serving listen=")
    viewer = parties("viewer", ("O", "eelgrid:viewer"), ("CN", "alice"))
    old = parties("old", ("CN", "eelgrid-operator"))

    # An agent speaks for the node that its certificate names, and for no other: it cannot push aside who does.
    ours = parties("agent", ("CN", "eelgrid:node:gpu-1"), names=("127.0.0.1",))
    other = parties("other", ("O", "eelgrid:agent"), ("CN", "eelgrid:node:gpu-2"), names=("127.0.0.1",))
    fleet = fleet_of(cluster.folder / "fleet.json", [{"name": "gpu-1", **NODE}])
    agent = cluster.agent(fleet, tls=ours)
    cluster.until_ready(1)
    posing = cluster.agent(fleet, "--verbose", tls=other)
    cluster.until(lambda: "Connect as gpu-1 needs that node's certificate" in posing.text(), what="it is refused")
    assert posing.stop() == 0
    looking = cluster.agent(fleet, "--log-level", "debug", tls=viewer)
    cluster.until(lambda: "Connect needs the role agent" in looking.text(), what="a viewer is no agent")
    assert looking.stop() == 0
    assert "stream=replaced" not in controller.text()
    assert metric(cluster.agents[agent]["metrics"], "eelgrid_agent_connections_total") == 1
    assert cluster.summary().nodes_ready == 1

    # A viewer sees and changes nothing; an agent and a certificate without a role do not even see.
    assert names(cluster, viewer) == ["gpu-1"]
    said = cluster.eelctl(*SUBMIT, tls=viewer, code=5).stderr
    assert "O=eelgrid:viewer,CN=alice has the role viewer" in said
    assert "--grant" in said
    for files in (ours, old):
        with pytest.raises(PermissionDenied, match="needs the role viewer"):
            names(cluster, files)
    assert names(cluster, parties("grafana", ("CN", "grafana"), names=("grafana.example",))) == ["gpu-1"]

    # The same files with another role: the next connection has it.
    viewer = parties("viewer", ("O", "eelgrid:submitter"), ("CN", "alice"))
    cluster.eelctl(*SUBMIT, tls=viewer)
    faster = ("policy", "set", "--send-interval", "3")
    assert "UpdatePolicy needs the role admin" in cluster.eelctl(*faster, tls=viewer, code=5).stderr
    cluster.eelctl(*faster)
    over = parties("over", ("O", "eelgrid:admin"), lasts=dt.timedelta(minutes=-1))
    with pytest.raises(Unavailable):
        names(cluster, over)

    # The page.
    assert looked(line["page"], viewer) == (200, "")
    status, text = looked(line["page"], ours)
    assert (status, "page needs the role viewer" in text) == (403, True)
    assert looked(line["page"], old)[0] == 403

    # What is told of it.
    assert metric(cluster.metrics, "eelgrid_calls_refused_total") >= 8
    told = json.loads(cluster.eelctl("whoami", "-o", "json", tls=ours).stdout)
    assert (told["subject"], told["roles"], told["node_names"]) == ("CN=eelgrid:node:gpu-1", ["agent"], ["gpu-1"])
    found = json.loads(cluster.eelctl("doctor", "--only", "controller", "-o", "json", tls=old, code=1).stdout)
    (role,) = (one for one in found if one["check"] == "role")
    assert (role["status"], "--grant" in role["remedy"]) == ("fail", True)


def test_certificates_of_before_roles_go_on_and_an_agent_moves_to_one_with_a_role(cluster, parties):
    server = parties("controller", ("CN", "controller"), names=("127.0.0.1",))
    cluster.tls = parties("operator", ("CN", "operator"))
    controller = cluster.controller(tls=server)
    assert "roles=permit" in controller.text()
    agent = cluster.agent(
        fleet_of(cluster.folder / "fleet.json", [{"name": "gpu-1", **NODE}]),
        tls=parties("agent", ("CN", "agent"), names=("127.0.0.1",)),
    )
    cluster.until_ready(1)
    cluster.set_policy(send_interval_s=1.0)
    assert "action=let_in" in controller.text()
    assert metric(cluster.metrics, "eelgrid_calls_without_role_total") >= 3
    assert metric(cluster.metrics, "eelgrid_calls_refused_total") == 0
    assert "none: everything is allowed" in cluster.eelctl("whoami").stdout
    # With the files the agent's connection changes, and the role with it.
    before = metric(cluster.metrics, "eelgrid_calls_without_role_total")
    parties("agent", ("O", "eelgrid:agent"), ("CN", "eelgrid:node:gpu-1"), names=("127.0.0.1",))
    address = cluster.agents[agent]["metrics"]
    cluster.until(
        lambda: metric(address, "eelgrid_agent_connections_total") >= 2, within_s=ROTATED_S, what="the agent has moved"
    )
    assert metric(cluster.metrics, "eelgrid_calls_without_role_total") == before
    assert cluster.summary().nodes_ready == 1
