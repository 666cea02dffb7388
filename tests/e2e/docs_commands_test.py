"""Every command that the README, a tutorial, a how-to page or a runbook advises exists and answers.

Fenced blocks of guides are run by docs_blocks_test and those of tutorials by docs_tutorials_test; here are the commands
inside sentences, the blocks that need what is not on this machine, and the README. Names in capitals, and those of
examples, are replaced by objects of a real cluster with work in every state. What is not run is in UNRUN with its reason.
"""

import json
import re
import shlex

import pytest
from tests.deploy_rig import CHART
from tests.docs_rig import _FENCE as FENCE
from tests.docs_rig import GUIDES, ROOT, TUTORIALS, blocks_of
from tests.fork_server import run_program
from tests.operations_rig import MODEL, PLACED, SERVICE, WAITING, BusyCluster, find_commands

PAGES = (ROOT / "README.md", *TUTORIALS, *GUIDES)
OURS = ("eelctl", "eelgrid-agent", "eelgrid-controller", "kubectl")
FOREIGN = ("helm", "nvidia-smi", "systemctl", "curl", "journalctl", "dmesg", "nvidia-bug-report.sh")
# Objects for the names in capitals, and for those of examples.
OBJECTS = {
    "NODE": "gpu-1", "WORKLOAD": PLACED, "W": PLACED, "ID": WAITING, "REPLICAS": "2", "POOL": "slices", "SECONDS": "1",
    "PLACE": "cluster", "WATTS": "100kW", "GPU": "gpu-1/0", "MODEL": MODEL, "ADDRESS": "", "a": "default",
    "NAME": "billing", "NODE/INDEX": "gpu-1/0", "NODE/GPU": "gpu-1/0",
}  # fmt: skip
# What a sentence that names an option leaves out.
LEFT_OUT = {"--csv": "energy.csv", "--drain": "gpu-2", "--filter": "STATE=ready"}
# Whatever does not end with 0 has the exit code that is expected of it here, and why.
EXPECTED = {
    "eelctl moves apply moves-812-3fa0c1d2": (4, "a recommendation of another cluster"),
    "eelctl explain slurm-12": (4, "a job of a Slurm cluster; tests/e2e/slurm_test.py"),
    "eelctl explain flux-f3B1wxK1": (4, "a job of a Flux instance; tests/contracts/flux_contract_test.py"),
    "eelctl flux spans --since 7d --user ann": (5, "this controller follows no Flux instance; the same test"),
    "eelctl clusters": (1, "this controller is no front; tests/e2e/several_clusters_test.py"),
    "eelctl clusters -o wide": (1, "the same"),
    "eelctl clusters train-7": (1, "the same"),
    "eelctl --cluster north doctor": (1, "the same"),
    "eelctl --cluster north nodes": (1, "the same"),
    "eelctl --cluster north workloads": (1, "the same"),
    "eelctl interference adopt --dry-run": (
        5,
        "no job of this cluster reports its steps; tests/unit/interference_estimates_test.py",
    ),
    "eelctl interference adopt whisper resnet-50": (4, "the same"),
    "eelctl frontier --running": (1, "the fleet cannot carry the rate of the example"),
    "eelctl doctor": (1, "a GPU of the cluster is lost"),
}
_ATTACHED = "waits for a job; tests/e2e/attach_test.py"
_OF_AN_ARRAY = "needs an array; tests/e2e/job_arrays_test.py"
UNRUN = {
    "eelctl logs w-7_3": _OF_AN_ARRAY,
    "eelctl hold w-7_{4..6}": _OF_AN_ARRAY,
    "eelctl attach $job": _ATTACHED,
    "eelctl attach last": _ATTACHED,
    "eelctl attach w-17": _ATTACHED,
    "eelctl logs --attempt 1 $flaky": "needs a job that has failed; tests/e2e/attach_test.py",
    "eelctl run --pty --gpus 1 -- bash": _ATTACHED,
    "eelctl run --pty --gpus 1 --time 2h -- bash": _ATTACHED,
    "eelctl run -i -- sort": _ATTACHED,
    "eelctl run --time 2h --deadline +12h -- python train.py": "is refused where no agent runs processes; the blocks run it",
    "eelctl admin migrate sqlite:////var/lib/eelgrid-controller postgresql://eelgrid@db.example/eelgrid": (
        "needs a PostgreSQL; tests/unit/store_migration_test.py"
    ),
    "eelctl admin migrate --ledger-only sqlite:////var/lib/eelgrid-controller postgresql://eelgrid@db.example/eelgrid": (
        "needs a PostgreSQL; tests/unit/ledger_migration_test.py"
    ),
    "eelctl --controller a:7443,b:7443 --stale nodes": "needs a PostgreSQL; tests/e2e/failover_test.py",
    "eelctl replay": "submits a whole trace",
    "eelctl box start": "starts daemons of this user; tests/e2e/box_test.py",
    "eelctl box start --gpu-sharing mps": "starts daemons of this user; tests/e2e/box_test.py",
    "eelctl run --gpus 0.5 -- python serve.py": "waits for a process; tests/e2e/box_test.py",
    "eelctl run --gpus 1 --model-data meta-llama/Llama-3.1-8B -- python serve.py": (
        "waits for a process; tests/e2e/model_data_test.py"
    ),
    "eelctl run --gpus 1 --model-data meta-llama/Llama-3.1-8B --model-data-worth 100 -- python serve.py": (
        "waits for a process; tests/e2e/model_data_test.py"
    ),
    "eelctl top": "runs until Ctrl-C; `--once` is run by the blocks",
}
# Verbs of kubectl and helm that pages use; each changes or shows what its reader means.
KUBECTL_VERBS = {
    "annotate", "apply", "auth", "cordon", "create", "delete", "describe", "drain", "eelgrid", "get", "label", "logs",
    "patch", "port-forward", "rollout", "uncordon", "wait",
}  # fmt: skip
HELM_VERBS = {"install", "rollback", "template", "uninstall", "upgrade"}
TREE = find_commands()


