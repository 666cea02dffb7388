"""Every command of eelctl with normal, no, wrong and hostile input, against a real controller with work in every state.

Commands and their parameters are read from the program itself: a command without an entry in COMMANDS fails, and a new
option is tried with the values of its type without being named here.
"""

import json
import re
from dataclasses import dataclass

import click
import pytest
import yaml
from tests.e2e.processes import free_address
from tests.operations_rig import (
    ENDED,
    JOB,
    MODEL,
    PLACED,
    SERVICE,
    WAITING,
    BusyCluster,
    eelctl_here,
    find_commands,
)

# Letters that move a cursor, ring a bell or turn the direction of text; tabs and line ends are eelctl's own.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
HOSTILE_TEXT = "gh\x1b[31mo\x07\u202est"
LONG_TEXT = "x" * 5000
HUGE = "9" * 40
TEXTS = ("", HOSTILE_TEXT, LONG_TEXT, "ghost", "-1", "nan", "5 bananas")
NUMBERS = ("", "-1", "nan", "inf", "1e400", HUGE, "5 bananas", HOSTILE_TEXT)
CHOICES = ("", "ghost", HOSTILE_TEXT)
# What each exit code may be for (docs/reference/eelctl.md).
WRONG_USE, UNREACHABLE, NO_SUCH, REFUSED = 2, 3, 4, 5
REASONS = {1: "failed", WRONG_USE: "usage", UNREACHABLE: "unreachable", NO_SUCH: "not_found", REFUSED: "refused"}


@dataclass(frozen=True)
class Use:
    """How one command is used: normal arguments, the exit code without any, and wrong ones with code and words."""

    normal: tuple = ()
    # Exit code without arguments, or those it may have by what other tests left; the normal arguments are then left out.
    bare: int | tuple[int, ...] = 0
    wrong: tuple = ()
    # Commands that must have been run before the normal one.
    first: tuple = ()
    # The same, but that fail where another test left things as they must be.
    attempted: tuple = ()
    # Exit code of the normal input.
    code: int = 0
    # Why parts are not tried: keys are "bare", "calls" or a parameter's name.
    untried: tuple = ()


NODE_UNKNOWN = (("ghost",), NO_SUCH, "ghost")
WORK_UNKNOWN = (("ghost",), NO_SUCH, "ghost")
COLUMN_UNKNOWN = (("--sort", "ghost"), WRONG_USE, "--sort")
POLICY = ("--dry-run",)

