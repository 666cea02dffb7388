"""The HTTP API of a controller that runs: the answers of gRPC as JSON, with its roles, bounds and errors."""

import http.client
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.e2e.processes import fleet_of

from eelgrid_controller.runtime.access_control import REQUIRED_ROLES
from eelgrid_protos import codec, rpc, transport
from eelgrid_protos.messages import (
    ExplainWorkloadRequest,
    GetWorkloadRequest,
    ListAuditEntriesRequest,
    ListWorkloadsRequest,
    Mobility,
    ProcessSpec,
    ResourceRequest,
    SubmitWorkloadRequest,
    WatchWorkloadsRequest,
    WorkloadSpec,
)
from eelgrid_protos.plain_messages import to_plain
from eelgrid_protos.roles import Role

NODES = [
    {"name": f"gpu-{number}", "cpu_milli": 8000, "memory_bytes": 2**35, "gpus": [{"product": product, "count": 2}]}
    for number, product in enumerate(("a10", "a10", "t4"))
]


def call(address, path, *, method=None, body=None, headers=None, files=None):
    """Status, headers and JSON of one request."""
    context = None
    if files is not None:
        context = ssl.create_default_context(cafile=files.authority)
        context.load_cert_chain(files.certificate, files.key)
    scheme = "http" if files is None else "https"
    data = None if body is None else json.dumps(body).encode()
    sent = {"Content-Type": "application/json"} if body is not None else {}
    request = urllib.request.Request(f"{scheme}://{address}{path}", data, sent | (headers or {}), method=method)
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            return answer.status, answer.headers, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.loads(error.read() or b"null")


def fields_of(answer):
    """The fields that an error complains of."""
    return [violation["field"] for detail in answer.get("details", ()) for violation in detail["fieldViolations"]]


def message_of(name, answer):
    """Our message of an answer in JSON."""
    wire = message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(f"eelgrid.v1.{name}"))()
    json_format.ParseDict(answer, wire)
    (method,) = (one for one in rpc.OPERATOR_SERVICE.methods if one.response.__name__ == name)
    return codec.decode_message(method.response, wire.SerializeToString())


@pytest.fixture
def address(cluster):
    """A controller's HTTP API, with three nodes and one job."""
    found = cluster.controller("--http-api", "127.0.0.1:0").said("serving listen=")["http_api"]
    cluster.agent(fleet_of(cluster.folder / "fleet.json", NODES))
    cluster.until_ready(3)
    request = ResourceRequest(cpu_milli=1000, memory_bytes=2**30, gpu_count=1, gpu_milli=1000)
    spec = WorkloadSpec(name="job", namespace="research", request=request)
    cluster.operators.submit_workload(SubmitWorkloadRequest(workload_id="team/job-1", spec=spec), timeout=10.0)
    return found


def test_every_unary_read_is_served_and_answers_what_grpc_answers(cluster, address):
    status, _, document = call(address, "/v1/openapi.json")
    assert (status, document["openapi"]) == (200, "3.1.0")
    served = {
        operation["operationId"].partition("_")[0] for path in document["paths"].values() for operation in path.values()
    }
    reads = {path.rpartition("/")[2] for path, role in REQUIRED_ROLES.items() if role in {Role.VIEWER, None}}
    unary = {method.name for method in rpc.OPERATOR_SERVICE.methods if not method.response_streaming}
    assert served == (reads & unary) | {"ListAuditEntries"}

    job = urllib.parse.quote("team/job-1", safe="")
    for path, name in {
        "/v1/whoami": "WhoAmI",
        "/v1/policy": "GetPolicy",
        "/v1/spending": "ListSpending",
        "/v1/plans?pageSize=2": "ListPlans",
        f"/v1/workloads/{job}": "GetWorkload",
        "/v1/workloads?namespace=research&phases=WORKLOAD_PHASE_PLACED": "ListWorkloads",
    }.items():
        status, headers, answer = call(address, path)
        assert (status, headers["Content-Type"]) == (200, "application/json; charset=utf-8"), answer
        request = {
            "ListPlans": {"page_size": 2},
            "GetWorkload": {"workload_id": "team/job-1"},
            "ListWorkloads": {"namespace": "research"},
        }.get(name, {})
        (method,) = (one for one in rpc.OPERATOR_SERVICE.methods if one.name == name)
        wanted = getattr(cluster.operators, method.attribute)(method.request(**request), timeout=10.0)
        if name not in {"GetWorkload", "ListWorkloads"}:  # their power changes
            assert message_of(f"{name}Response", answer) == wanted
        else:
            (workload,) = answer.get("workloads") or [answer["workload"]]
            assert (workload["workloadId"], workload["phase"]) == ("team/job-1", "WORKLOAD_PHASE_PLACED")
            assert workload["spec"]["request"]["memoryBytes"] == str(2**30)

    # What eelctl prints of the same calls.
    inventories = [node["inventory"] for node in json.loads(cluster.eelctl("nodes", "-o", "json").stdout)]
    answer = call(address, "/v1/nodes?page_size=2")[2]
    page = answer["nodes"] + call(address, f"/v1/nodes?page_size=2&page_token={answer['nextPageToken']}")[2]["nodes"]
    served = [to_plain(node.inventory) for node in message_of("ListNodesResponse", {"nodes": page}).nodes]
    assert [{key: node[key] for key in ("node_name", "gpus")} for node in served] == [
        {key: node[key] for key in ("node_name", "gpus")} for node in inventories
    ]
    assert answer["total"] == 3
    assert len(call(address, "/v1/nodes/gpu-1/gpus")[2]["gpus"]) == 2
    assert call(address, "/v1/gpus?node_name=gpu-1&min_free_milli=1")[2]["gpus"][0]["nodeName"] == "gpu-1"
    why = call(address, f"/v1/workloads/{job}/explanation")[2]["explanation"]
    assert why["workload"]["workloadId"] == "team/job-1"
    hour_ns = 3600 * 10**9
    hours = f"begin_ns={time.time_ns() // hour_ns * hour_ns - hour_ns}&end_ns={time.time_ns() // hour_ns * hour_ns}"
    for path in (f"/v1/energy?{hours}&group_by=namespace&filters[namespace]=research", "/v1/promises"):
        status, _, answer = call(address, path)
        assert status == 200, answer
    status, _, answer = call(address, "/v1/what-if", body={"changes": [{"drain": {"nodeNames": ["gpu-0"]}}]})
    assert status == 200, answer


