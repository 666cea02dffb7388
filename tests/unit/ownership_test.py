"""Ownership: what a submitter's certificate lets it state, who may change whose work, and how certificates say it."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_node, build_request, build_spending_limit
from tests.certificates_rig import Authority

from eelgrid_controller.core.core import Core
from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.runtime.access_control import (
    bind_spec,
    check_owner,
    owner_of,
    parse_bindings,
    parse_user_grants,
    show_workload,
)
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadSubmitted, event_from_plain, event_to_plain
from eelgrid_protos import catalogue
from eelgrid_protos.certificate import read_certificate
from eelgrid_protos.messages import (
    Policy,
    ProcessSpec,
    SpendingScope,
    Workload,
    WorkloadPhase,
)
from eelgrid_protos.roles import Caller, Role, RoleRefused, RoleRules, build_caller

AUTHORITY = Authority()
PERMIT, REQUIRE = RoleRules(), RoleRules(demanded=True)
ALICE = Caller("O=eelgrid:submitter,CN=alice", frozenset({Role.SUBMITTER}), user="alice")
ROOT = Caller("O=eelgrid:admin,CN=root", frozenset({Role.ADMIN}), user="root")
OLD = Caller("CN=old", user="old")
SPEC = build_request("w").spec
NO_LIMITS = Policy()
BY_TEAM = Policy(spending=(build_spending_limit(1.0, "vision", scope=SpendingScope.LABEL, label="team"),))


def read(*attributes, binds=(), **options):
    return build_caller(
        read_certificate(AUTHORITY.der(*attributes, **options)), parse_user_grants(()), parse_bindings(binds)
    )


def with_rights(*texts, caller=ALICE):
    return replace(caller, rights=frozenset(tuple(text.split(":", 1)) for text in texts))


def stated(caller, rules=REQUIRE, policy=NO_LIMITS, **changes):
    """The specification that comes of one with these changes; or what its refusal says was needed."""
    try:
        return bind_spec(caller, replace(SPEC, **changes), policy, rules)
    except RoleRefused as refusal:
        return refusal.needs


def work(user="", owner=""):
    return Workload(workload_id="w-1", spec=replace(SPEC, user=user), phase=WorkloadPhase.PENDING, owner=owner)


def may_change(caller, workload, rules=REQUIRE):
    try:
        check_owner(caller, workload, "CancelWorkload", rules)
    except RoleRefused:
        return False
    return True


# Certificates


@pytest.mark.filterwarnings("ignore:Attribute's length")
@pytest.mark.parametrize(
    ("subject", "names", "user"),
    [
        ([("O", "eelgrid:submitter"), ("CN", "alice")], (), "alice"),
        ([("CN", "eelgrid:node:gpu-1")], (), ""),
        ([("CN", "eelgrid:admin"), ("CN", "bob")], (), "bob"),
        ([("CN", "alice")], ("eelgrid:user:pipeline",), "pipeline"),
        ([], ("spiffe://example.org/ns/ml/sa/train",), "spiffe://example.org/ns/ml/sa/train"),
        ([], ("alice@example.org",), "alice@example.org"),
        # A host's name is nobody's.
        ([], ("alice.example.org",), ""),
        ([("CN", "a\nb")], (), ""),
        ([("CN", "a" * 300)], (), ""),
        ([("CN", "")], (), ""),
    ],
)
def test_user_of_a_certificate_is_its_common_name_or_the_one_that_it_names(subject, names, user):
    assert read(*subject, names=names).user == user


def test_rights_are_organizations_or_uris_of_the_certificate():
    caller = read(
        ("O", "eelgrid:submitter"),
        ("O", "eelgrid:namespace:research"),
        ("O", "eelgrid:label:team=vision"),
        ("CN", "a"),
        names=("eelgrid:queue:batch", "eelgrid:namespace:prod"),
    )
    assert caller.roles == {Role.SUBMITTER}
    assert caller.unknown == ()
    assert caller.rights_of_kind("namespace") == ("prod", "research")
    assert caller.rights_of_kind("queue") == ("batch",)
    assert caller.rights_of_kind("label") == ("team=vision",)


@pytest.mark.parametrize("word", ["namespace:", "label:team", "label:=x", "user:*", "quota:x", "namespace:a\nb"])
def test_a_right_that_names_nothing_is_an_organization_that_is_no_role(word):
    caller = read(("O", f"eelgrid:{word}"))
    assert caller.rights == frozenset()
    assert caller.unknown


def test_a_certificate_has_no_more_rights_than_are_kept():
    caller = read(*(("O", f"eelgrid:namespace:n{number}") for number in range(300)))
    assert len(caller.rights) == 256


def test_a_bind_gives_rights_to_certificates_of_a_name():
    binds = ("namespace:research=CN:alice", "namespace:*=URI:spiffe://a/b=c", "label:team=vision=CN:alice")
    assert read(("CN", "alice"), binds=binds).rights == {("namespace", "research"), ("label", "team=vision")}
    assert read(names=("spiffe://a/b=c",), binds=binds).rights == {("namespace", "*")}
    assert read(("CN", "alice"), binds=("user:ml=CN:alice",)).user == "ml"


@pytest.mark.parametrize(
    "text",
    ["", "research=CN:alice", "namespace:research", "namespace:research=alice", "role:admin=CN:a", "user:*=CN:a"],
)
def test_a_bind_that_cannot_be_understood_is_refused_with_an_example(text):
    with pytest.raises(ControllerConfigError, match="namespace:research=CN:alice"):
        parse_bindings([text])


def test_more_binds_than_are_kept_are_refused():
    with pytest.raises(ControllerConfigError, match="given 1025 times"):
        parse_bindings([f"namespace:n{number}=CN:a" for number in range(1025)])


# Submissions


def test_a_submission_is_of_the_certificates_user():
    assert stated(ALICE).user == "alice"
    assert stated(ALICE, user="alice").user == "alice"


@pytest.mark.parametrize(
    ("changes", "needs"),
    [({"user": "bob"}, "user"), ({"namespace": "prod"}, "namespace"), ({"queue": "fast"}, "queue")],
)
def test_a_submitter_without_rights_submits_as_itself_to_the_default_namespace_alone(changes, needs):
    assert stated(ALICE).namespace == "default"
    assert stated(ALICE, **changes) == needs


def test_a_submitter_does_not_say_that_an_engine_stops_its_work():
    """Nobody would stop it for others where its pool is not enforced."""
    assert stated(ALICE, evicted_by_engine=True) == "admin"
    assert stated(ROOT, evicted_by_engine=True).evicted_by_engine


def test_a_submitter_uses_the_namespaces_that_its_certificate_names_and_no_others():
    caller = with_rights("namespace:research", "namespace:prod")
    assert stated(caller, namespace="research").namespace == "research"
    assert stated(caller, namespace="other") == "namespace"
    # Not even the one of those who name none.
    assert stated(caller) == "namespace"
    assert stated(with_rights("namespace:*"), namespace="other").namespace == "other"


def test_a_submitter_cannot_leave_out_the_queue_that_its_work_is_counted_in():
    assert stated(with_rights("namespace:*", "queue:batch")).queue == "batch"
    assert stated(with_rights("namespace:*", "queue:batch"), queue="fast") == "queue"
    both = with_rights("namespace:*", "queue:batch", "queue:fast")
    assert stated(both) == "queue"
    assert stated(both, queue="fast").queue == "fast"
    assert stated(with_rights("namespace:*", "queue:*")).queue == ""


def test_a_submitter_cannot_leave_out_or_change_the_label_that_its_work_is_counted_by():
    caller = with_rights("namespace:*", "label:team=vision")
    assert stated(caller, policy=BY_TEAM).labels == {"team": "vision"}
    assert stated(caller, policy=BY_TEAM, labels={"team": "nlp"}) == "label"
    several = with_rights("namespace:*", "label:team=vision", "label:team=nlp")
    assert stated(several) == "label"
    assert stated(several, labels={"team": "nlp", "x": "y"}).labels == {"team": "nlp", "x": "y"}


def test_a_label_that_a_limit_is_counted_by_needs_a_certificate_that_names_it():
    assert stated(ALICE, policy=BY_TEAM, labels={"team": "vision"}) == "label"
    # Nobody counts by it.
    assert stated(ALICE, labels={"team": "vision"}).labels == {"team": "vision"}
    assert stated(ALICE, policy=BY_TEAM, labels={"owner": "me"}).labels == {"owner": "me"}


@pytest.mark.parametrize("caller", [None, ROOT, OLD], ids=["without TLS", "an administrator", "before roles"])
@pytest.mark.parametrize("rules", [PERMIT, REQUIRE])
def test_who_is_no_submitter_states_what_it_likes(caller, rules):
    spec = replace(SPEC, user="bob", namespace="prod", queue="fast", labels={"team": "vision"})
    assert bind_spec(caller, spec, BY_TEAM, rules) is spec


def test_before_roles_are_demanded_a_submitter_that_names_no_rights_is_bound_to_its_user_alone():
    assert stated(ALICE, PERMIT, namespace="prod", queue="fast").namespace == "prod"
    assert stated(ALICE, PERMIT, user="bob") == "user"
    assert stated(with_rights("namespace:research"), PERMIT, namespace="prod") == "namespace"
    nameless = replace(ALICE, user="")
    assert stated(nameless, PERMIT, user="bob").user == "bob"


def test_where_roles_are_demanded_a_submitter_needs_a_user():
    assert stated(replace(ALICE, user="")) == "user"


def test_the_refusal_says_what_the_certificate_may_and_how_to_get_more():
    with pytest.raises(RoleRefused) as caught:
        bind_spec(with_rights("namespace:research"), replace(SPEC, namespace="prod"), Policy(), REQUIRE)
    assert caught.value.message == "SubmitWorkload with the namespace prod needs a right to it or the role admin"
    said = str(caught.value.violations[0])
    assert "CN=alice may submit with the namespace research" in said
    assert "eelgrid:namespace:prod" in said


def test_a_refusal_fits_a_header_whatever_was_stated():
    caller = with_rights(*(f"namespace:{'ä' * 240}{number}" for number in range(200)))
    with pytest.raises(RoleRefused) as caught:
        bind_spec(caller, replace(SPEC, namespace="ü" * 253), Policy(), REQUIRE)
    assert len(str(caught.value).encode()) < 2000


# Changes


@pytest.mark.parametrize(
    ("workload", "may"),
    [
        (work(owner="alice"), True),
        (work(user="alice"), True),
        (work(user="alice", owner="root"), True),
        (work(owner="bob"), False),
        (work(user="bob", owner="bob"), False),
        (work(), False),
    ],
)
def test_a_submitter_changes_its_own_work_alone(workload, may):
    assert may_change(ALICE, workload) is may
    assert may_change(ALICE, workload, PERMIT) is may
    assert may_change(ROOT, workload)
    assert may_change(None, workload)
    assert may_change(OLD, workload)


def test_a_certificate_that_names_nobody_owns_nothing_not_even_what_nobody_owns():
    assert not may_change(replace(ALICE, user=""), work())
    assert may_change(replace(ALICE, user=""), work(owner="bob"), PERMIT)


def test_the_refusal_names_the_owner_and_the_role():
    with pytest.raises(RoleRefused) as caught:
        check_owner(ALICE, work(owner="bob"), "ScaleWorkload", REQUIRE)
    assert caught.value.message == "ScaleWorkload of w-1 needs its owner bob or the role admin"
    assert caught.value.needs == "owner"
    with pytest.raises(RoleRefused, match="w-1, which nobody owns, needs the role admin"):
        check_owner(ALICE, work(), "ScaleWorkload", REQUIRE)


def test_owner_is_the_certificates_user_where_it_may_submit():
    assert [owner_of(one) for one in (ALICE, ROOT, OLD, None)] == ["alice", "root", "", ""]


# The journal


TOKEN = ProcessSpec(argv=("train",), working_directory="/", environment={"TOKEN": "secret", "X": "ab", "EMPTY": ""})
VIEWER = Caller("O=eelgrid:viewer,CN=bob", frozenset({Role.VIEWER}), user="bob")
FRONT = replace(with_rights("impersonate:alice"), user="front")


@pytest.mark.parametrize(
    ("caller", "sees"),
    [
        (None, True),
        (ROOT, True),
        (ALICE, True),
        (FRONT, True),
        (VIEWER, False),
        (replace(VIEWER, user=""), False),
        (replace(ALICE, user="bob"), False),
        (OLD, False),
    ],
)
def test_values_of_an_environment_are_shown_to_the_owner_and_administrators_alone(caller, sees):
    whole = work(owner="alice")
    whole = replace(whole, spec=replace(whole.spec, process=TOKEN))
    shown = show_workload(caller, whole, demanded=True)
    assert (shown == whole) is sees
    # As long as they were at the most: what was within its limits stays so.
    masked = {"TOKEN": "***", "X": "**", "EMPTY": ""}
    assert shown == replace(whole, spec=replace(whole.spec, process=replace(TOKEN, environment=shown_values(shown))))
    assert shown_values(shown) == (dict(TOKEN.environment) if sees else masked)


def shown_values(workload):
    return dict(workload.spec.process.environment)


def test_before_roles_are_demanded_a_certificate_that_names_none_sees_what_it_may_change():
    whole = work(owner="alice")
    whole = replace(whole, spec=replace(whole.spec, process=TOKEN))
    assert show_workload(OLD, whole, demanded=False) == whole
    assert show_workload(VIEWER, whole, demanded=False) != whole


def test_of_work_that_nobody_owns_administrators_alone_see_the_environment():
    whole = work()
    whole = replace(whole, spec=replace(whole.spec, process=TOKEN))
    assert show_workload(replace(ALICE, user=""), whole, demanded=True) != whole
    assert show_workload(ROOT, whole, demanded=True) == whole


def core_of(state):
    core = Core(state, catalogue.load_catalogue())
    core.register_node(build_node(), now_ns=1)
    return core


def test_owner_is_journalled_and_replayed_bit_for_bit():
    core = core_of(ClusterState())
    step = core.submit(build_request("w", user="alice"), now_ns=2, owner="alice")
    assert step.result.owner == "alice"
    replayed = core_of(ClusterState()).state
    for event in step.events:
        replayed.apply(event_from_plain(*event_to_plain(event)))
    assert replayed.digest() == core.state.digest()
    assert replayed.workloads["w"].owner == "alice"
    loaded = ClusterState.load(core.state.dump())
    assert loaded.workloads["w"].owner == "alice"


def test_entries_of_journals_of_before_owners_are_read_and_written_as_they_were():
    event = WorkloadSubmitted(time_ns=1, workload_id="w", spec=SPEC)
    kind, body = event_to_plain(event)
    assert "owner" not in body
    assert event_from_plain(kind, body) == event
    assert event_to_plain(replace(event, owner="alice"))[1]["owner"] == "alice"


def test_a_trial_without_placing_says_whose_it_would_be():
    core = core_of(ClusterState())
    step = core.submit(replace(build_request("w"), dry_run=True), now_ns=2, owner="alice")
    assert (step.events, step.result.owner) == ((), "alice")