COMMANDS = {
    "overview": Use(),
    "nodes": Use(wrong=(COLUMN_UNKNOWN, (("--gpu-model", "ghost"), REFUSED, "--gpu-model"))),
    "node remove": Use(("n7", "--dry-run", "--force"), 2, (NODE_UNKNOWN,)),
    "cordon": Use(("gpu-2", "--reason", "fan"), 2, (NODE_UNKNOWN, (("gpu-2/99",), NO_SUCH, "99"))),
    "uncordon": Use(("gpu-2",), 2, (NODE_UNKNOWN, (("gpu-2/99",), NO_SUCH, "99"))),
    "drain": Use(
        ("gpu-2", "--dry-run"),
        2,
        (
            NODE_UNKNOWN,
            (("gpu-2/99",), NO_SUCH, "99"),
            (("gpu-2", "--force"), WRONG_USE, "--grace"),
            (("gpu-2", "--grace", "long"), WRONG_USE, "--grace"),
        ),
    ),
    "gpus": Use(wrong=(COLUMN_UNKNOWN, (("--node", "ghost"), NO_SUCH, "ghost"))),
    "reconcile": Use(("gpu-1",), 2, (NODE_UNKNOWN,)),
    "topology": Use(("gpu-1",), 2, (NODE_UNKNOWN,)),
    "workloads": Use(wrong=(COLUMN_UNKNOWN, (("--all", "--phase", "placed"), WRONG_USE, "--phase"))),
    "queue": Use(wrong=(COLUMN_UNKNOWN,)),
    "queue show": Use(),
    "queue apply": Use(("-f", "queues.yaml", "--dry-run"), 2, ((("-f", "broken.yaml"), REFUSED, "line 2"),)),
    "queue move": Use(
        (WAITING, "default"),
        2,
        ((("ghost", "default"), NO_SUCH, "ghost"),),
        first=(("queue", "apply", "-f", "queues.yaml", "--yes"),),
    ),
    "reservation create": Use(
        ("demo", "--nodes", "gpu-2", "--start", "+30d", "--duration", "2h"),
        2,
        (
            (("x", "--nodes", "ghost", "--duration", "2h"), NO_SUCH, "ghost"),
            (("x", "--duration", "2h"), WRONG_USE, "--nodes"),
            (("x", "--gpus", "2", "--pool", "default", "--duration", "2h"), WRONG_USE, "--gpus"),
            (("x", "--gpus", "9999", "--start", "+9d", "--duration", "2h"), REFUSED, "--gpus"),
            (("x", "--gpus", "1", "--model", "ghost", "--start", "+9d", "--duration", "2h"), REFUSED, "--model"),
            (("x", "--nodes", "gpu-1", "--model", "h100", "--duration", "2h"), WRONG_USE, "--model"),
            (("x", "--nodes", "gpu-1", "--start", "soon", "--duration", "2h"), WRONG_USE, "--start"),
        ),
        attempted=(("reservation", "delete", "demo"),),
        untried=(
            ("again", "the name is taken"),
            ("users", "any text is a user, and the name is taken"),
            ("queue", "any text is a queue, and the name is taken"),
            ("model", "is looked up for --gpus alone, and the name is taken"),
        ),
    ),
    "reservation list": Use(),
    "reservation delete": Use(
        ("brief",),
        2,
        ((("ghost",), NO_SUCH, "ghost"),),
        attempted=(("reservation", "create", "brief", "--nodes", "gpu-2", "--start", "+20d", "--duration", "1h"),),
        untried=(("again", "it is gone"),),
    ),
    "interference list": Use(),
    "interference set": Use(
        ("whisper", "resnet-50", "20%"),
        2,
        (
            (("a", "b", "2"), WRONG_USE, "SLOWDOWN"),
            (("a", "b", "much"), WRONG_USE, "SLOWDOWN"),
            (("", "b", "2%"), REFUSED, "load"),
        ),
    ),
    "interference apply": Use(
        ("-f", "pairs.csv", "--dry-run"), 2, ((("-f", "broken.yaml"), REFUSED, "load, beside, slowdown"),)
    ),
    # Nothing was measured in this cluster.
    "interference adopt": Use(
        ("--dry-run",),
        REFUSED,
        ((("whisper",), WRONG_USE, "both loads"), (("whisper", "resnet-50"), NO_SUCH, "whisper")),
        code=REFUSED,
    ),
    "interference remove": Use(
        ("known", "*"),
        2,
        ((("ghost", "*"), NO_SUCH, "ghost"),),
        first=(("interference", "set", "known", "*", "5%"),),
        untried=(("again", "it is gone"),),
    ),
    "interference limit": Use(("none",), 2, ((("2",), WRONG_USE, "SLOWDOWN"),)),
    "run": Use(
        ("-d", "--", "true"),
        2,
        (
            (("--gpus", "many", "--", "true"), WRONG_USE, "--gpus"),
            (("--begin", "soon", "--", "true"), WRONG_USE, "--begin"),
            (("--array", "0-999999", "--", "true"), WRONG_USE, "--array"),
            (("--param", "lr", "--", "true"), WRONG_USE, "--param"),
            (("--deadline", "soon", "--", "true"), WRONG_USE, "--deadline"),
            (("--deadline-best-effort", "--", "true"), WRONG_USE, "--deadline"),
            (("--signal", "WINCH@5", "--", "true"), WRONG_USE, "--signal"),
            (("--gang", "g", "--", "true"), WRONG_USE, "--gang-parts"),
            (("--gang-parts", "2", "--", "true"), WRONG_USE, "--gang"),
            (("--gang", "g", "--gang-parts", "1", "--", "true"), WRONG_USE, "--gang-parts"),
        ),
        untried=(("unreachable", "any code but 125 would be the job's"), ("command", "would wait for what it starts")),
    ),
    "jobs": Use(wrong=(COLUMN_UNKNOWN,)),
    "logs": Use(untried=(("calls", "needs a job that runs; tests/e2e/run_test.py"),)),
    "attach": Use(untried=(("calls", "needs a job that runs; tests/e2e/attach_test.py"),)),
    "wait": Use(untried=(("calls", "waits until a job has ended; tests/e2e/run_test.py"),)),
    "hold": Use((WAITING,), 2, (WORK_UNKNOWN, ((ENDED,), REFUSED, "only pending work"))),
    "release": Use((WAITING,), 2, (WORK_UNKNOWN,)),
    "requeue": Use((WAITING,), 2, (WORK_UNKNOWN, ((ENDED,), REFUSED, "run it again with eelctl rerun"))),
    "rerun": Use(untried=(("calls", "needs a job that has ended; tests/e2e/run_test.py"),)),
    "box start": Use(untried=(("calls", "starts daemons of this user; tests/e2e/box_test.py"),)),
    "box status": Use(untried=(("calls", "is of daemons of this user; tests/e2e/box_test.py"),)),
    "box stop": Use(untried=(("calls", "stops daemons of this user; tests/e2e/box_test.py"),)),
    "get": Use((WAITING,), 2, (WORK_UNKNOWN,)),
    "submit": Use(
        ("--name", "new", "--cpu", "1", "--dry-run"),
        2,
        (
            (("--name", "a", "--memory", "8"), WRONG_USE, "--memory"),
            (("--name", "a", "--cpu", "1", "--array", "3-1"), WRONG_USE, "--array"),
            (("--name", "a", "--cpu", "1", "--gang", "g", "--gang-parts", "2", "--gang-least", "3"), REFUSED, "--gang-least"),
            (("--name", "a", "--cpu", "1", "--deadline", "6h"), REFUSED, "--expect"),
            (("--name", "a", "--cpu", "1", "--expect", "2h", "--deadline", "1h"), REFUSED, "--deadline"),
            (("--name", "a", "--cpu", "1", "--expect", "2h", "--deadline", "2001-01-01"), REFUSED, "--deadline"),
            (("--name", "a", "--gpus", "1", "--gpu-model", "ghost"), REFUSED, "--gpu-model"),
            (("-f", "broken.yaml"), REFUSED, "line 2"),
        ),
    ),
    "cancel": Use((ENDED,), 2, (WORK_UNKNOWN,)),
    "scale": Use((SERVICE, "2"), 2, (((SERVICE, "many"), WRONG_USE, "REPLICAS"),)),
    # The controller of these tests follows no Flux instance; one that does: tests/contracts/flux_contract_test.py.
    "flux spans": Use(
        bare=REFUSED,
        code=REFUSED,
        untried=tuple((one, "the controller has no spans, whatever is asked") for one in ("job", "user", "limit", "sort", "filter")),
    ),
    "promises": Use(wrong=((("--budget", "cluster=5"), WRONG_USE, "--budget"),)),
    "progress": Use((JOB, "100"), 2, ((("ghost", "1"), NO_SUCH, "ghost"), ((JOB, "nan"), WRONG_USE, "WORK_DONE"))),
    "profile import": Use(("points.csv",), 2, ((("broken.yaml",), REFUSED, "column workload"),)),
    "profile list": Use(wrong=((("ghost",), NO_SUCH, "known are chat"),)),
    "profile predict": Use(
        ("ocr", "--gpu", MODEL, "--points", "few.csv"),
        2,
        (
            (("ghost", "--gpu", MODEL), NO_SUCH, "ghost"),
            (("chat", "--gpu", "ghost"), WRONG_USE, "--gpu"),
            (("chat", "--gpu", MODEL, "--limit", "5"), WRONG_USE, "--limit"),
        ),
        untried=(("slice", "each prediction learns for seconds"), ("limit", "each prediction learns for seconds")),
    ),
    "explain": Use((WAITING,), 2, (WORK_UNKNOWN,)),
    "whatif": Use(
        ("--drain", "gpu-2"),
        2,
        (
            (("--drain", "ghost"), NO_SUCH, "ghost"),
            (("--gpu-model", "A10"), WRONG_USE, "--gpu-model"),
            (("--changes", "broken.yaml"), REFUSED, "is not YAML"),
            (("--changes", "binary"), REFUSED, "UTF-8"),
            (("-f", "binary"), REFUSED, "UTF-8"),
        ),
    ),
    "capacity": Use(
        ("--node", "A10:8"),
        2,
        ((("--node", "A10"), WRONG_USE, "--node"), (("--node", "ghost:8"), REFUSED, "ghost")),
    ),
    "shadow show": Use(first=(("shadow", "start", "--objective", "energy"),), untried=(("bare", "is the normal use"),)),
    "shadow start": Use(("--objective", "energy"), 2, ((("--weight", "speed=1"), WRONG_USE, "speed"),)),
    "shadow stop": Use(
        first=(("shadow", "start", "--objective", "energy"),),
        untried=(("bare", "is the normal use"), ("again", "a shadow stops once")),
    ),
    "decision export": Use((PLACED, "-f", "decision.json"), 2, ((("ghost", "-f", "d.json"), NO_SUCH, "ghost"),)),
    "decision replay": Use(
        ("decision.json",),
        2,
        ((("binary",), REFUSED, "UTF-8"), (("broken.yaml",), REFUSED, "is not JSON")),
        first=(("decision", "export", PLACED, "-f", "decision.json"),),
    ),
    "plan": Use(wrong=(NODE_UNKNOWN, COLUMN_UNKNOWN)),
    "policy get": Use(),
    "policy set": Use(
        ("--objective", "energy", "--dry-run"),
        2,
        (
            (("--policy", "ghost", *POLICY), REFUSED, "--policy"),
            (("--budget", "cluster=5", *POLICY), WRONG_USE, "--budget"),
            (("--budget", "node:ghost=5kW", *POLICY), NO_SUCH, "ghost"),
            (("--pool-mode", "ghost=enforce", *POLICY), NO_SUCH, "ghost"),
            (("--weight", "speed=1", *POLICY), WRONG_USE, "--weight"),
            (("--lease", "nan", *POLICY), WRONG_USE, "--lease"),
            (("--prices", "broken.yaml", *POLICY), REFUSED, "broken.yaml"),
        ),
    ),
    "partition apply": Use(("--yes",), wrong=((("ghost", "--yes"), NO_SUCH, "eelctl partition plan"),)),
    "partition plan": Use(wrong=((("--horizon", "0"), WRONG_USE, "--horizon"),)),
    "partition show": Use(),
    "moves": Use(wrong=((("--budget", "much"), WRONG_USE, "--budget"),)),
    # Without --yes it is refused where there is something to move.
    "moves apply": Use(("--yes",), (0, REFUSED), wrong=((("ghost", "--yes"), NO_SUCH, "eelctl moves"),)),
    "energy": Use(
        wrong=(
            (("--since", "long"), WRONG_USE, "--since"),
            (("--month", "2026-13"), WRONG_USE, "--month"),
            (("--by", "ghost"), REFUSED, "--by"),
        )
    ),
    "clusters": Use(untried=(("calls", "this controller is no front; tests/e2e/several_clusters_test.py"),)),
    "spending": Use(),
    "exporters": Use(),
    "exporters remove": Use(
        ("billing", "--yes"),
        2,
        ((("ghost",), NO_SUCH, "eelctl exporters"),),
        first=(("energy", "--since", "7d", "--csv", "rest.csv", "--confirm-export", "billing"),),
    ),
    "report": Use(
        ("--out", "report.html", "--month", "2026-10"),
        2,
        (
            (("--out", "nowhere/report.html"), WRONG_USE, "--out"),
            (("--out", "report.html", "--pdf", "nowhere/report.pdf"), WRONG_USE, "--pdf"),
        ),
        untried=(("pdf", "starts a browser for each value"),),
    ),
    "top": Use(("--once",), untried=(("bare", "runs until Ctrl-C on a terminal"),)),
    "audit": Use(wrong=(COLUMN_UNKNOWN, (("--since", "long"), WRONG_USE, "--since"))),
    "whoami": Use(),
    "doctor": Use(
        ("--only", "controller", "--metrics", "METRICS", "--agent", "AGENT"),
        code=1,  # a GPU is lost
        untried=(
            ("bare", "looks for the daemons' own ports of this machine"),
            ("metrics", "a check that fails is its answer; tested below"),
            ("agent", "a check that fails is its answer; tested below"),
            ("data", "a folder that is not there is not checked"),
            ("state", "a folder that is not there is not checked"),
        ),
    ),
    "replay": Use(
        ("--pods", "tasks.csv", "--prefix", "t/", "--queue", "default", "--limit", "1"),
        REFUSED,  # a whole trace is not submitted without a question
        wrong=((("--pods", "binary"), REFUSED, "binary"), (("--trace", "nowhere"), NO_SUCH, "nowhere")),
        untried=(
            ("list", "is a file of a trace that must be on this machine"),
            ("trace", "is searched for on this machine, and fetched"),
            ("policies", "simulates; tests/e2e/compare_test.py"),
            ("prefix", "submits what it is given"),
        ),
    ),
    "frontier": Use(
        ("--points", "points.csv", "--services", "services.yaml", "--objectives", "3"),
        2,
        (
            (("--points", "binary", "--services", "services.yaml"), REFUSED, "binary"),
            (("--points", "points.csv", "--services", "broken.yaml"), REFUSED, "broken.yaml"),
            (("--points", "points.csv", "--services", "services.yaml", "--rates", "2"), WRONG_USE, "--rates"),
        ),
        untried=(("plot", "draws for each value"),),
    ),
    "admin migrate": Use(
        ("sqlite:///nowhere", "sqlite:///new", "--yes"),
        2,
        ((("ftp://nowhere", "sqlite:///new", "--yes"), WRONG_USE, "FROM"),),
        code=NO_SUCH,  # there is nothing to move; tests/unit/store_migration_test.py moves journals
    ),
    "demo": Use(untried=(("calls", "becomes another program; tests/e2e/demo_test.py"),)),
    "describe": Use(("node", "gpu-1"), 2, ((("workload", "ghost"), NO_SUCH, "ghost"), (("gpu", "gpu-1/99"), NO_SUCH, "99"))),
    "version": Use(),
    "help": Use(("policy", "set"), wrong=((("ghost",), WRONG_USE, "ghost"),)),
    "completion": Use(("bash",), 2, ((("tcsh",), WRONG_USE, "tcsh"),)),
}  # fmt: skip
TREE = find_commands()
CALLED = [name for name in COMMANDS if "calls" not in dict(COMMANDS[name].untried)]
# Commands that need no controller.
ALONE = {"admin migrate", "decision replay", "frontier", "help", "completion", "doctor", "profile predict"}


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    with BusyCluster(tmp_path_factory.mktemp("inputs")) as cluster, pytest.MonkeyPatch.context() as patch:
        cluster.prepare()
        (cluster.folder / "tasks.csv").write_text(
            "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos\nr-1,1000,1024,0,0,,LS\n"
        )
        points = (cluster.folder / "points.csv").read_text().splitlines(keepends=True)
        cluster.done("reservation", "create", "demo", "--nodes", "gpu-2", "--start", "+30d", "--duration", "2h")
        (cluster.folder / "few.csv").write_text("".join([points[0], *[p for p in points if p.startswith("ocr,")][:6]]))
        patch.chdir(cluster.folder)
        yield cluster


