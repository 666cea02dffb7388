"""The Slurm node of a machine: its settings file, what scontrol says, and the files that slurmd reads."""

from dataclasses import replace

import pytest

from eelgrid_agent.engine.slurm_node import (
    GresDevice,
    NodeGres,
    SlurmNodeError,
    SlurmNodeView,
    build_gres,
    name_gres_type,
    normalize_gres,
)
from eelgrid_agent.engine.slurm_node_host import (
    CommandAnswer,
    SlurmNodeFileError,
    SlurmNodeHost,
    SlurmNodeSettings,
    list_device_files,
    load_slurm_node,
    parse_node,
    run_command,
)
from eelgrid_protos.messages import ComputeInstance, Gpu, GpuInstance

# As 22.05 prints it, shortened.
SHOWN = (
    "NodeName=d0 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUTot=16 CPULoad=0.01 AvailableFeatures=mig ActiveFeatures=mig "
    "Gres=gpu:3g.40gb:1(S:0),gpu:1g.10gb:2 NodeAddr=127.0.0.1 NodeHostName=localhost Version=22.05.8 OS=Linux RealMemory=64000 "
    "State=IDLE+DRAIN+DYNAMIC_NORM ThreadsPerCore=1 Weight=1 Owner=N/A  Partitions=all  LastBusyTime=2026-11-27T14:00:00 "
    "CfgTRES=cpu=16,mem=64000M AllocTRES= CapWatts=n/a  Reason=the fan rattles [root@2026-11-27T14:00:00]\n"
)
CUT = Gpu(
    uuid="GPU-1",
    index=1,
    product="NVIDIA H100",
    model="H100",
    pci_bus_id="00000000:11:00.0",
    mig_capable=True,
    mig_enabled=True,
    gpu_instances=(
        GpuInstance(id=2, profile_id=9, profile="3g.40gb", start=4, size=4, compute_instances=(ComputeInstance(id=0, uuid="MIG-c"),)),
        GpuInstance(id=1, profile_id=19, profile="1g.10gb+me", start=0, size=1, compute_instances=(ComputeInstance(id=0, uuid="MIG-a"),)),
        GpuInstance(
            id=5,
            profile_id=14,
            profile="2g.20gb",
            start=2,
            size=2,
            compute_instances=(ComputeInstance(id=0, uuid="MIG-x", size=1), ComputeInstance(id=1, uuid="MIG-y", size=1)),
        ),
    ),
)  # fmt: skip
WHOLE = Gpu(uuid="GPU-0", index=0, product="NVIDIA H100", model="H100", catalogue_key="h100-sxm5-80gb")


def settings_of(tmp_path, text):
    path = tmp_path / "slurm-node.toml"
    path.write_text(text)
    return load_slurm_node(path)


def test_a_node_is_read_with_its_states_gres_and_reason():
    assert parse_node(SHOWN) == SlurmNodeView(
        states=frozenset({"IDLE", "DRAIN", "DYNAMIC_NORM"}),
        gres="gpu:1g.10gb:2,gpu:3g.40gb:1",
        reason="the fan rattles",
    )
    silent = parse_node(
        SHOWN.replace("State=IDLE+DRAIN+", "State=DOWN*+").replace(
            "Gres=gpu:3g.40gb:1(S:0),gpu:1g.10gb:2", "Gres=(null)"
        )
    )
    assert silent.states == {"DOWN", "NOT_RESPONDING", "DYNAMIC_NORM"}
    assert silent.gres == ""
    assert parse_node(SHOWN.partition("  Reason=")[0]).reason == ""
    with pytest.raises(SlurmNodeError, match="no state"):
        parse_node("slurm_load_node error")


