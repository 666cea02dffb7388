"""`eelgrid-agent mig apply --slurm` and `mig resume` over a Slurm that is a file and three scripts; and Slurm's task prolog."""

import subprocess
from pathlib import Path

import pytest
from tests.mig_node import MigNode

SCRIPTS = Path(__file__).parent.parent.parent / "deploy" / "slurm"
SCONTROL = """#!/bin/sh
case "$*" in
  *"show node"*) if [ -e @/node ]; then cat @/node; else echo "Node gpu-7 not found" >&2; exit 1; fi ;;
  *State=DRAIN*) sed -i 's/State=IDLE/State=IDLE+DRAIN/; s/$/ Reason=eelgrid: MIG layout [root@now]/' @/node ;;
  *State=RESUME*) sed -i 's/+DRAIN//; s/ Reason=.*//' @/node ;;
  *delete*) rm @/node ;;
esac
echo "$*" >> @/calls
"""
START = r"""#!/bin/sh
. @/options
echo "$SLURMD_OPTIONS" | sed "s/.*\(Gres=[^ ']*\).*/NodeName=gpu-7 \1 State=IDLE+DYNAMIC_NORM/" > @/node
echo start >> @/calls
"""
PROGRAMS = {"scontrol": SCONTROL, "start": START, "stop": "#!/bin/sh\n", "squeue": "#!/bin/sh\ncat @/jobs\n"}


class SlurmOfScripts(MigNode):
    """`mig` on a node whose Slurm is in a folder."""

    def __init__(self, folder, capsys, monkeypatch):
        super().__init__(folder, capsys)
        self.node, self.calls, self.jobs = folder / "node", folder / "calls", folder / "jobs"
        self.calls.write_text("")
        self.jobs.write_text("")
        (folder / "bin").mkdir()
        for name, text in PROGRAMS.items():
            path = folder / "bin" / name
            path.write_text(text.replace("@/", f"{folder}/"))
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}/bin:/usr/bin:/bin")
        self.file = folder / "slurm-node.toml"
        self.file.write_text(
            f'node = "gpu-7"\nconf = "CPUs=4"\nroot = "{folder}"\nwhole_type = "whole"\n'
            + "".join(f'{name}_file = "{folder}/{name}"\n' for name in ("gres", "uuids", "options"))
            + f'start = ["{folder}/bin/start"]\nstop = ["{folder}/bin/stop"]\n'
        )

    def slurm(self, command, *arguments):
        return self(command, "--slurm", str(self.file), *arguments)

    def gres(self):
        return self.node.read_text().split()[1] if self.node.exists() else ""


@pytest.fixture
def mig(tmp_path, capsys, monkeypatch):
    return SlurmOfScripts(tmp_path, capsys, monkeypatch)


def test_the_node_comes_into_service_and_follows_its_layout(mig):
    code, _, err = mig.slurm("resume")
    assert (code, mig.gres()) == (0, "Gres=gpu:1g.5gb:1,gpu:3g.20gb:1,gpu:whole:2")
    assert "out of service in Slurm for" in err
    assert mig.slurm("resume")[:2] == (0, "nothing was left to do\n")
    code, _, err = mig.slurm("apply", "--yes", "-l", "0=2x3g.20gb", "-l", "1=7g.80gb")
    assert (code, mig.gres()) == (0, "Gres=gpu:3g.20gb:2,gpu:7g.80gb:1,gpu:whole:1")
    assert err.count("out of service in Slurm for") == 1
    assert mig.calls.read_text().splitlines().count("start") == 2


def test_a_layout_that_exists_takes_no_outage(mig):
    mig.slurm("resume")
    before = mig.calls.read_text()
    code, _, err = mig.slurm("apply", "--yes", "-l", "1=off")
    assert code == 0
    assert "out of service" not in err
    assert mig.calls.read_text() == before


def test_a_node_with_jobs_is_refused_and_the_wait_is_bounded(mig):
    mig.slurm("resume")
    before = mig.node.read_text()
    mig.jobs.write_text("12\n")
    code, _, err = mig.slurm("apply", "--yes", "-l", "1=7g.80gb")
    assert code == 1
    assert "jobs of Slurm run on the node (12)" in err
    code, _, err = mig.slurm("apply", "--yes", "-l", "1=7g.80gb", "--drain-wait", "0.1")
    assert code == 1
    assert mig.node.read_text() == before
    assert "State=RESUME" in mig.calls.read_text()


def test_a_settings_file_that_cannot_be_used_is_wrong_use(mig):
    mig.file.write_text("nodes = 1\n")
    code, _, err = mig.slurm("resume")
    assert code == 2
    assert "is no setting" in err
    assert mig("resume")[0] == 0


@pytest.mark.parametrize(
    ("indexes", "expected"), [("1", "MIG-b"), ("0,2", "MIG-a,GPU-1"), ("7", "7")], ids=["one", "several", "unknown"]
)
def test_the_task_prolog_names_slices_by_their_uuids(tmp_path, indexes, expected):
    (tmp_path / "uuids").write_text("0 MIG-a\n1 MIG-b\n2 GPU-1\n")
    environment = {"PATH": "/usr/bin:/bin", "EELGRID_SLURM_UUIDS": str(tmp_path / "uuids"), "SLURM_STEP_GPUS": indexes}
    done = subprocess.run([SCRIPTS / "mig-task-prolog"], check=True, capture_output=True, text=True, env=environment)
    assert done.stdout == f"export CUDA_VISIBLE_DEVICES={expected}\n"