@pytest.fixture(autouse=True)
def files(busy):
    """Files that are wrong; a command may have written over them."""
    (busy.folder / "queues.yaml").write_text("queues: [{name: default, quota: {gpu: 100}}]\n")
    (busy.folder / "pairs.csv").write_text("load,beside,slowdown\nwhisper,*,20%\n")
    (busy.folder / "broken.yaml").write_text("a: [b: {\n")
    (busy.folder / "binary").write_bytes(bytes(range(256)))


def words(cluster, name, arguments):
    """A command and its arguments, with the addresses of this cluster."""
    known = {"METRICS": cluster.metrics, "AGENT": cluster.node_address}
    return (*name.split(), *(known.get(one, one) for one in arguments))


def check(result, code=None):
    """An answer as docs/reference/eelctl.md has it, with this code or one of these, safe to print; of an error its whole text."""
    assert not UNSAFE.search(result.output), repr(result.output[:500])
    assert "Traceback" not in result.output
    if code is not None:
        assert result.exit_code in (code if isinstance(code, tuple) else (code,)), result.output
    if result.exit_code == WRONG_USE:
        assert re.search(
            r"^Try '.* --help' for help|  next: |see eelctl .*--help|^Error: ", result.stderr, re.MULTILINE
        )
    elif result.exit_code:
        # Of doctor, the remedies are its answer.
        assert re.search(" next: |remedy", result.stderr or result.stdout), result.output
    return result.stderr


