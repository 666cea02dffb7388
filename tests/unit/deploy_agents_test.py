"""The agents of each pool: their flags, privileges and paths are what their level and their services need."""

from pathlib import Path

import pytest
from tests.deploy_rig import VALUES, container, needs_helm, objects_of, pick
from tests.fakes.kubernetes.cel import evaluate

from eelgrid_agent.metrics.web_config import load_web_config
from eelgrid_agent.node.config import LEASE_SOCKET, parse_flags

pytestmark = needs_helm
# Values and pool: whether the agent is a DRA driver, and which device plugin it is.
SERVES = {
    ("dra", "slices"): (True, "off"),
    ("dra", "watch"): (True, "off"),
    ("dra", "plugin"): (False, "cdi"),
    ("enforce", "power"): (False, "environment"),
    ("enforce", "slices"): (False, "cdi"),
}


@pytest.mark.parametrize("name", VALUES)
def test_the_agent_takes_its_flags(name):
    for found in objects_of(name):
        if found["kind"] == "DaemonSet":
            config = parse_flags([argument.replace("$(NODE_NAME)", "node-1") for argument in container(found)["args"]])
            assert config.node_name == "node-1"
            assert config.pool == found["metadata"]["labels"]["eelgrid.io/pool"]
            assert config.controller.endswith((".eelgrid.svc:7443", "eelgrid-ingest.eelgrid.svc:7444"))
            assert (config.tls is None) == config.insecure
            assert (config.dra, config.device_plugin) == SERVES.get((name, config.pool), (False, "off"))
            assert config.listen.startswith("127.0.0.1:")
            assert config.power_budget_w == (5600.0 if (name, config.pool) == ("enforce", "power") else None)


PRIVILEGES = {
    "watch": (["SYS_PTRACE"], True, {"state": "emptyDir"}),
    "power": (["SYS_ADMIN", "SYS_PTRACE"], False, {"state": "hostPath"}),
    "slices": (["SYS_ADMIN", "MKNOD", "SYS_PTRACE"], False, {"state": "hostPath", "capability-nodes": "hostPath"}),
}


@pytest.mark.parametrize("pool", PRIVILEGES)
def test_an_agent_has_what_its_level_needs_and_no_more(pool):
    capabilities, observes, volumes = PRIVILEGES[pool]
    found = pick(objects_of("enforce"), "DaemonSet", f"eelgrid-agent-{pool}")
    inner = container(found)
    security = inner["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": capabilities}
    assert security["readOnlyRootFilesystem"] is True
    assert "privileged" not in security
    assert (security.get("allowPrivilegeEscalation") is False) == observes
    assert ("--observe-only" in inner["args"]) == observes
    held = {volume["name"]: volume for volume in found["spec"]["template"]["spec"]["volumes"]}
    for name, kind in volumes.items():
        assert kind in held[name]
    assert ("capability-nodes" in held) == (pool == "slices")
    names = {entry["name"] for entry in inner["env"]}
    assert ("NVIDIA_MIG_CONFIG_DEVICES" in names) == (pool == "slices")
    mounts = {mount["name"]: mount for mount in inner["volumeMounts"]}
    assert set(mounts) == set(held)
    assert mounts["pod-resources"]["readOnly"] is True


def _mounts(found):
    """Paths of the host by where the container sees them."""
    volumes = {one["name"]: one for one in found["spec"]["template"]["spec"]["volumes"] if "hostPath" in one}
    mounts = container(found)["volumeMounts"]
    return {one["mountPath"]: volumes[one["name"]]["hostPath"]["path"] for one in mounts if one["name"] in volumes}


