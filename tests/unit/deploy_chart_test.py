"""The chart renders, lints clean, fits the schemas of several Kubernetes minors, and starts the daemons as they are."""

import base64
import functools
import json
import re
import subprocess
from importlib import resources

import jsonschema
import pytest
import yaml
from click.core import ParameterSource
from click.testing import CliRunner
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012
from tests.deploy_rig import (
    BAD_BY_SCHEMA,
    CHART,
    GOOD,
    V1BETA1,
    VALUES,
    container,
    crd_files,
    helm_program,
    needs_helm,
    objects_of,
    pick,
)

from eelgrid_controller.__main__ import _OF_INGEST
from eelgrid_controller.__main__ import main as controller
from eelgrid_controller.federation.__main__ import main as front
from eelgrid_controller.federation.__main__ import parse_clusters, parse_page_urls
from eelgrid_controller.runtime.access_control import parse_bindings, parse_user_grants
from eelgrid_protos.certificate import Certificate, read_certificate
from eelgrid_protos.roles import Role, RoleRules, build_caller

pytestmark = needs_helm
# The oldest, the last without the policy, and those with it; 1.35 has a test of its own.
MINORS = ["1.30", "1.34", "1.36", "1.37"]
# Values that need a newer cluster than the oldest.
SINCE = {"dra": "1.36"}
RENDERED = [(name, minor) for name in VALUES for minor in MINORS if minor >= SINCE.get(name, "1.30")]
# Kinds of other projects, whose schemas are theirs.
FOREIGN = {"cert-manager.io/v1", "monitoring.coreos.com/v1"}


def _schema(minor, name):
    found = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{minor}.0-local-strict" / name
    return json.loads(found.read_text())


@functools.cache
def _validator(minor, kind, api_version):
    group, _, version = api_version.rpartition("/")
    name = f"{kind.lower()}-{group.split('.')[0]}-{version}.json".replace("--", "-")
    shared = _definitions(minor)
    return jsonschema.Draft202012Validator(_schema(minor, name), registry=shared)


@functools.cache
def _definitions(minor):
    held = Resource.from_contents(_schema(minor, "_definitions.json"), default_specification=DRAFT202012)
    return Registry().with_resource("_definitions.json", held)


@functools.cache
def _faults(minor, text):
    """Most objects are in every rendering, and the CRDs take a second each."""
    one = json.loads(text)
    return tuple(
        f"{one['kind']} {one['metadata']['name']} {'.'.join(map(str, error.path))}: {error.message[:200]}"
        for error in _validator(minor, one["kind"], one["apiVersion"]).iter_errors(one)
    )


def _complaints(objects, minor):
    ours = [one for one in objects if one["apiVersion"] not in FOREIGN]
    return [fault for one in ours for fault in _faults(minor, json.dumps(one, sort_keys=True))]


@pytest.mark.parametrize(("name", "minor"), RENDERED)
def test_every_object_fits_the_schema(name, minor):
    objects = objects_of(name, f"{minor}.0")
    assert len(objects) >= 10
    assert _complaints(objects, minor) == []


def test_the_policy_of_an_older_cluster_fits_its_schema():
    assert _complaints(objects_of("default", "1.35.0", V1BETA1), "1.35") == []