def test_errors_are_a_status_that_names_the_field(cluster, address):
    status, _, answer = call(address, "/v1/nodes?page_sise=5&states=READY&min=1")
    assert (status, answer["code"], fields_of(answer)) == (400, 3, ["page_sise", "states", "min"])
    described = answer["details"][0]["fieldViolations"]
    assert answer["details"][0]["@type"] == "type.googleapis.com/google.rpc.BadRequest"
    assert "did you mean page_size" in described[0]["description"]
    assert "NODE_STATE_READY" in described[1]["description"]
    # The rules of the contract, beyond those of a type.
    status, _, answer = call(address, f"/v1/nodes?pool={'x' * 300}")
    assert (status, fields_of(answer)) == (400, ["pool"])
    assert call(address, "/v1/workloads/nobody")[0] == 404
    assert call(address, "/v1/nodes?page_token=x")[0] == 400
    status, _, answer = call(address, "/v2/nodes")
    assert (status, "/v1/openapi.json" in answer["message"]) == (404, True)
    for method in ("HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        status, headers, _ = call(address, "/v1/nodes", method=method)
        assert (status, headers["Allow"]) == (405, "GET")
    assert call(address, "/v1/what-if")[1]["Allow"] == "POST"
    assert call(address, "/v1/what-if", body={}, headers={"Content-Type": "text/plain"})[0] == 400
    assert call(address, "/v1/what-if", body={"changes": [{"nothing": 1}]})[0] == 400
    assert call(address, "/v1/what-if", body={"pad": "x" * 2**20})[0] == 413
    assert call(address, "/v1/nodes", headers={"Host": "evil.example"})[0] == 421
    assert "Access-Control-Allow-Origin" not in call(address, "/v1/nodes", headers={"Origin": "http://a"})[1]


TEXTS = st.text(max_size=12)
NAMES = st.sampled_from(
    ["page_size", "pageToken", "states", "filters[namespace]", "filters", "group_by", "end_ns", "horizon_s"]
)


def test_random_requests_are_answered_and_never_a_fault_of_the_server(cluster, address):
    host, _, port = address.partition(":")

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        path=st.sampled_from(["/v1/nodes", "/v1/energy", "/v1/workloads/", "/v1/nodes/x/gpus", "/v1/", "/"]),
        more=TEXTS,
        query=st.lists(st.tuples(NAMES | TEXTS, TEXTS | st.integers().map(str)), max_size=4),
        raw=st.binary(max_size=8),
    )
    @example(path="/v1/nodes", more="", query=[], raw=b"page_size=%ff&%zz")
    @example(path="/v1/workloads/", more="", query=[], raw=b"\xff")
    def run(path, more, query, raw):
        target = path + urllib.parse.quote(more) + "?" + urllib.parse.urlencode(query, errors="ignore")
        tail = urllib.parse.quote(raw, safe="%=&;") if raw else ""
        connection = http.client.HTTPConnection(host, int(port), timeout=20)
        connection.request("GET", f"{target}&{tail}")
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        assert answer.status < 500, (target, body)
        assert answer.status == 200 or json.loads(body)["code"]

    run()
    assert "fault=internal" not in "".join(child.text() for child in cluster.children)


