"""Rules between pods, and of volumes, against an obvious twin that walks over every node and pod of the plain objects."""

from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_controller.engines.kubernetes.model.objects import parse_node, parse_pod
from eelgrid_controller.engines.kubernetes.scheduling import topology_constraints as rules

ZONE, HOST = "topology.kubernetes.io/zone", "kubernetes.io/hostname"
BETA_ZONE = "failure-domain.beta.kubernetes.io/zone"
NAMES = ("n0", "n1", "n2", "n3")
PIN = rules.PIN_REFUSED

LABELS = st.dictionaries(st.sampled_from(["app", "v"]), st.sampled_from(["a", "b"]), max_size=2)
EXPRESSION = st.fixed_dictionaries(
    {"key": st.sampled_from(["app", "v"]), "operator": st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist"])}
).map(lambda one: {**one, "values": ["a"]} if one["operator"] in ("In", "NotIn") else one)
SELECTOR = st.none() | st.fixed_dictionaries(
    {},
    optional={
        "matchLabels": st.dictionaries(st.sampled_from(["app", "v"]), st.sampled_from(["a", "b"]), max_size=1),
        "matchExpressions": st.lists(EXPRESSION, max_size=1),
    },
)
KEYS = st.lists(st.sampled_from(["app", "v", "other"]), max_size=1)
TERM = st.fixed_dictionaries(
    {"topologyKey": st.sampled_from([ZONE, HOST]), "labelSelector": SELECTOR},
    optional={
        "namespaces": st.lists(st.sampled_from(["x", "y"]), max_size=1),
        "namespaceSelector": st.none() | st.just({}) | st.just({"matchLabels": {"team": "red"}}),
        "matchLabelKeys": KEYS,
        "mismatchLabelKeys": KEYS,
    },
)
SPREAD = st.fixed_dictionaries(
    {
        "topologyKey": st.sampled_from([ZONE, HOST]),
        "maxSkew": st.integers(1, 2),
        "whenUnsatisfiable": st.sampled_from(["DoNotSchedule", "DoNotSchedule", "ScheduleAnyway"]),
        "labelSelector": SELECTOR,
    },
    optional={
        "minDomains": st.integers(1, 4),
        "nodeAffinityPolicy": st.sampled_from(["Honor", "Ignore"]),
        "nodeTaintsPolicy": st.sampled_from(["Honor", "Ignore"]),
        "matchLabelKeys": KEYS,
    },
)
RELATIONS = st.fixed_dictionaries(
    {},
    optional={
        "spread": st.lists(SPREAD, max_size=2),
        "near": st.lists(TERM, max_size=2),
        "far": st.lists(TERM, max_size=2),
    },
)
NAMESPACES = {"x": {"team": "red"}, "y": {"team": "blue"}}


def pod(
    uid,
    namespace,
    labels,
    relations,
    *,
    node="",
    going=False,
    selector=None,
    affinity=None,
    tolerations=None,
    volumes=None,
):
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    return {
        "metadata": {
            "name": uid,
            "uid": uid,
            "namespace": namespace,
            "labels": labels,
            **({"deletionTimestamp": "2026-11-22T04:00:00Z"} if going else {}),
        },
        "spec": {
            "containers": [{"name": "main"}],
            "nodeName": node,
            "nodeSelector": selector,
            "tolerations": tolerations,
            "topologySpreadConstraints": relations.get("spread"),
            "volumes": volumes,
            "affinity": {
                "podAffinity": {required: relations.get("near")},
                "podAntiAffinity": {required: relations.get("far")},
                **({"nodeAffinity": affinity} if affinity else {}),
            },
        },
    }


def node(name, labels, taints=()):
    return {"metadata": {"name": name, "uid": name, "labels": labels}, "spec": {"taints": list(taints)}}


TAINT = {"key": "t", "effect": "NoSchedule"}
NODE_LABELS = st.fixed_dictionaries({}, optional={ZONE: st.sampled_from(["z1", "z2", "z3"]), "gpu": st.just("yes")})
NODES = st.lists(st.tuples(NODE_LABELS, st.booleans(), st.booleans()), min_size=1, max_size=4).map(
    lambda found: [
        node(name, {**labels, **({HOST: name} if has_host else {})}, [TAINT] if tainted else [])
        for name, (labels, has_host, tainted) in zip(NAMES, found, strict=False)
    ]
)
PODS = st.lists(
    st.tuples(st.sampled_from(["x", "y"]), LABELS, RELATIONS, st.sampled_from(NAMES), st.booleans()), max_size=6
)
INCOMING = st.tuples(
    st.sampled_from(["x", "y"]), LABELS, RELATIONS, st.sampled_from([None, {"gpu": "yes"}]), st.booleans()
)


# The twin


def selects(selector, labels):
    if selector is None:
        return False
    lines = [(key, "In", [value]) for key, value in (selector.get("matchLabels") or {}).items()]
    lines += [(one["key"], one["operator"], one.get("values")) for one in selector.get("matchExpressions") or []]
    return all(line(key, operator, values, labels) for key, operator, values in lines)


def line(key, operator, values, labels):
    if operator == "In":
        return labels.get(key) in values
    if operator == "NotIn":
        return labels.get(key) not in values
    return (key in labels) == (operator == "Exists")


def means(term, owner, other):
    """Whether a term of one pod means another pod."""
    space = other["metadata"]["namespace"]
    named, chosen = term.get("namespaces") or [], term.get("namespaceSelector")
    if not named and chosen is None:
        named = [owner["metadata"]["namespace"]]
    if space not in named and not selects(chosen, NAMESPACES[space]):
        return False
    selector, own, its = term["labelSelector"], owner["metadata"]["labels"], other["metadata"]["labels"]
    if not selects(selector, its):
        return False
    if any(key in own and its.get(key) != own[key] for key in term.get("matchLabelKeys") or []):
        return False
    return not any(key in own and its.get(key) == own[key] for key in term.get("mismatchLabelKeys") or [])


def terms(found, kind):
    return found["spec"]["affinity"][kind]["requiredDuringSchedulingIgnoredDuringExecution"] or []


def same_domain(key, one, other):
    return key in one["metadata"]["labels"] and one["metadata"]["labels"][key] == other["metadata"]["labels"].get(key)


def affinity_holds(found, at, nodes, pods):
    by_name = {one["metadata"]["name"]: one for one in nodes}
    placed = [one for one in pods if one["spec"]["nodeName"] in by_name]
    near = terms(found, "podAffinity")
    if near:
        if any(term["topologyKey"] not in at["metadata"]["labels"] for term in near):
            return False
        friends = [one for one in placed if all(means(term, found, one) for term in near)]
        where = [by_name[one["spec"]["nodeName"]] for one in friends]
        if not all(any(same_domain(term["topologyKey"], at, other) for other in where) for term in near):
            anywhere = any(term["topologyKey"] in other["metadata"]["labels"] for term in near for other in where)
            if anywhere or not all(means(term, found, found) for term in near):
                return False
    for one in placed:
        other = by_name[one["spec"]["nodeName"]]
        if any(
            means(term, found, one) and same_domain(term["topologyKey"], at, other)
            for term in terms(found, "podAntiAffinity")
        ):
            return False
        if any(
            means(term, one, found) and same_domain(term["topologyKey"], at, other)
            for term in terms(one, "podAntiAffinity")
        ):
            return False
    return True


def spread_holds(found, at, nodes, pods, *, pinned=None):
    """As kube-scheduler sees it; with a pin, its required node affinity means that one node."""
    wanted = [
        one for one in found["spec"]["topologySpreadConstraints"] or [] if one["whenUnsatisfiable"] == "DoNotSchedule"
    ]
    for one in wanted:
        key = one["topologyKey"]
        if key not in at["metadata"]["labels"]:
            return False
        totals = {}
        for other in nodes:
            labels = other["metadata"]["labels"]
            if any(each["topologyKey"] not in labels for each in wanted):
                continue
            if one.get("nodeAffinityPolicy", "Honor") == "Honor":
                selector = found["spec"]["nodeSelector"] or {}
                if any(labels.get(name) != value for name, value in selector.items()):
                    continue
                if pinned is not None and other["metadata"]["name"] != pinned:
                    continue
            tolerates = bool(found["spec"]["tolerations"])
            if one.get("nodeTaintsPolicy", "Ignore") == "Honor" and other["spec"]["taints"] and not tolerates:
                continue
            here = [
                each
                for each in pods
                if each["spec"]["nodeName"] == other["metadata"]["name"]
                and each["metadata"]["namespace"] == found["metadata"]["namespace"]
                and "deletionTimestamp" not in each["metadata"]
                and counted(one, found, each)
            ]
            totals[labels[key]] = totals.get(labels[key], 0) + len(here)
        least = min(totals.values()) if totals and len(totals) >= one.get("minDomains", 1) else 0
        own = int(spread_selects(one, found, found))
        if totals.get(at["metadata"]["labels"][key], 0) + own - least > one["maxSkew"]:
            return False
    return True


def spread_selects(one, found, other):
    own, its = found["metadata"]["labels"], other["metadata"]["labels"]
    return selects(one["labelSelector"], its) and all(
        its.get(key) == own[key] for key in one.get("matchLabelKeys") or [] if key in own
    )


def counted(one, found, other):
    selector = one["labelSelector"]
    has_keys = any(key in found["metadata"]["labels"] for key in one.get("matchLabelKeys") or [])
    is_empty = selector is not None and not selector.get("matchLabels") and not selector.get("matchExpressions")
    return spread_selects(one, found, other) and (has_keys or not is_empty)


# The two against each other


def cluster(nodes):
    found = rules.ClusterNodes()
    for one in nodes:
        found.put_node(parse_node(one))
    return found


def placed(one):
    return rules.placed_pod(parse_pod(one), one["spec"]["nodeName"])


def index(pods):
    found = rules.PodIndex()
    for name, labels in NAMESPACES.items():
        found.set_namespace(name, labels)
    for one in pods:
        found.put_pod(placed(one))
    return found


def made(found):
    return [
        pod(f"p{number}", space, labels, relations, node=where, going=going)
        for number, (space, labels, relations, where, going) in enumerate(found)
    ]


def incoming(found):
    space, labels, relations, selector, tolerates = found
    tolerations = [{"key": "t", "operator": "Exists"}] if tolerates else None
    return pod("new", space, labels, relations, selector=selector, tolerations=tolerations)


@settings(max_examples=400, deadline=None)
@given(new=INCOMING, nodes=NODES, standing=PODS)
def test_pod_affinity_is_evaluated_as_pod_by_pod(new, nodes, standing):
    new, pods = incoming(new), made(standing)
    refused = rules.evaluate_pod_affinity(parse_pod(new), cluster(nodes), index(pods))
    for one in nodes:
        assert (one["metadata"]["name"] not in refused) is affinity_holds(new, one, nodes, pods)


@settings(max_examples=400, deadline=None)
@given(new=INCOMING, nodes=NODES, standing=PODS)
def test_topology_spread_is_evaluated_as_node_by_node(new, nodes, standing):
    new, pods = incoming(new), made(standing)
    refused = rules.evaluate_topology_spread(parse_pod(new), cluster(nodes), index(pods))
    for one in nodes:
        name = one["metadata"]["name"]
        holds = spread_holds(new, one, nodes, pods)
        assert (refused.get(name, PIN) == PIN) is holds
        # What is not refused passes the scheduler with the pin, too.
        if name not in refused and "gpu" in one["metadata"]["labels"]:
            assert spread_holds(new, one, nodes, pods, pinned=name)


@settings(max_examples=200, deadline=None)
@given(new=INCOMING, nodes=NODES, standing=PODS, planned=PODS, data=st.data())
def test_pods_that_are_planned_count_as_those_that_stand(new, nodes, standing, planned, data):
    new, pods = incoming(new), made(standing)
    found, known = parse_pod(new), index(pods)
    # Warm the counts, so that what is kept is what is changed afterwards.
    rules.evaluate_pod_affinity(found, cluster(nodes), known)
    rules.evaluate_topology_spread(found, cluster(nodes), known)
    gone = data.draw(st.sets(st.sampled_from([one["metadata"]["uid"] for one in pods])) if pods else st.just(set()))
    more = [{**one, "metadata": {**one["metadata"], "uid": f"q{at}"}} for at, one in enumerate(made(planned))]
    left = [one for one in pods if one["metadata"]["uid"] not in gone]
    overlaid = known.overlaid(gone, [placed(one) for one in more])
    whole = index([*left, *more])
    for evaluate in (rules.evaluate_pod_affinity, rules.evaluate_topology_spread):
        assert evaluate(found, cluster(nodes), overlaid) == evaluate(found, cluster(nodes), whole)
    for uid in gone:
        known.remove(uid)
    for one in more:
        known.put(placed(one))
    for evaluate in (rules.evaluate_pod_affinity, rules.evaluate_topology_spread):
        assert evaluate(found, cluster(nodes), known) == evaluate(found, cluster(nodes), whole)


VOLUME_NODE = st.fixed_dictionaries(
    {},
    optional={
        ZONE: st.sampled_from(["z1", "z2"]),
        BETA_ZONE: st.sampled_from(["z1", "z2"]),
        HOST: st.sampled_from(NAMES),
    },
)
VOLUME = st.fixed_dictionaries(
    {
        "labels": st.dictionaries(
            st.sampled_from([ZONE, BETA_ZONE]), st.sampled_from(["z1", "z2", "z1__z2"]), max_size=2
        ),
        "terms": st.none()
        | st.lists(st.tuples(st.sampled_from([ZONE, HOST]), st.sampled_from(["z1", "n0", "n1"])), max_size=2),
    }
)
CLAIM = st.fixed_dictionaries(
    {"state": st.sampled_from(["bound", "bound", "delayed", "immediate", "static", "gone", "absent"])}
)


def volume_holds(volume, labels):
    if volume["terms"] is not None and not any(labels.get(key) == value for key, value in volume["terms"]):
        return False
    if ZONE not in labels and BETA_ZONE not in labels:
        return True
    for key, text in volume["labels"].items():
        value = labels[key] if key in labels else labels.get(ZONE) if key == BETA_ZONE else None
        if value not in text.split("__"):
            return False
    return True


@settings(max_examples=200, deadline=None)
@given(
    claims=st.lists(CLAIM, min_size=1, max_size=2),
    volumes=st.lists(VOLUME, min_size=2, max_size=2),
    labels=st.lists(VOLUME_NODE, min_size=1, max_size=3),
)
def test_volumes_are_evaluated_as_one_by_one(claims, volumes, labels):
    known, nodes = rules.Volumes(), [node(name, one) for name, one in zip(NAMES, labels, strict=False)]
    known.classes["delayed"] = rules.parse_storage_class(
        {
            "provisioner": "csi.x",
            "volumeBindingMode": "WaitForFirstConsumer",
            "allowedTopologies": [{"matchLabelExpressions": [{"key": ZONE, "values": ["z1"]}]}],
        }
    )
    known.classes["immediate"] = rules.parse_storage_class({"provisioner": "csi.x", "volumeBindingMode": "Immediate"})
    known.classes["static"] = rules.parse_storage_class(
        {"provisioner": "kubernetes.io/no-provisioner", "volumeBindingMode": "WaitForFirstConsumer"}
    )
    for at, (claim, volume) in enumerate(zip(claims, volumes, strict=False)):
        terms = volume["terms"]
        affinity = (
            {
                "required": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]}
                        for key, value in terms
                    ]
                }
            }
            if terms is not None
            else None
        )
        known.volumes[f"v{at}"] = rules.parse_volume(
            {"metadata": {"name": f"v{at}", "labels": volume["labels"]}, "spec": {"nodeAffinity": affinity}}
        )
        state = claim["state"]
        if state == "absent":
            continue
        is_bound = state in ("bound", "gone")
        metadata = {"name": f"c{at}", "annotations": {"pv.kubernetes.io/bind-completed": "yes"} if is_bound else {}}
        if state == "gone":
            metadata["deletionTimestamp"] = "2026-11-22T04:00:00Z"
        spec = {"volumeName": f"v{at}"} if is_bound else {"storageClassName": state}
        known.claims["x", f"c{at}"] = rules.parse_volume_claim({"metadata": metadata, "spec": spec})
    wanted = [{"name": f"w{at}", "persistentVolumeClaim": {"claimName": f"c{at}"}} for at in range(len(claims))]
    found = rules.evaluate_volume_topology(parse_pod(pod("new", "x", {}, {}, volumes=wanted)), cluster(nodes), known)
    states = [claim["state"] for claim in claims]
    first = next((state for state in states if state in ("absent", "gone", "immediate", "static")), "")
    assert bool(found.waits) is (first in ("absent", "gone", "immediate"))
    assert bool(found.left) is (first == "static")
    if first:
        return
    for one in nodes:
        its = one["metadata"]["labels"]
        holds = all(
            volume_holds(volume, its) if state == "bound" else its.get(ZONE) == "z1"
            for state, volume in zip(states, volumes, strict=False)
        )
        assert (one["metadata"]["name"] not in found.refused) is holds