def test_every_command_has_its_inputs():
    assert set(TREE) == set(COMMANDS)
    for name, use in COMMANDS.items():
        keys = {"bare", "calls", "again", "unreachable", *(key_of(one) for one in TREE[name].params)}
        assert {key for key, _ in use.untried} <= keys, name


def key_of(parameter):
    """The name by which a user knows a parameter."""
    return max(parameter.opts, key=len).lstrip("-")


def names_of(parameter):
    """What an error may call a parameter: its option or its metavar."""
    names = {key_of(parameter), parameter.name or "", str(parameter.metavar or "")}
    if isinstance(parameter.type, click.Choice):
        names.add("|".join(parameter.type.choices))
    return {form for one in names if one for form in (one, one.upper(), one.replace("-", "_"))}


def prepare(busy, use):
    for before in use.first:
        busy.done(*before)
    for before in use.attempted:
        busy.type(*before)


@pytest.mark.parametrize("name", CALLED)
def test_normal_input(busy, name):
    use = COMMANDS[name]
    prepare(busy, use)
    asked = words(busy, name, use.normal)
    result = busy.type(*asked)
    check(result, use.code)
    untried = dict(use.untried)
    if "output" in {one.name for one in TREE[name].params}:
        for form, read in (("json", json.loads), ("yaml", yaml.safe_load)):
            if "again" in untried:
                prepare(busy, use)
            if form in next(one for one in TREE[name].params if one.name == "output").type.choices:
                answer = busy.type(*asked, "-o", form)
                check(answer, use.code)
                # What is refused is told by an error, of which test_wrong_input says the form.
                assert answer.exit_code > 1 or read(answer.stdout) is not None