def test_agents_that_serve_devices_reach_the_kubelet_by_the_paths_that_it_sees():
    moved = ("--set", "agent.kubeletDirectory=/data/kubelet")
    for folder, options in (("/var/lib/kubelet", ()), ("/data/kubelet", moved)):
        objects = objects_of("dra", options=options)
        for pool in ("slices", "watch"):
            found = pick(objects, "DaemonSet", f"eelgrid-agent-{pool}")
            mounts = _mounts(found)
            for part in ("plugins/gpu.eelgrid.io", "plugins_registry"):
                assert mounts[f"{folder}/{part}"] == f"{folder}/{part}"
            assert mounts["/var/run/cdi"] == "/var/run/cdi"
            # What was given must be known to the next agent.
            assert mounts["/var/lib/eelgrid"] == "/var/lib/eelgrid"
            spec = found["spec"]["template"]["spec"]
            assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("eelgrid-agent-dra", True)
        plugin = pick(objects, "DaemonSet", "eelgrid-agent-plugin")
        assert _mounts(plugin)["/var/lib/kubelet/device-plugins"] == f"{folder}/device-plugins"
        spec = plugin["spec"]["template"]["spec"]
        assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("eelgrid-agent", False)
    plain = pick(objects_of("default"), "DaemonSet")
    assert not {"/var/lib/kubelet/device-plugins", "/var/run/cdi"} & set(_mounts(plain))


def test_engines_beside_kubernetes_reach_the_lease_socket_in_a_folder_of_the_host():
    plain = pick(objects_of("default"), "DaemonSet")
    assert not [one for one in container(plain)["args"] if one.startswith("--lease-socket")]
    found = pick(objects_of("default", options=("--set", "agent.leaseFolder=/run/eelgrid")), "DaemonSet")
    socket = parse_flags([one.replace("$(NODE_NAME)", "n") for one in container(found)["args"]]).lease_socket
    mounts = _mounts(found)
    # Where the client on the host looks by itself.
    assert Path(mounts[str(socket.parent)]) / socket.name == LEASE_SOCKET
    # What was given must be known to the next agent, and the socket is for root.
    assert mounts["/var/lib/eelgrid"] == "/var/lib/eelgrid"
    assert found["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 0


def test_agents_list_the_folders_of_model_data_that_the_chart_names_and_write_nothing_there():
    folders = ("/var/cache/huggingface/hub", "/data/models")
    found = pick(objects_of("default", options=("--set", f"agent.modelData={{{','.join(folders)}}}")), "DaemonSet")
    listed = parse_flags([one.replace("$(NODE_NAME)", "n") for one in container(found)["args"]]).model_data_folders
    mounts = _mounts(found)
    assert tuple(mounts[str(folder)] for folder in listed) == folders
    read_only = {one["mountPath"] for one in container(found)["volumeMounts"] if one.get("readOnly")}
    assert {str(folder) for folder in listed} <= read_only
    assert not [one for one in container(pick(objects_of("default"), "DaemonSet"))["args"] if "model-data" in one]


def test_classes_choose_what_agents_publish():
    devices = {
        kind: {"driver": "gpu.eelgrid.io", "attributes": {"gpu.eelgrid.io": {"type": kind}}} for kind in ("gpu", "mig")
    }
    classes = [one for one in objects_of("dra") if one["kind"] == "DeviceClass"]
    chosen = {
        one["metadata"]["name"]: [
            kind
            for kind, device in devices.items()
            if all(evaluate(by["cel"]["expression"], device=device) for by in one["spec"]["selectors"])
        ]
        for one in classes
    }
    assert chosen == {"gpu.eelgrid.io": ["gpu"], "mig.eelgrid.io": ["mig"]}
    assert not [one for one in objects_of("default") if one["kind"] == "DeviceClass"]


def test_an_agent_that_reads_nothing_of_others_is_nobody():
    spec = pick(objects_of("single"), "DaemonSet")["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert "hostPID" not in spec
    assert not [volume for volume in spec["volumes"] if "hostPath" in volume]


def test_agents_of_another_chart_name_find_their_controller():
    objects = objects_of("single")
    (service,) = (one for one in objects if one["kind"] == "Service" and one["spec"].get("clusterIP") != "None")
    target = f"--controller={service['metadata']['name']}.eelgrid.svc:7443"
    assert target in container(pick(objects, "DaemonSet"))["args"]


def test_the_agents_read_the_web_configuration_that_they_are_given(tmp_path):
    for name, wanted in (("kubernetes", "none"), ("enforce", "required")):
        text = pick(objects_of(name), "ConfigMap", "eelgrid-agent-web")["data"]["web.yaml"]
        path = tmp_path / "web.yaml"
        path.write_text(text)
        config = load_web_config(path)
        assert config.tls is not None
        assert config.tls.client_auth == wanted