def test_over_tls_roles_are_those_of_grpc_and_refusals_are_audited(cluster, parties):
    server = parties("controller", ("CN", "controller"), names=("127.0.0.1",))
    line = cluster.controller("--roles", "require", "--http-api", "127.0.0.1:0", tls=server).said("serving listen=")
    address = line["http_api"]
    viewer = parties("viewer", ("O", "eelgrid:viewer"), ("CN", "alice"))
    nobody = parties("nobody", ("CN", "bob"))
    status, _, answer = call(address, "/v1/whoami", files=viewer)
    assert (status, answer["user"], answer["roles"], answer["rolesDemanded"]) == (200, "alice", ["viewer"], True)
    assert call(address, "/v1/nodes", files=viewer)[0] == 200
    status, _, answer = call(address, "/v1/nodes", files=nobody)
    assert (status, answer["code"], fields_of(answer)) == (403, 7, ["certificate"])
    assert call(address, "/v1/audit-entries", files=viewer)[0] == 403

    def refused():
        answer = cluster.operators.list_audit_entries(ListAuditEntriesRequest(denied=True), timeout=10.0)
        return {(entry.call, entry.subject) for entry in answer.entries}

    wanted = {("ListNodes", "CN=bob"), ("ListAuditEntries", "O=eelgrid:viewer,CN=alice")}
    cluster.until(lambda: refused() >= wanted, what="refusals are in the audit log")
    with pytest.raises((urllib.error.URLError, ConnectionError, http.client.HTTPException)):
        urllib.request.urlopen(f"http://{address}/v1/nodes", timeout=10)
    context = ssl.create_default_context(cafile=viewer.authority)
    with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
        urllib.request.urlopen(f"https://{address}/v1/nodes", timeout=10, context=context)


def test_a_token_in_an_environment_is_shown_to_its_owner_and_to_administrators_alone(cluster, parties):
    server = parties("controller", ("CN", "controller"), names=("127.0.0.1",))
    line = cluster.controller("--roles", "require", "--http-api", "127.0.0.1:0", tls=server).said("serving listen=")
    alice = parties("alice", ("O", "eelgrid:submitter"), ("CN", "alice"))
    bob = parties("bob", ("O", "eelgrid:submitter"), ("CN", "bob"))
    viewer = parties("viewer", ("O", "eelgrid:viewer"), ("CN", "carol"))
    process = ProcessSpec(argv=("train",), working_directory="/", environment={"TOKEN": "hunter2"})
    spec = WorkloadSpec(
        name="train", request=ResourceRequest(gpu_count=1, gpu_milli=1000), process=process, mobility=Mobility.FIXED
    )
    with transport.open_blocking_channel(cluster.address, tls=alice) as channel:
        request = SubmitWorkloadRequest(spec=spec, workload_id="job")
        rpc.build_client(rpc.OPERATOR_SERVICE, channel).submit_workload(request, timeout=20.0)

    def read(files):
        """Reads the work in each way that there is; returns the tokens."""
        with transport.open_blocking_channel(cluster.address, tls=files) as channel:
            operators = rpc.build_client(rpc.OPERATOR_SERVICE, channel)
            found = [
                operators.get_workload(GetWorkloadRequest(workload_id="job"), timeout=20.0).workload,
                *operators.list_workloads(ListWorkloadsRequest(), timeout=20.0).workloads,
                operators.explain_workload(
                    ExplainWorkloadRequest(workload_id="job"), timeout=20.0
                ).explanation.workload,
                next(iter(operators.watch_workloads(WatchWorkloadsRequest(), timeout=20.0))).workload,
            ]
        assert {one.workload_id for one in found} == {"job"}
        _, _, whole = call(line["http_api"], "/v1/workloads/job", files=files)
        _, _, listed = call(line["http_api"], "/v1/workloads", files=files)
        plain = [whole["workload"], *listed["workloads"]]
        return [one.spec.process.environment["TOKEN"] for one in found] + [
            one["spec"]["process"]["environment"]["TOKEN"] for one in plain
        ]

    for files, shown in ((alice, "hunter2"), (cluster.tls, "hunter2"), (bob, "***"), (viewer, "***")):
        assert read(files) == [shown] * 6


def test_without_tls_the_http_api_is_for_this_machine_alone(cluster):
    controller = cluster.begin_controller("--http-api", "0.0.0.0:0")
    assert controller.ended(60) != 0
    assert "--http-api 0.0.0.0:0 can be reached from other machines" in controller.text()