@pytest.mark.parametrize("name", CALLED)
def test_no_input(busy, name):
    use = COMMANDS[name]
    if "bare" in dict(use.untried):
        pytest.skip(dict(use.untried)["bare"])
    result = busy.type(*name.split())
    check(result, use.bare)


@pytest.mark.parametrize(("name", "number"), [(name, n) for name in CALLED for n in range(len(COMMANDS[name].wrong))])
def test_wrong_input(busy, name, number):
    arguments, code, named = COMMANDS[name].wrong[number]
    result = busy.type(*words(busy, name, arguments))
    assert result.exit_code != 0
    assert named in check(result, code)
    as_json = busy.type("-o", "json", *words(busy, name, arguments))
    assert (as_json.exit_code, as_json.stdout) == (result.exit_code, "")
    told = json.loads(as_json.stderr)
    assert told["reason"] == REASONS[result.exit_code]
    assert told["message"]
    assert told["remedy"]


def values_for(parameter, folder):
    """Values of a parameter's type that nobody means."""
    kind = parameter.type
    if isinstance(kind, (click.Path, click.File)):
        return "/nowhere/file", str(folder), str(folder / "binary"), str(folder / "broken.yaml"), ""
    if isinstance(kind, (click.types.IntParamType, click.types.FloatParamType)):
        return NUMBERS
    return CHOICES if isinstance(kind, click.Choice) else TEXTS


