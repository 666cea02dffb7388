"""Constraints against an obvious judge on the plain objects, written down rule by rule."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_controller.engines.kubernetes.model.node_affinity import satisfies_constraint, trait_name, traits_of
from eelgrid_controller.engines.kubernetes.model.objects import parse_node
from eelgrid_controller.engines.kubernetes.model.selectors import parse_constraint

KEYS = st.sampled_from(["a", "b", "c", "x.io/gpu", "BAD KEY", "", "UPPER.io/a"])
VALUES = st.sampled_from(["", "1", "2", "10", "-1", "007", "v", "w", "bad value", "x" * 64, str(2**63)])
OPERATORS = st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Near"])
EFFECTS = st.sampled_from(["NoSchedule", "NoExecute", "PreferNoSchedule"])


def sparse(**fields):
    """An object in which any field may be missing or null, as the API has it."""
    return st.fixed_dictionaries({}, optional={key: st.none() | value for key, value in fields.items()})


EXPRESSION = st.fixed_dictionaries(
    {"key": KEYS, "operator": OPERATORS}, optional={"values": st.none() | st.lists(VALUES, max_size=3)}
)
FIELD = st.fixed_dictionaries(
    {
        "key": st.sampled_from(["metadata.name", "spec.other"]),
        "operator": st.sampled_from(["In", "NotIn", "Exists"]),
        "values": st.lists(st.sampled_from(["n1", "n2", ""]), max_size=2),
    }
)
TERM = sparse(matchExpressions=st.lists(EXPRESSION, max_size=2), matchFields=st.lists(FIELD, max_size=2))
TOLERATION = sparse(
    key=st.sampled_from(["t", "u", "node.kubernetes.io/unschedulable", ""]),
    operator=st.sampled_from(["Equal", "Exists", "Gt", "Lt", ""]),
    value=st.sampled_from(["", "1", "2", "x"]),
    effect=EFFECTS | st.just(""),
    tolerationSeconds=st.just(300),
)
SPEC = sparse(
    nodeSelector=st.dictionaries(KEYS, VALUES, max_size=2),
    affinity=sparse(
        nodeAffinity=sparse(
            requiredDuringSchedulingIgnoredDuringExecution=st.fixed_dictionaries(
                {"nodeSelectorTerms": st.lists(TERM, max_size=3)}
            )
        )
    ),
    tolerations=st.lists(TOLERATION, max_size=3),
)
TAINT = st.fixed_dictionaries(
    {"key": st.sampled_from(["t", "u"]), "effect": EFFECTS},
    optional={"value": st.none() | st.sampled_from(["1", "2", "x", "01"])},
)
NODE = st.builds(
    lambda name, labels, taints, is_cordoned: {
        "metadata": {"name": name, "uid": "u", "labels": labels},
        "spec": {"taints": taints, "unschedulable": is_cordoned},
    },
    st.sampled_from(["n1", "n2"]),
    st.none() | st.dictionaries(KEYS, VALUES, max_size=4),
    st.none() | st.lists(TAINT, max_size=2),
    st.none() | st.booleans(),
)


def int64(text):
    return int(text) if re.fullmatch(r"[+-]?\d+", text) and -(2**63) <= int(text) < 2**63 else None


def judge_expression(one, labels):
    """None where the line is illegal: then its whole term holds nowhere."""
    key, operator, values = one["key"], one["operator"], one.get("values") or []
    if key not in ("a", "b", "c", "x.io/gpu"):
        return None
    if any(not re.fullmatch(r"(([A-Za-z0-9][-\w.]*)?[A-Za-z0-9])?", value) or len(value) > 63 for value in values):
        return None
    if operator in ("In", "NotIn"):
        if not values:
            return None
        is_in = key in labels and labels[key] in values
        return is_in if operator == "In" else not is_in
    if operator in ("Exists", "DoesNotExist"):
        if values:
            return None
        return (key in labels) == (operator == "Exists")
    if operator in ("Gt", "Lt"):
        if len(values) != 1 or int64(values[0]) is None:
            return None
        if key not in labels or int64(labels[key]) is None:
            return False
        return int64(labels[key]) > int64(values[0]) if operator == "Gt" else int64(labels[key]) < int64(values[0])
    return None


def judge_field(one, name):
    if one["operator"] not in ("In", "NotIn") or len(one["values"]) != 1:
        return None
    is_it = (name if one["key"] == "metadata.name" else "") == one["values"][0]
    return is_it if one["operator"] == "In" else not is_it


def judge_toleration(toleration, taint):
    key, effect = toleration.get("key") or "", toleration.get("effect") or ""
    value, other = toleration.get("value") or "", taint.get("value") or ""
    if effect and effect != taint["effect"]:
        return False
    if key and key != taint["key"]:
        return False
    operator = toleration.get("operator") or "Equal"
    if operator == "Exists":
        return True
    # Gt and Lt are alpha, and off.
    return operator == "Equal" and value == other


def judge(spec, node):
    labels, name = node["metadata"]["labels"] or {}, node["metadata"]["name"]
    taints = [one for one in node["spec"]["taints"] or [] if one["effect"] != "PreferNoSchedule"]
    if node["spec"]["unschedulable"]:
        taints.append({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"})
    tolerations = spec.get("tolerations") or []
    for taint in taints:
        if not any(judge_toleration(one, taint) for one in tolerations):
            return False
    for key, value in (spec.get("nodeSelector") or {}).items():
        if key not in labels or labels[key] != value:
            return False
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if affinity is None:
        return True
    for term in affinity["nodeSelectorTerms"]:
        lines = [judge_expression(one, labels) for one in term.get("matchExpressions") or []]
        lines += [judge_field(one, name) for one in term.get("matchFields") or []]
        if lines and all(lines):
            return True
    return False


def node_object(name="n1", labels=None, taints=None, is_cordoned=False):
    return {
        "metadata": {"name": name, "uid": "u", "labels": labels},
        "spec": {"taints": taints, "unschedulable": is_cordoned},
    }


@settings(max_examples=150, deadline=None)
@given(spec=SPEC, node=NODE)
def test_a_constraint_is_judged_as_rule_by_rule(spec, node):
    found = satisfies_constraint(parse_constraint(spec), parse_node(node))
    assert found is judge(spec, node)


# Each rule alone, so that whether it holds decides.
NUMBERS = st.sampled_from(["1", "2", "007", "-1", str(2**63), "v"])


@settings(max_examples=400, deadline=None)
@given(
    operator=OPERATORS,
    key=st.sampled_from(["a", "a", "x.io/gpu", "BAD KEY", "UPPER.io/a"]),
    values=st.lists(NUMBERS | st.sampled_from(["", "bad value", "x" * 64]), max_size=2),
    label=st.none() | NUMBERS,
)
def test_a_line_of_a_term_is_judged_as_rule_by_rule(operator, key, values, label):
    term = {"matchExpressions": [{"key": key, "operator": operator, "values": values}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    spec = {"affinity": {"nodeAffinity": required}}
    node = node_object(labels={} if label is None else {key: label})
    assert satisfies_constraint(parse_constraint(spec), parse_node(node)) is judge(spec, node)


@settings(max_examples=300, deadline=None)
@given(
    toleration=st.fixed_dictionaries(
        {"key": st.sampled_from(["t", ""]), "operator": st.sampled_from(["Equal", "Exists", "Gt", "Lt"])},
        optional={"value": st.sampled_from(["", "1", "2", "01", "-1"]), "effect": EFFECTS},
    ),
    taint=st.fixed_dictionaries(
        {"key": st.just("t"), "effect": EFFECTS, "value": st.sampled_from(["", "1", "2", "01", "-1"])}
    ),
)
def test_a_toleration_is_judged_as_rule_by_rule(toleration, taint):
    spec, node = {"tolerations": [toleration]}, node_object(taints=[taint])
    found = satisfies_constraint(parse_constraint(spec), parse_node(node))
    assert found is judge(spec, node)


@settings(max_examples=60, deadline=None)
@given(spec=SPEC, data=st.data())
def test_the_order_of_what_is_written_changes_nothing(spec, data):
    mixed = dict(spec)
    if spec.get("tolerations"):
        mixed["tolerations"] = data.draw(st.permutations(spec["tolerations"]))
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if affinity:
        terms = data.draw(st.permutations(affinity["nodeSelectorTerms"]))
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        mixed["affinity"] = {"nodeAffinity": required}
    assert parse_constraint(mixed) == parse_constraint(spec)
    assert trait_name(parse_constraint(mixed)) == trait_name(parse_constraint(spec))


@settings(max_examples=60, deadline=None)
@given(specs=st.lists(SPEC, min_size=1, max_size=4), node=NODE)
def test_a_node_has_the_traits_of_what_it_satisfies(specs, node):
    constraints, seen = [parse_constraint(spec) for spec in specs], parse_node(node)
    assert traits_of(seen, constraints) == {trait_name(one) for one in constraints if satisfies_constraint(one, seen)}


@settings(max_examples=60, deadline=None)
@given(spec=SPEC, nodes=st.lists(NODE, max_size=4))
def test_without_a_trait_every_open_node_of_the_fleet_will_do(spec, nodes):
    constraint, seen = parse_constraint(spec), [parse_node(node) for node in nodes]
    if trait_name(constraint, [taint for node in seen for taint in node.taints]) == "":
        assert all(satisfies_constraint(constraint, node) for node in seen if not node.is_unschedulable)