def advised():
    """Every command by its page: in sentences, and in blocks that no other test runs."""
    found = {}
    for page in PAGES:
        text = page.read_text("utf-8")
        told = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
        for block in blocks_of(page):
            if block.language == "sh" or (block.language == "bash" and block.title):
                told += block.text.replace("\\\n", " ").splitlines()
        for line in told:
            for part in re.split(r"\s&&\s|\s\|\s|;\s", re.sub(r"\s+#\s.*$", "", line)):
                program = part.split()[0] if part.split() else ""
                if program in OURS + FOREIGN:
                    found.setdefault(part.strip(), set()).add(page)
    return found


ADVISED = advised()
BY_PROGRAM = {program: sorted(line for line in ADVISED if line.split()[0] == program) for program in OURS + FOREIGN}
EELCTL = [line for line in BY_PROGRAM["eelctl"] if line not in UNRUN]


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    with BusyCluster(tmp_path_factory.mktemp("commands")) as cluster, pytest.MonkeyPatch.context() as patch:
        cluster.prepare()
        patch.chdir(cluster.folder)
        yield cluster


def substituted(line):
    """The words of a command with the cluster's objects in place of names."""
    words = []
    for word in shlex.split(line)[1:]:
        name, sign, value = word.partition("=")
        words.append(f"{OBJECTS.get(name, name)}{sign}{OBJECTS.get(value, value)}")
    return words


def takes_no_less(words):
    """Whether the words only name a command that needs more, or a group."""
    name = " ".join(words)
    group = any(one.startswith(f"{name} ") for one in TREE) and name not in TREE
    needs = name in TREE and any(one.required for one in TREE[name].params)
    return (
        not words
        or group
        or needs
        or name in {"submit", "cancel", "whatif", "capacity", "frontier", "moves apply", "policy set"}
    )


def asks(words):
    """Whether the command asks before it changes something, and is not only described."""
    command = next((TREE[name] for name in (" ".join(words[:2]), words[0]) if name in TREE), None)
    return command is not None and not {"--help", "--yes"} & {*words} and any(p.name == "yes" for p in command.params)


def test_commands_are_counted():
    assert len(BY_PROGRAM["eelctl"]) >= 50
    assert len(BY_PROGRAM["kubectl"]) >= 40
    assert set(UNRUN) <= set(BY_PROGRAM["eelctl"])
    assert set(EXPECTED) <= set(BY_PROGRAM["eelctl"])


