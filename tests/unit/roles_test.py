"""Roles: every call has a row, what each role may, and how odd certificates are read."""

import datetime as dt

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID
from tests.access_rig import READS
from tests.certificates_rig import Authority

from eelgrid_agent.node.node_service import METHOD_ROLES as NODE_NEEDS
from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.runtime.access_control import LIVE_PAGE_PATH, REQUIRED_ROLES, check_call_role, parse_user_grants
from eelgrid_protos import codec
from eelgrid_protos.certificate import SUBJECT_SHOWN_MOST, read_certificate
from eelgrid_protos.roles import Caller, Role, RoleRefused, RoleRules, build_caller, check_node
from eelgrid_protos.rpc import (
    AGENT_SERVICE,
    FEDERATION_SERVICE,
    FLUX_SERVICE,
    INGEST_SERVICE,
    NODE_SERVICE,
    OPERATOR_SERVICE,
)

PERMIT, REQUIRE = RoleRules(), RoleRules(demanded=True)
LADDER = (Role.VIEWER, Role.SUBMITTER, Role.ADMIN)
SUBMIT = "/eelgrid.v1.OperatorService/SubmitWorkload"
POLICY = "/eelgrid.v1.OperatorService/UpdatePolicy"
CONNECT = "/eelgrid.v1.AgentService/Connect"
AUTHORITY = Authority()


def read(*attributes, grants=None, **options):
    return build_caller(read_certificate(AUTHORITY.der(*attributes, **options)), parse_user_grants(grants or ()))


def may(caller, path, rules=REQUIRE):
    try:
        return check_call_role(caller, path, rules, now_s=0.0) in {True, False}
    except RoleRefused:
        return False


def with_role(*roles):
    return Caller("CN=x", frozenset(roles))


def test_every_call_of_the_contract_has_a_row():
    """A new RPC fails here until somebody has said in `roles.NEEDS` who may call it."""
    services = {
        service.full_name: {method.name for method in service.methods}
        for file in codec.file_descriptors()
        for service in file.services_by_name.values()
    }
    # Agents serve this one, each its own node's, by a table of their own.
    assert set(NODE_NEEDS) == {f"/{NODE_SERVICE.name}/{method}" for method in services.pop(NODE_SERVICE.name)}
    assert all(
        role is (Role.VIEWER if path.rpartition("/")[2].startswith("Get") else Role.ADMIN)
        for path, role in NODE_NEEDS.items()
    )
    assert set(services) == {
        AGENT_SERVICE.name,
        FEDERATION_SERVICE.name,
        FLUX_SERVICE.name,
        INGEST_SERVICE.name,
        OPERATOR_SERVICE.name,
    }
    calls = {f"/{service}/{method}" for service, methods in services.items() for method in methods}
    assert set(REQUIRED_ROLES) == calls | {LIVE_PAGE_PATH}


@pytest.mark.parametrize("method", OPERATOR_SERVICE.methods, ids=lambda method: method.name)
def test_a_viewer_may_what_reads_and_nothing_else_and_the_greater_role_may_more(method):
    path = OPERATOR_SERVICE.path(method)
    may_each = [may(with_role(role), path) for role in LADDER]
    # What others asked, and from where, is for administrators; what a job prints is its owner's.
    assert may_each[0] is (method.name.startswith(READS) and method.name not in {"ListAuditEntries", "ReadLogs"})
    assert may_each == sorted(may_each)
    assert may_each[-1]
    assert may(with_role(Role.AGENT), path) is (method.name == "WhoAmI")


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        (Role.AGENT, {CONNECT}),
        (Role.VIEWER, {LIVE_PAGE_PATH}),
        (Role.SUBMITTER, {LIVE_PAGE_PATH, SUBMIT}),
        (Role.ADMIN, {LIVE_PAGE_PATH, SUBMIT, POLICY}),
    ],
)
def test_what_each_role_is_for(role, allowed):
    assert {path for path in (CONNECT, LIVE_PAGE_PATH, SUBMIT, POLICY) if may(with_role(role), path)} == allowed


