"""HTTP transcoding: paths, queries and bodies become requests, answers become JSON, and the OpenAPI document fits both."""

import json

import pytest
from jsonschema import Draft202012Validator

from eelgrid_controller.server.http.openapi import build_openapi
from eelgrid_controller.server.http.transcoding import (
    answer_json,
    encode_request,
    find_bindings,
    read_bindings,
    service_descriptor,
)
from eelgrid_protos import codec, messages
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import ListNodesRequest, NodeState
from eelgrid_protos.rpc import OPERATOR_SERVICE

BINDINGS = read_bindings(service_descriptor(OPERATOR_SERVICE.name))


def request_of(target, *, verb="GET", body=b""):
    """The request that a target becomes."""
    path, _, query = target.partition("?")
    binding, variables = find_bindings(BINDINGS, path)[verb]
    data = encode_request(binding, variables, query, body)
    return codec.decode_message(getattr(messages, binding.method.input_type.name), data)


def violations_of(target, **options):
    """What is wrong with a target, by field."""
    with pytest.raises(InvalidArgument) as refused:
        request_of(target, **options)
    return {one.field: f"{one.problem}; {one.remedy}" for one in refused.value.violations}


def test_names_are_accepted_in_both_spellings_and_lists_by_repetition():
    wanted = ListNodesRequest(page_size=50, pool="a100", states=(NodeState.READY, NodeState.LOST))
    for query in (
        "page_size=50&pool=a100&states=NODE_STATE_READY&states=NODE_STATE_LOST",
        "pageSize=50&pool=a100&states=1&states=NODE_STATE_LOST",
    ):
        assert request_of(f"/v1/nodes?{query}") == wanted


def test_numbers_switches_and_entries_of_maps_are_read():
    request = request_of(
        "/v1/energy?begin_ns=9223372036854775807&filters[label:team]=a%26b&withNobody=true&group_by=node"
    )
    assert (request.begin_ns, dict(request.filters), request.with_nobody) == (2**63 - 1, {"label:team": "a&b"}, True)
    request = request_of("/v1/moves/recommendation?restart_s=2.5e1&gpu_ratio=.5&goal=MOVE_GOAL_BALANCED")
    assert (request.restart_s, request.gpu_ratio, request.horizon_s) == (25.0, 0.5, None)
    assert request_of("/v1/moves/recommendation").restart_s is None, "absent is not 0"


def test_a_path_has_its_variables_unquoted_and_no_empty_segment():
    assert request_of("/v1/workloads/team%2Fjob%2d1").workload_id == "team/job-1"
    assert request_of("/v1/nodes/gpu-1/gpus?min_free_milli=1").node_name == "gpu-1"
    for path in ("/v1/workloads/", "/v1/workloads//explanation", "/v1/workloads/a/b", "/v1", "", "/V1/nodes"):
        assert {verb: one for verb, (one, _) in find_bindings(BINDINGS, path).items() if one.variables} == {}
    assert violations_of("/v1/workloads/%ff").keys() == {"workload_id"}


@pytest.mark.parametrize(
    ("target", "field", "words"),
    [
        (
            "/v1/nodes?page_size=many",
            "page_size",
            "'many' is no integer in range; give an integer from 0 to 4294967295",
        ),
        ("/v1/nodes?pageSize=-1", "pageSize", "no integer"),
        ("/v1/nodes?page_size=1_0", "page_size", "no integer"),
        ("/v1/nodes?page_size=", "page_size", "no integer"),
        ("/v1/audit-entries?since_ns=9223372036854775808", "since_ns", "no integer"),
        ("/v1/audit-entries?denied=1", "denied", "give true or false"),
        ("/v1/moves/recommendation?gpu_ratio=nan", "gpu_ratio", "no number"),
        ("/v1/moves/recommendation?gpu_ratio=1e999", "gpu_ratio", "no number"),
        ("/v1/nodes?states=READY", "states", "give one of NODE_STATE_UNSPECIFIED, NODE_STATE_READY, NODE_STATE_LOST"),
        ("/v1/nodes?pool=a&pool=b", "pool", "give it once"),
        ("/v1/nodes?pol=a", "pol", "is no parameter of /v1/nodes; did you mean pool"),
        ("/v1/nodes/x/gpus?node_name=y", "node_name", "is no parameter of /v1/nodes/{node_name}/gpus"),
        ("/v1/summary?pool=a", "pool", "give none"),
        ("/v1/energy?filters=a", "filters", "did you mean filters[KEY]?"),
        ("/v1/nodes?pool[a]=b", "pool[a]", "did you mean pool?"),
        ("/v1/nodes?pool=%ff", "query", "is not UTF-8"),
        ("/v1/nodes?" + "a&" * 2000, "query", "give fewer"),
    ],
)
def test_a_wrong_parameter_is_named_with_a_remedy(target, field, words):
    found = violations_of(target)
    assert found.keys() == {field}
    assert words in found[field]