def test_the_schemas_find_what_is_wrong():
    objects = objects_of("kubernetes")
    pick(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["imagePolicy"] = "Always"
    pick(objects, "MutatingAdmissionPolicy")["spec"]["matchConditions"] = "always"
    assert len(_complaints(objects, "1.36")) == 2


def _helm(*arguments):
    command = [str(helm_program.find()), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", VALUES)
def test_it_lints_clean(name):
    values = [part for path in VALUES[name] for part in ("--values", path)]
    for version in sorted({SINCE.get(name, "1.30"), "1.36"}):
        done = _helm("lint", str(CHART), "--strict", "--quiet", "--kube-version", f"{version}.0", *values)
        assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("agent.levels=mig", "levels"),
        ("agent.pools[0].name=a,agent.pools[0].level=all", "level"),
        ("agent.pools[0].name=a,agent.pools[0].level=observe,agent.pools[0].powerBudgetWatts=9", "agent/pools/0"),
        ("controller.extraArgs={serve}", "extraArgs"),
        ("tls.mode=off", "mode"),
        ("tls.roles=maybe", "roles"),
        ("tls.grants={root=CN:me}", "grants"),
        ("tls.binds={research=CN:me}", "binds"),
        ("controller.replicas=0", "replicas"),
        ("controller.kubernetes.enabled=true,controller.journal.kind=claim", "one writer"),
        ("controller.journal.existingClaim=mine", "kind=claim"),
        ("controller.kubernetes.abilities={everything}", "abilities"),
        ("controller.page=true", "page"),
        ("controller.traces.endpoint=collector", "endpoint"),
        ("controller.traces.sampleRatio=2", "sampleRatio"),
        ("rbac.moves=true", "moves"),
        ("gate.webhook.timeoutSeconds=30", "timeoutSeconds"),
        ("gate.policyVersion=webhook,gate.failurePolicy=Fail", "say Ignore"),
        ("gate.policyVersion=webhook,tls.mode=secret", "gate.webhook.caBundle"),
        ("agent.pools[0].name=a,agent.pools[0].level=mig,agent.pools[0].dra=true", "add claims"),
        (
            "agent.pools[0].name=a,agent.pools[0].level=mig,agent.pools[0].dra=true,agent.pools[0].devicePlugin=cdi",
            "given away twice",
        ),
        ("agent.pools[0].name=a,agent.pools[0].level=mig,agent.pools[0].devicePlugin=nvidia", "devicePlugin"),
        ("front.enabled=true", "needs front.clusters"),
        ("front.enabled=true,front.clusters.north=north", "clusters"),
        ("front.clusters.north=n:7443,front.page.links.south=https://s/", "is none of front.clusters"),
        ("front.grants={agent=CN:me}", "grants"),
    ],
)
def test_values_that_make_no_sense_are_refused(setting, told):
    done = _helm("template", "eelgrid", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert told in done.stderr


def test_dra_is_refused_where_it_cannot_be():
    done = _helm("template", "eelgrid", str(CHART), "--kube-version", "1.35.0", "--values", *VALUES["dra"])
    assert done.returncode != 0
    assert "needs Kubernetes 1.36" in done.stderr


def test_every_value_is_in_the_schema_and_nothing_else():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(value, found, path):
        if not isinstance(value, dict) or "properties" not in found:
            return
        assert set(value) == set(found["properties"]) - {"global"}, path
        for key, inner in value.items():
            compare(inner, found["properties"][key], f"{path}.{key}")

    compare(values, schema, "values")


def _controller_of(objects):
    """The controller's Deployment, where there are ingest processes, too."""
    found = [one for one in objects if one["kind"] == "Deployment"]
    (only,) = [one for one in found if one["metadata"]["labels"]["app.kubernetes.io/component"] == "controller"]
    return only


@pytest.mark.parametrize("name", VALUES)
def test_the_controller_takes_its_flags(name):
    arguments = container(_controller_of(objects_of(name)))["args"]
    with controller.make_context("eelgrid-controller", list(arguments)) as context:
        assert context.params["listen"] == "0.0.0.0:7443"
        assert (context.params["tls_key"] is None) == (name == "single")
        # Metrics and probes leave the pod without TLS; the calls do not, wherever the files are given.
        assert context.params["insecure"]
    assert CliRunner().invoke(controller, ["--no-such-flag"]).exit_code == 2


@pytest.mark.parametrize("name", VALUES)
def test_no_pod_has_more_than_it_says(name):
    for found in objects_of(name):
        if found["kind"] not in {"Deployment", "DaemonSet", "StatefulSet"}:
            continue
        spec = found["spec"]["template"]["spec"]
        assert not spec.get("hostNetwork")
        assert not spec.get("hostIPC")
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container(found)["securityContext"]["readOnlyRootFilesystem"] is True
        assert "limits" in container(found)["resources"]
        is_deployment = found["kind"] == "Deployment"
        is_controller = is_deployment and not found["metadata"]["name"].endswith("-ingest")
        is_driver = "--dra=on" in container(found)["args"]
        assert spec["automountServiceAccountToken"] == (is_driver or (is_controller and name != "agents"))
        if found["kind"] != "DaemonSet":
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert container(found)["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_journal_has_one_writer():
    shared = pick(objects_of("kubernetes"), "Deployment")["spec"]
    assert shared["replicas"] == 2
    assert "emptyDir" in shared["template"]["spec"]["volumes"][0]
    objects = objects_of("single")
    alone = pick(objects, "Deployment")["spec"]
    assert (alone["replicas"], alone["strategy"]) == (1, {"type": "Recreate"})
    claim = pick(objects, "PersistentVolumeClaim")
    assert alone["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"]
    assert not [one for one in objects if one["kind"] == "PodDisruptionBudget"]


@pytest.mark.parametrize(("name", "minor"), [one for one in RENDERED if one[1] in {"1.30", "1.36"}])
def test_whatever_selects_pods_finds_some_and_ports_have_their_names(name, minor):
    objects = objects_of(name, f"{minor}.0")
    pods = [one["spec"]["template"] for one in objects if one["kind"] in {"Deployment", "DaemonSet", "StatefulSet"}]

    def ports_of(labels):
        # The leader's label is put on by the leader.
        labels = {key: value for key, value in labels.items() if key != "eelgrid.io/role"}
        found = [pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]
        assert found, labels
        return {port["name"] for pod in found for port in pod["spec"]["containers"][0]["ports"]}

    services = [one for one in objects if one["kind"] == "Service"]
    for one in objects:
        spec = one.get("spec", {})
        match one["kind"]:
            case "Service":
                assert {port["targetPort"] for port in spec["ports"]} <= ports_of(spec["selector"])
            case "PodDisruptionBudget":
                ports_of(spec["selector"]["matchLabels"])
            case "NetworkPolicy":
                known = ports_of(spec["podSelector"]["matchLabels"])
                assert {port["port"] for rule in spec.get("ingress", ()) for port in rule["ports"]} <= known
            case "PodMonitor":
                assert {end["port"] for end in spec["podMetricsEndpoints"]} <= ports_of(spec["selector"]["matchLabels"])
            case "ServiceMonitor":
                wanted = spec["selector"]["matchLabels"].items()
                (service,) = (found for found in services if wanted <= found["metadata"]["labels"].items())
                assert {end["port"] for end in spec["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}


def test_the_page_and_the_http_api_are_off_unless_enabled_and_as_closed_as_the_api():
    objects = objects_of("kubernetes")
    assert not {"8443", "8444"} & set(re.findall(r"\b844\d\b", json.dumps(objects)))
    objects = objects_of("enforce")
    arguments = container(pick(objects, "Deployment"))["args"]
    assert {"--page=0.0.0.0:8443", "--http-api=0.0.0.0:8444", "--tls-authority=/etc/eelgrid/tls/ca.crt"} <= set(
        arguments
    )
    ports = {port["name"]: port["port"] for port in pick(objects, "Service", "eelgrid-controller")["spec"]["ports"]}
    assert ports == {"grpc": 7443, "page": 8443, "http-api": 8444}
    rules = pick(objects, "NetworkPolicy", "eelgrid-controller")["spec"]["ingress"]
    for port in ("page", "http-api"):
        (rule,) = [rule for rule in rules if {"protocol": "TCP", "port": port} in rule["ports"]]
        assert rule["from"] == [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "operations"}}},
        ], "not the agents; and no empty list, which would let in everybody"
    nobody = objects_of("enforce", options=("--set-json", "networkPolicy.operatorsFrom=[]"))
    rules = pick(nobody, "NetworkPolicy", "eelgrid-controller")["spec"]["ingress"]
    assert "page" not in json.dumps(rules)
    assert "http-api" not in json.dumps(rules)


def test_traces_go_nowhere_unless_an_endpoint_is_given():
    assert "--traces" not in json.dumps(objects_of("kubernetes"))
    assert "OTEL_" not in json.dumps(objects_of("kubernetes"))
    found = container(pick(objects_of("enforce"), "Deployment"))
    assert "--traces=http://collector.monitoring:4317" in found["args"]
    environment = {one["name"]: one.get("value") or one["valueFrom"] for one in found["env"]}
    assert environment["OTEL_TRACES_SAMPLER"] == "parentbased_traceidratio"
    assert environment["OTEL_TRACES_SAMPLER_ARG"] == "0.1"
    secret = {"secretKeyRef": {"name": "collector-headers", "key": "headers"}}
    assert environment["OTEL_EXPORTER_OTLP_HEADERS"] == secret
    whole = container(
        pick(objects_of("kubernetes", options=("--set", "controller.traces.endpoint=c:4317")), "Deployment")
    )
    environment = {one["name"]: one.get("value") for one in whole["env"]}
    assert (environment["OTEL_TRACES_SAMPLER_ARG"], "OTEL_EXPORTER_OTLP_HEADERS" in environment) == ("1", False)


def test_ingest_processes_stand_between_agents_and_the_controller():
    assert "eelgrid-ingest" not in json.dumps(objects_of("enforce"))
    objects = objects_of("ingest")
    found = pick(objects, "Deployment", "eelgrid-ingest")
    assert found["spec"]["replicas"] == 3
    with controller.make_context("eelgrid-controller", list(container(found)["args"])) as context:
        stated = {one for one in context.params if context.get_parameter_source(one) is ParameterSource.COMMANDLINE}
        assert stated <= _OF_INGEST
        assert context.params["ingest"] == "eelgrid-controller.eelgrid.svc:7443"
    # Each goes to the next one only, by a name that its certificate has.
    certificate = pick(objects, "Certificate", "eelgrid-ingest-tls")["spec"]
    assert certificate["subject"] == {"organizations": ["eelgrid:ingest"]}
    assert {"server auth", "client auth"} <= set(certificate["usages"])
    address = next(one for one in container(pick(objects, "DaemonSet"))["args"] if one.startswith("--controller="))
    host, _, port = address.removeprefix("--controller=").rpartition(":")
    service = pick(objects, "Service", "eelgrid-ingest")
    assert host in certificate["dnsNames"]
    assert int(port) == service["spec"]["ports"][0]["port"]
    peers = {}
    for name in ("controller", "ingest", "agent"):
        spec = pick(objects, "NetworkPolicy", f"eelgrid-{name}")["spec"]
        peers[name] = [
            peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            for rule in (*spec["ingress"], *spec.get("egress", ()))
            for peer in (*rule.get("from", ()), *rule.get("to", ()))
            if "podSelector" in peer
        ]
    assert peers == {"controller": ["ingest"], "ingest": ["agent", "controller"], "agent": ["ingest"]}
    # Also where an issuer leaves organizations out, the controller knows them by name; nobody else has that name.
    with controller.make_context("eelgrid-controller", list(container(_controller_of(objects))["args"])) as context:
        grants = parse_user_grants(context.params["grants"])
    bare = Certificate(0.0, 1.0, alternatives=tuple(("DNS", name) for name in certificate["dnsNames"]))
    assert build_caller(bare, grants).roles == {Role.INGEST}


def test_a_front_starts_with_its_flags_keeps_its_records_and_is_as_closed_as_the_api():
    assert "eelgrid-front" not in json.dumps(objects_of("enforce"))
    objects = objects_of("front")
    found = pick(objects, "StatefulSet", "eelgrid-front")
    assert container(found)["command"] == ["eelgrid-front"]
    with front.make_context("eelgrid-front", list(container(found)["args"])) as context:
        given = context.params
        assert set(parse_clusters(given["clusters"])) == {"here", "north", "south"}
        assert parse_clusters(given["clusters"])["north"] == ("north-1.example:7443", "north-2.example:7443")
        assert parse_page_urls(given["page_urls"], ("north",)) == {"north": "https://north.example:8443/"}
        assert (given["page"], given["move_after"]) == ("0.0.0.0:8445", 600.0)
        grants, binds = parse_user_grants(given["grants"]), parse_bindings(given["binds"])
        assert (len(grants), len(binds)) == (1, 1)
        mounts = {one["mountPath"]: one["name"] for one in container(found)["volumeMounts"]}
        assert mounts[str(given["data"])] == "records"
        assert mounts[str(given["tls_key"].parent)] == "tls"
    # A second one would choose for itself.
    (claim,) = found["spec"]["volumeClaimTemplates"]
    assert (found["spec"]["replicas"], claim["spec"]["accessModes"]) == (1, ["ReadWriteOncePod"])
    # It calls no API server.
    assert found["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    bindings = [one for one in objects if one["kind"] in {"RoleBinding", "ClusterRoleBinding"}]
    assert "eelgrid-front" not in json.dumps([one["subjects"] for one in bindings])
    rules = pick(objects, "NetworkPolicy", "eelgrid-front")["spec"]["ingress"]
    ports = {port["port"]: rule["from"] for rule in rules for port in rule["ports"]}
    assert set(ports) == {"grpc", "page", "metrics"}
    assert ports["grpc"] == ports["page"] == _list_operators(objects)
    nobody = objects_of("front", options=("--set-json", "networkPolicy.operatorsFrom=[]"))
    (rule,) = pick(nobody, "NetworkPolicy", "eelgrid-front")["spec"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": "metrics"}]
    # The controller lets it in, and it stands there for users.
    rules = pick(objects, "NetworkPolicy", "eelgrid-controller")["spec"]["ingress"]
    assert '"app.kubernetes.io/component": "front"' in json.dumps(rules)
    with controller.make_context("eelgrid-controller", list(container(_controller_of(objects))["args"])) as context:
        assert parse_bindings(context.params["binds"])
    alerts = json.dumps(pick(objects, "PrometheusRule")["spec"])
    assert {"EelgridFrontClusterSilent", "EelgridFrontWorkStuck"} <= set(re.findall(r"EelgridFront\w+", alerts))


def _list_operators(objects):
    """Who may call the controller, beside pods of the release."""
    rule = pick(objects, "NetworkPolicy", "eelgrid-controller")["spec"]["ingress"][0]
    return [one for one in rule["from"] if "namespaceSelector" in one]


def test_a_front_without_tls_gives_no_roles():
    plain = objects_of("front", options=("--set", "tls.mode=none", "--set", "front.page.enabled=false"))
    with front.make_context("eelgrid-front", list(container(pick(plain, "StatefulSet"))["args"])) as context:
        given = context.params
        assert (given["tls_key"], given["grants"], given["binds"], given["page"]) == (None, (), (), "")
    assert "page" not in json.dumps(pick(plain, "Service", "eelgrid-front"))


def test_certificates_name_what_clients_ask_for():
    objects = objects_of("enforce")
    certificate = pick(objects, "Certificate", "eelgrid-controller-tls")["spec"]
    host = next(a for a in container(pick(objects, "DaemonSet", "eelgrid-agent-power"))["args"] if "--controller" in a)
    assert host.removeprefix("--controller=").rpartition(":")[0] in certificate["dnsNames"]
    # Where `kubectl eelgrid` connects.
    assert "127.0.0.1" in certificate["ipAddresses"]
    for found in objects_of("default"):
        if found["kind"] == "Secret":
            assert set(found["data"]) == {"tls.crt", "tls.key", "ca.crt"}


def test_each_certificate_has_one_role_and_the_controller_demands_it():
    objects = objects_of("enforce")
    named = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "Certificate"}
    roles = {name: spec.get("subject", {}).get("organizations") for name, spec in named.items()}
    assert roles == {
        "eelgrid-controller-tls": None,
        "eelgrid-agent-tls": ["eelgrid:agent"],
        "eelgrid-operator-tls": ["eelgrid:admin"],
        "eelgrid-viewer-tls": ["eelgrid:viewer"],
        "eelgrid-authority": None,
    }
    hosts = set(named["eelgrid-controller-tls"]["dnsNames"])
    for name in ("eelgrid-agent-tls", "eelgrid-operator-tls", "eelgrid-viewer-tls"):
        assert not hosts & set(named[name]["dnsNames"]), "only the controller may pass for the controller"
        assert ("server auth" in named[name]["usages"]) is (name == "eelgrid-agent-tls")
    with controller.make_context("eelgrid-controller", list(container(pick(objects, "Deployment"))["args"])) as context:
        rules = RoleRules(context.params["demand"] == "require", parse_user_grants(context.params["grants"]))
    assert rules.demanded
    # Also where an issuer leaves organizations out.
    for name, wanted in (("agent", Role.AGENT), ("operator", Role.ADMIN), ("viewer", Role.VIEWER)):
        bare = Certificate(0.0, 1.0, alternatives=(("DNS", named[f"eelgrid-{name}-tls"]["dnsNames"][0]),))
        assert build_caller(bare, rules.grants).roles == {wanted}


def test_the_certificates_that_helm_makes_have_the_roles_that_the_controller_grants():
    objects = objects_of("default")
    with controller.make_context("eelgrid-controller", list(container(pick(objects, "Deployment"))["args"])) as context:
        assert context.params["demand"] == "require"
        grants = parse_user_grants(context.params["grants"])
    roles = {
        one["metadata"]["name"]: {
            role.value
            for role in build_caller(read_certificate(base64.b64decode(one["data"]["tls.crt"]).decode()), grants).roles
        }
        for one in objects
        if one["kind"] == "Secret"
    }
    assert roles == {
        "eelgrid-controller-tls": set(),
        "eelgrid-agent-tls": {"agent"},
        "eelgrid-operator-tls": {"admin"},
        "eelgrid-viewer-tls": {"viewer"},
    }


def test_certificates_of_others_keep_their_rights_until_somebody_demands_roles():
    assert "--roles=permit" in container(pick(objects_of("kubernetes"), "Deployment"))["args"]
    options = ("--set", "tls.roles=require", "--set-json", 'tls.grants=["viewer=DNS:grafana.example"]')
    arguments = container(pick(objects_of("kubernetes", options=options), "Deployment"))["args"]
    assert {"--roles=require", "--grant=viewer=DNS:grafana.example"} <= set(arguments)
    assert not any(
        "roles" in one or "grant" in one for one in container(pick(objects_of("single"), "Deployment"))["args"]
    )


def test_agents_ask_of_their_own_callers_what_the_controller_asks_and_rights_reach_the_controller():
    options = (
        "--set",
        "tls.roles=require",
        "--set-json",
        'tls.grants=["viewer=DNS:grafana.example"],tls.binds=["namespace:research=CN:alice"]',
    )
    objects = objects_of("default", options=options)
    ours = list(container(pick(objects, "DaemonSet"))["args"])
    theirs = list(container(pick(objects, "Deployment"))["args"])
    roles = [one for one in theirs if one.startswith(("--roles", "--grant"))]
    assert [one for one in ours if one.startswith(("--roles", "--grant"))] == roles
    assert "--bind=namespace:research=CN:alice" in theirs
    with controller.make_context("eelgrid-controller", theirs) as context:
        assert parse_bindings(context.params["binds"]) == {("CN", "alice"): (("namespace", "research"),)}


def test_the_notes_tell_what_is_there():
    done = _helm("install", "eelgrid", str(CHART), "-n", "grid", "--dry-run=client")
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert "Pool default: level observe: nothing on its nodes is changed" in notes
    assert "Opt in with the label eelgrid.io/managed=true" in notes
    assert "live page" not in notes
    done = _helm(
        "install", "eelgrid", str(CHART), "-n", "grid", "--dry-run=client", "--set", "controller.page.enabled=true"
    )
    notes = done.stdout.partition("NOTES:")[2]
    assert "kubectl -n grid port-forward service/eelgrid-controller 8443" in notes
    assert "https://127.0.0.1:8443/" in notes
    assert "secret eelgrid-viewer-tls" in notes


@pytest.mark.parametrize("name", GOOD)
def test_our_kinds_take_what_is_good(name):
    _check_ours(GOOD[name])


@pytest.mark.parametrize("name", BAD_BY_SCHEMA)
def test_our_kinds_refuse_what_is_bad(name):
    with pytest.raises(jsonschema.ValidationError):
        _check_ours(BAD_BY_SCHEMA[name])


def _check_ours(found):
    (version,) = crd_files()[found["kind"]]["spec"]["versions"]
    jsonschema.Draft202012Validator(version["schema"]["openAPIV3Schema"]).validate(found)


def test_our_kinds_keep_the_conventions():
    for kind, crd in crd_files().items():
        (version,) = crd["spec"]["versions"]
        assert version["subresources"] == {"status": {}}
        assert crd["metadata"]["name"] == f"{kind.lower()[:-1]}ies.eelgrid.io" or kind == "InferenceService"
        properties = version["schema"]["openAPIV3Schema"]["properties"]
        assert properties["status"]["properties"]["conditions"]["x-kubernetes-list-map-keys"] == ["type"]
        text = json.dumps(version["schema"])
        # Unbounded lists and texts make rules in CEL too dear for the API server.
        assert text.count('"type": "array"') == text.count('"maxItems"')
        for column in version["additionalPrinterColumns"]:
            first = re.match(r"\.(\w+)\.(\w+)", column["jsonPath"])
            if first[1] != "metadata":
                assert first[2] in properties[first[1]]["properties"], column