def test_several_roles_add_up():
    both = with_role(Role.AGENT, Role.SUBMITTER)
    assert may(both, CONNECT)
    assert may(both, SUBMIT)
    assert not may(both, POLICY)
    assert both.greatest_role == "submitter"


def test_a_call_without_a_row_is_for_the_greatest_role_alone():
    path = "/eelgrid.v1.OperatorService/Forgotten"
    assert [may(with_role(role), path) for role in LADDER] == [False, False, True]


def test_without_a_role_everything_is_open_until_roles_are_demanded():
    old = read(("CN", "eelgrid-operator"), ("O", "Example"))
    assert old.predates_roles
    assert check_call_role(old, POLICY, PERMIT, now_s=0.0) is False
    assert check_call_role(with_role(Role.ADMIN), POLICY, PERMIT, now_s=0.0) is True
    assert not may(old, POLICY)
    # One that has a role is held to it at once.
    assert not may(with_role(Role.VIEWER), POLICY, PERMIT)


def test_a_role_misspelt_is_no_certificate_of_before_roles():
    caller = read(("O", "eelgrid:veiwer"))
    assert not caller.predates_roles
    assert caller.greatest_role == "unknown"
    with pytest.raises(RoleRefused, match="eelgrid:veiwer, which is no role"):
        check_call_role(caller, LIVE_PAGE_PATH, PERMIT, now_s=0.0)


def test_the_refusal_names_who_what_and_the_way_out():
    caller = read(("O", "eelgrid:viewer"), ("CN", "alice"))
    with pytest.raises(RoleRefused) as caught:
        check_call_role(caller, POLICY, REQUIRE, now_s=0.0)
    assert caught.value.message == "UpdatePolicy needs the role admin"
    assert str(caught.value.violations[0]) == (
        "certificate: O=eelgrid:viewer,CN=alice has the role viewer; "
        "use one with the organization eelgrid:admin, or have this one granted it (--grant)"
    )
    assert (caught.value.needs, caught.value.method) == ("admin", "UpdatePolicy")


def test_a_connection_does_not_outlive_its_certificate():
    caller = read(("O", "eelgrid:admin"), lasts=dt.timedelta(hours=1))
    assert check_call_role(caller, POLICY, REQUIRE, now_s=caller.ends_s - 1.0)
    with pytest.raises(RoleRefused, match="has expired; renew it and connect again") as caught:
        check_call_role(caller, POLICY, REQUIRE, now_s=caller.ends_s)
    assert caught.value.needs == "date"


@pytest.mark.parametrize(
    ("subject", "roles"),
    [
        ([], set()),
        ([("CN", "eelgrid:admin")], set()),
        ([("OU", "eelgrid:admin")], set()),
        ([("O", "eelgrid:admin ")], set()),
        ([("O", "EELGRID:admin")], set()),
        ([("O", "xeelgrid:admin")], set()),
        ([("O", "eelgrid:аdmin")], set()),  # a Cyrillic letter
        ([("O", "eelgrid:admin\x00")], set()),
        ([("O", "a" * 60_000)], set()),
        ([("O", "eelgrid:viewer")], {Role.VIEWER}),
        ([("O", "Example, Inc."), ("O", "eelgrid:viewer"), ("CN", "alice")], {Role.VIEWER}),
        ([("O", "eelgrid:viewer"), ("O", "eelgrid:agent")], {Role.VIEWER, Role.AGENT}),
        ([("O", "eelgrid:viewer"), ("O", "eelgrid:no")], {Role.VIEWER}),
        ([("O", f"Example {number}") for number in range(300)] + [("O", "eelgrid:submitter")], {Role.SUBMITTER}),
        ([("CN", "Jürgen Groß 😀"), ("O", "eelgrid:viewer")], {Role.VIEWER}),
        (
            [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "eelgrid:viewer", x509.name._ASN1Type.BMPString)],
            {Role.VIEWER},
        ),
    ],
)
def test_roles_are_the_organizations_to_the_letter(subject, roles):
    caller = read(*subject)
    assert caller.roles == roles
    assert caller.subject.isprintable()
    assert len(caller.subject) <= SUBJECT_SHOWN_MOST