@pytest.mark.parametrize("line", EELCTL)
def test_eelctl_answers(busy, line):
    words = substituted(line)
    if words[:2] == ["--controller", ""]:
        words = words[2:]
    if words and words[-1] in LEFT_OUT:
        words.append(LEFT_OUT[words[-1]])
    if words[:1] == ["drain"] and "--dry-run" not in words and len(words) > 1:
        # The fixed work there goes on.
        words.append("--no-wait")
    if words[0:1] == ["cancel"] and len(words) > 1:
        # Not the work that other commands name; it may be placed or wait.
        busy.done("submit", "--id", "spare", "--name", "spare", "--cpu", 1)
        words[1] = "spare"
    if words[0:1] == ["scale"]:
        words[1] = SERVICE
    if "billing" in words:
        busy.done("energy", "--since", "7d", "--csv", "first.csv", "--confirm-export", "billing")
    if words[:1] == ["doctor"]:
        words += ["--only", "controller", "--metrics", busy.metrics, "--agent", busy.node_address]
    if takes_no_less(words):
        words = [*words, "--help"]
    if words[:2] == ["policy", "set"] and "--help" not in words:
        words.append("--dry-run")
    if asks(words):
        words.append("--yes")
    if words[:1] == ["frontier"] and "--running" in words:
        busy.until(lambda: json.loads(busy.done("get", SERVICE, "-o", "json"))["phase"] == "placed", what="a service")
    result = busy.type(*words)
    if words[:1] in (["cordon"], ["drain"]) and "--help" not in words:
        busy.done("uncordon", words[1])
    code, _ = EXPECTED.get(line, (0, ""))
    assert result.exit_code == code, f"{sorted(page.name for page in ADVISED[line])}: {line}\n{result.output}"
    objects = OBJECTS | ({"WORKLOAD": words[1]} if len(words) > 1 else {})
    for named in re.findall(r"\b(?:NODE|WORKLOAD|ID)\b", line):
        assert objects[named] in result.output, f"{line} does not mention {objects[named]}\n{result.output}"


def option_names(program):
    """The options that a daemon's help has, with those of its subcommands."""
    texts = []
    for arguments in (
        ((), ("mig",), ("mig", "apply"), ("mig", "show"), ("energy",), ("lease", "take"))
        if program == "agent"
        else ((),)
    ):
        done = run_program(f"eelgrid_{program}", (*arguments, "--help"))
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    return set(re.findall(r"(?<!\w)(--[a-z][\w-]*)", "\n".join(texts)))


@pytest.mark.parametrize("program", ["agent", "controller"])
def test_a_daemon_has_the_options_and_commands_that_are_advised(program):
    known = option_names(program)
    lines = BY_PROGRAM[f"eelgrid-{program}"]
    assert lines
    for line in lines:
        words = shlex.split(line)[1:]
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, line
        if words and not words[0].startswith("-"):
            assert program == "agent", line
            assert words[0] in {"mig", "energy", "lease"}, line


def chart_objects():
    """Every word of the chart, its values and its templates: names, labels, resources and definitions."""
    return "\n".join(path.read_text("utf-8") for path in sorted(CHART.rglob("*")) if path.suffix in {".yaml", ".tpl"})


# Annotations and labels that the controller reads from objects of the cluster, in its sources rather than in the chart.
SOURCES = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "controller").rglob("*.py")))
CHART_TEXT = chart_objects()


@pytest.mark.parametrize("line", BY_PROGRAM["kubectl"])
def test_kubectl_is_used_with_known_verbs_and_names_of_ours(line):
    words = [word for word in line.split()[1:] if word != "..."]
    while words and words[0] in {"-n", "--namespace"}:
        words = words[2:]
    if not words:
        return
    assert words[0] in KUBECTL_VERBS, line
    if words[0] == "eelgrid":
        left = words[1:]
        while left and left[0].startswith("-"):
            left = left[2:]
        assert not left or left[0] in {name.split()[0] for name in TREE}, line
        return
    for key in re.findall(r"\b([a-z.]*eelgrid\.io/[a-z-]+[a-z])", line):
        assert key in CHART_TEXT or key in SOURCES, f"{line}: nobody knows {key}"
    for kind in re.findall(r"\b(\w+)\.eelgrid\.io\b(?!/)", line):
        assert f"{kind}.eelgrid.io" in CHART_TEXT or f"{kind}.eelgrid.io" in SOURCES, line
    for name in re.findall(r"(?:deploy|daemonset|service|lease|mutatingwebhookconfiguration)[/ ](eelgrid[\w-]*)", line):
        part = name.removeprefix("eelgrid-")
        assert part.split("-")[0] in CHART_TEXT, f"{line}: the chart makes no {name}"


@pytest.mark.parametrize("line", BY_PROGRAM["helm"])
def test_helm_is_used_with_known_verbs_our_chart_and_its_values(line):
    words = shlex.split(line)[1:]
    assert words[0] in HELM_VERBS, line
    for path in re.findall(r"deploy/helm/[\w-]+", line):
        assert (ROOT / path / "Chart.yaml").is_file(), line
    values = (CHART / "values.yaml").read_text("utf-8")
    for setting in re.findall(r"--set (?:-\w+ )?([\w.]+)=", line):
        for part in setting.split("."):
            assert re.search(rf"^\s*(# )?{part}:", values, re.MULTILINE), f"{line}: no value {setting}"