def test_all_wrong_parameters_are_named_at_once():
    assert violations_of("/v1/nodes?page_size=x&states=y&z=1").keys() == {"page_size", "states", "z"}


def test_a_body_is_the_request_and_takes_no_query():
    body = b'{"changes": [{"drain": {"nodeNames": ["gpu-1"]}}], "differences_most": 3}'
    request = request_of("/v1/what-if", verb="POST", body=body)
    assert (len(request.changes), request.differences_most) == (1, 3)
    assert violations_of("/v1/what-if?a=b", verb="POST").keys() == {"a"}
    for wrong in (
        b"[]",
        b"{",
        b"\xff",
        b'{"a": 1}',
        b"[" * 100_000,
        b'{"changes": 5}',
        b'{"changes": [5]}',
        b'{"changes": [{"drain": "x"}]}',
        b'{"changes": [null]}',
        b"null",
        b'{"differencesMost": 1.5}',
        b'{"\\ud800": 1}',
    ):
        assert violations_of("/v1/what-if", verb="POST", body=wrong).keys() == {"body"}
    for wrong in (b'{"scope": Infinity}', b'{"scope": "\\ud800"}', b'{"limitW": 1%b}' % (b"0" * 400)):
        found = violations_of("/v1/budgets/what-if", verb="POST", body=b'{"budgets": [%b]}' % wrong)
        assert found.keys() == {"body"}


def test_an_answer_has_long_integers_as_strings_and_names_of_enumerations():
    binding, _ = find_bindings(BINDINGS, "/v1/nodes")["GET"]
    inventory = messages.Inventory(node_name="gpu-1", memory_bytes=2**49, cpu_milli=1000)
    node = messages.Node(inventory=inventory, state=NodeState.READY, plan_epoch=7)
    data = codec.encode_message(messages.ListNodesResponse(nodes=(node,), total=1))
    answer = json.loads(answer_json(binding.method, data))
    (shown,) = answer["nodes"]
    assert (shown["inventory"]["memoryBytes"], shown["state"], shown["planEpoch"]) == (
        str(2**49),
        "NODE_STATE_READY",
        "7",
    )
    assert (answer["nextPageToken"], answer["omitted"]) == ("", 0), "empty fields are there"
    assert "powerW" not in shown, "an optional field without a value is not"


def test_the_openapi_document_describes_requests_and_answers():
    document = build_openapi(BINDINGS, version="1")
    schemas = document["components"]["schemas"]
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations) == len(BINDINGS)

    def references(value):
        if isinstance(value, dict):
            yield from [value["$ref"]] if "$ref" in value else []
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from references(inner)

    for reference in references(document):
        found = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)

    # An answer that is full of values fits its schema.
    binding, _ = find_bindings(BINDINGS, "/v1/nodes")["GET"]
    inventory = messages.Inventory(node_name="gpu-1", memory_bytes=2**49, cpu_milli=1, labels={"team": "ml"})
    node = messages.Node(inventory=inventory, state=NodeState.READY, power_w=1.5)
    answer = json.loads(
        answer_json(binding.method, codec.encode_message(messages.ListNodesResponse(nodes=(node,), total=1)))
    )
    schema = {"$ref": "#/components/schemas/eelgrid.v1.ListNodesResponse", "components": document["components"]}
    validator = Draft202012Validator(schema)
    validator.validate(answer)
    answer["nodes"][0]["inventory"]["memoryBytes"] = 5
    assert not validator.is_valid(answer)