def test_what_no_terminal_should_get_is_escaped():
    caller = read(("CN", "a\x1b[2J\nb"), ("O", "x,CN=admin"))
    assert caller.subject == r"CN=a\1B[2J\0Ab,O=x\,CN\=admin"
    assert read(names=("viewer.example", "a@example.org")).subject == "DNS=viewer.example,EMAIL=a@example.org"
    assert "\x1b" not in read(("O", "eelgrid:\x1b[2J")).description


@pytest.mark.parametrize(
    ("subject", "names", "nodes"),
    [
        ([("CN", "eelgrid:node:gpu-1")], (), {"gpu-1"}),
        ([("CN", "gpu-1")], (f"eelgrid:node:{'n' * 253}", "eelgrid:node:gpu-2"), {"n" * 253, "gpu-2"}),
        ([("CN", "eelgrid:node:a"), ("CN", "eelgrid:node:b")], (), {"a", "b"}),
    ],
)
def test_a_certificate_of_nodes_speaks_for_them_alone(subject, names, nodes):
    caller = read(*subject, names=names)
    assert (caller.roles, caller.nodes) == ({Role.AGENT}, nodes)
    for node in nodes:
        check_node(caller, node)
    with pytest.raises(RoleRefused, match="needs that node's certificate") as caught:
        check_node(caller, "gpu-10")
    assert caught.value.needs == "node"


@pytest.mark.parametrize("name", ["", "\x00", "a\nb"])
def test_a_node_without_a_name_is_no_node(name):
    caller = read(("CN", f"eelgrid:node:{name}"))
    with pytest.raises(RoleRefused):
        check_node(caller, "gpu-1")


def test_a_grant_does_not_free_an_agent_of_its_node():
    caller = read(("CN", "eelgrid:node:a"), grants=["agent=CN:eelgrid:node:a"])
    assert caller.nodes == {"a"}


def test_a_certificate_of_all_nodes_speaks_for_any():
    check_node(read(("O", "eelgrid:agent")), "gpu-1")


@pytest.mark.parametrize(
    ("grant", "subject", "names"),
    [
        ("viewer=DNS:grafana.example", [], ("Grafana.example",)),
        ("viewer=URI:spiffe://example.org/ns/a/sa/b", [], ("spiffe://example.org/ns/a/sa/b",)),
        ("viewer=EMAIL:a@example.org", [], ("a@example.org",)),
        ("viewer=CN:alice", [("CN", "alice")], ()),
        ("viewer=O:People, who look", [("O", "People, who look")], ()),
        ("viewer=OU:sre", [("OU", "sre")], ()),
    ],
)
def test_a_role_is_granted_by_another_name(grant, subject, names):
    assert read(*subject, names=names, grants=[grant]).roles == {Role.VIEWER}
    assert Role.VIEWER not in read(*subject, names=names).roles
    assert read(("CN", "other"), grants=[grant]).roles == frozenset()


def test_a_name_of_one_kind_is_none_of_another():
    assert read(("CN", "grafana.example"), grants=["viewer=DNS:grafana.example"]).roles == frozenset()


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["DNS:a"], "begins with no role"),
        (["root=DNS:a"], "write one of agent, ingest, viewer, submitter, admin"),
        (["viewer=a"], "names no certificate"),
        (["viewer=IP:10.0.0.1"], "write after the = one of CN, O, OU, DNS, URI, EMAIL"),
        (["viewer=CN:"], "names no certificate"),
        (["viewer=DNS:a", "admin=DNS:A"], "two roles"),
        ([f"viewer=DNS:{number}" for number in range(257)], "256 at most"),
    ],
)
def test_grants_that_make_no_sense_are_refused(texts, told):
    with pytest.raises(ControllerConfigError) as caught:
        parse_user_grants(texts)
    assert told in str(caught.value)