def test_a_node_that_slurmctld_does_not_have_is_none_and_one_that_cannot_be_asked_is_an_error():
    answers = {"code": CommandAnswer(1, "Node d0 not found")}
    host = SlurmNodeHost(SlurmNodeSettings(node="d0"), run=lambda words, conf: answers["code"])
    assert host.read_node() is None
    answers["code"] = CommandAnswer(1, "slurm_load_node error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(SlurmNodeError, match="Unable to contact"):
        host.read_node()


def test_commands_name_the_node_and_nothing_else():
    asked = []
    settings = SlurmNodeSettings(node="d0", stop=("stop-it",))

    def run(words, conf):
        asked.append((" ".join(words), str(conf)))
        return CommandAnswer(0, "12\n12\n13\n" if words[0] == "squeue" else "")

    host = SlurmNodeHost(settings, run=run)
    assert host.list_jobs() == ("12", "13")
    host.drain("eelgrid: MIG layout")
    host.resume()
    host.delete()
    assert [words for words, _ in asked[1:]] == [
        "scontrol update NodeName=d0 State=DRAIN Reason=eelgrid: MIG layout",
        "scontrol update NodeName=d0 State=RESUME",
        "scontrol delete NodeName=d0",
    ]
    assert {conf for _, conf in asked} == {"/etc/slurm/slurm.conf"}
    assert "--nodelist=d0" in asked[0][0]


def test_reservations_that_name_the_node_are_found():
    said = {
        "--oneliner": "ReservationName=keep StartTime=x Nodes=d[0-3] NodeCnt=4 Users=root\nReservationName=free StartTime=x Nodes=(null)\n"
        "ReservationName=other StartTime=x Nodes=d1 NodeCnt=1\nNo reservations in the system\n",
        "d[0-3]": "d0\nd1\nd2\nd3\n",
        "d1": "d1\n",
    }
    host = SlurmNodeHost(
        SlurmNodeSettings(node="d0"),
        run=lambda words, conf: CommandAnswer(0, said[words[1] if words[1] in said else words[-1]]),
    )
    assert host.list_reservations() == ("keep",)


def test_slurmd_starts_with_what_was_written_and_not_without_its_options(tmp_path):
    started = []
    settings = SlurmNodeSettings(
        node="d0", conf="CPUs=16 Feature=mig", gres_file=tmp_path / "etc" / "gres.conf", uuids_file=tmp_path / "uuids",
        options_file=tmp_path / "run" / "options", start=("start-it",), stop=("stop-it",),
    )  # fmt: skip
    host = SlurmNodeHost(settings, run=lambda words, conf: started.append(words) or CommandAnswer(0, ""))
    assert not host.has_options
    devices = (
        GresDevice(type="1g.10gb", files=("/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap3"), uuid="MIG-a"),
        GresDevice(type="h100", files=("/dev/nvidia1",), uuid="GPU-1"),
    )
    host.start_slurmd(NodeGres(devices=devices))
    assert host.has_options
    assert settings.options_file.read_text() == (
        "SLURMD_OPTIONS=\"-Z -N d0 --conf 'CPUs=16 Feature=mig Gres=gpu:1g.10gb:1,gpu:h100:1'\"\n"
    )
    assert settings.gres_file.read_text().splitlines()[1:] == [
        "AutoDetect=off",
        "NodeName=d0 Name=gpu Type=1g.10gb MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap3",
        "NodeName=d0 Name=gpu Type=h100 File=/dev/nvidia1",
    ]
    assert settings.uuids_file.read_text() == "0 MIG-a\n1 GPU-1\n"
    host.stop_slurmd()
    assert not host.has_options
    assert started == [("start-it",), ("stop-it",)]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    settings = SlurmNodeSettings(node="d0", gres_file=tmp_path / "file" / "gres.conf")
    with pytest.raises(SlurmNodeError, match=r"gres.conf: cannot be written"):
        SlurmNodeHost(settings, run=lambda words, conf: CommandAnswer(0, "")).start_slurmd(NodeGres())


def test_gres_are_the_devices_that_exist_by_type():
    found = build_gres((CUT, WHOLE), lambda gpu, instance, child: (f"/dev/nvidia{gpu.index}",))
    assert found.text == "gpu:1c.2g.20gb:2,gpu:1g.10gb.me:1,gpu:3g.40gb:1,gpu:h100-sxm5-80gb:1"
    assert [one.uuid for one in found.devices] == ["MIG-x", "MIG-y", "MIG-a", "MIG-c", "GPU-0"]
    assert build_gres((replace(CUT, lost=True), replace(WHOLE, mig_enabled=True)), lambda *_: ()).text == ""
    assert build_gres((WHOLE,), lambda *_: (), whole_type="h100").text == "gpu:h100:1"
    assert name_gres_type("NVIDIA H100 80GB") == "NVIDIA.H100.80GB"
    assert normalize_gres("gpu:b:1(S:0-1),gpu:a:2,shard:4") == "gpu:a:2,gpu:b:1"


def test_files_of_a_slice_are_the_gpu_s_and_its_capabilities(tmp_path):
    info = tmp_path / "proc/driver/nvidia/gpus/0000:11:00.0/information"
    info.parent.mkdir(parents=True)
    info.write_text("Device Minor: \t 3\n")
    for name, minor in (("access", 21), ("ci0/access", 22)):
        path = tmp_path / "proc/driver/nvidia/capabilities/gpu3/mig/gi1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\n")
    list_files = list_device_files(SlurmNodeSettings(node="d0", root=tmp_path))
    instance = CUT.gpu_instances[1]
    assert list_files(CUT, instance, instance.compute_instances[0]) == tuple(
        str(tmp_path / name) for name in ("dev/nvidia3", "dev/nvidia-caps/nvidia-cap21", "dev/nvidia-caps/nvidia-cap22")
    )
    assert list_files(WHOLE, None, None) == (str(tmp_path / "dev/nvidia0"),)


def test_settings_are_read_and_what_is_wrong_is_named(tmp_path):
    found = settings_of(
        tmp_path, 'node = "d0"\nconf = "CPUs=4 Feature=mig"\nstart = ["a", "b"]\ndrain_wait_s = 60\nroot = "/x"\n'
    )
    assert (found.node, found.start, found.drain_wait_s, str(found.root)) == ("d0", ("a", "b"), 60.0, "/x")
    for text, problem in (
        ("nodes = 1", "nodes is no setting"),
        ("start = []", "start is no command"),
        ("drain_wait_s = -1", "drain_wait_s is -1"),
        ("conf = 3", "conf is 3"),
        ('conf = "Gres=gpu:1"', "without quotes, Gres"),
        ('conf = "CPUs=1\'; reboot"', "without quotes"),
        ('node = "a b"', "node is 'a b'"),
        ("node", "is no TOML"),
    ):
        with pytest.raises(SlurmNodeFileError) as caught:
            settings_of(tmp_path, text)
        assert problem.split(" ", 1)[1] in str(caught.value), text
    with pytest.raises(SlurmNodeFileError, match="cannot be read"):
        load_slurm_node(tmp_path / "none.toml")


def test_a_command_that_cannot_be_run_is_an_answer(tmp_path):
    assert run_command(("no-such-program",), tmp_path) == CommandAnswer(127, "no-such-program is not installed here")
    assert run_command(("sh", "-c", "echo $SLURM_CONF; exit 3"), tmp_path) == CommandAnswer(3, f"{tmp_path}\n")