def with_value(command, normal, parameter, value):
    """Normal arguments with one value replaced, or added."""
    if isinstance(parameter, click.Option):
        return *normal, f"{max(parameter.opts, key=len)}={value}"
    place = [one for one in command.params if isinstance(one, click.Argument)].index(parameter)
    given = [one for one in normal if not one.startswith("-")]
    options = normal[len(given) :] if given == list(normal[: len(given)]) else ()
    return *options, "--", *given[:place], value, *given[place + 1 :]


@pytest.mark.parametrize("name", CALLED)
def test_hostile_input(busy, name):
    """Each parameter with each value of its type: an answer or an error that names the field or the value, safe to print."""
    use, command = COMMANDS[name], TREE[name]
    untried = dict(use.untried)
    prepare(busy, use)
    for parameter in command.params:
        if (
            getattr(parameter, "is_flag", False)
            or parameter.name in {"output", "headers"}
            or key_of(parameter) in untried
        ):
            continue
        for value in values_for(parameter, busy.folder):
            arguments = with_value(command, use.normal, parameter, value)
            result = busy.type(*words(busy, name, arguments))
            told = check(result)
            where = f"{name} {key_of(parameter)}={value[:40]!r}: {result.exit_code}\n{told[:600]}"
            assert result.exit_code in {0, 1, WRONG_USE, NO_SUCH, REFUSED, *({125} if name == "run" else ())}, where
            if result.exit_code:
                shown = value.encode("unicode_escape").decode() if value == HOSTILE_TEXT else value
                assert (shown[:20] or "''") in told or any(one in told for one in names_of(parameter)), where


@pytest.mark.parametrize("value", ["", "5 bananas", HOSTILE_TEXT, LONG_TEXT, "ghost", "http://127.0.0.1:1/"])
@pytest.mark.parametrize("option", ["--metrics", "--agent"])
def test_doctor_reports_an_address_that_is_none(busy, option, value):
    result = busy.type("doctor", "--only", "controller", option, value)
    assert result.exit_code in {0, 1}
    assert not UNSAFE.search(result.output)


@pytest.mark.parametrize(
    "name", [name for name in CALLED if name not in ALONE and "unreachable" not in dict(COMMANDS[name].untried)]
)
def test_no_controller(busy, name):
    address = free_address()
    arguments = words(busy, name, COMMANDS[name].normal)
    result = eelctl_here(*arguments, address=address)
    told = check(result, UNREACHABLE)
    if name != "version":
        assert "EELGRID_CONTROLLER" in told or "--controller" in told
