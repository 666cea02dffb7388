"""`eelgrid-agent mig`: shows and changes the MIG layouts of this node by hand.

    mig show    the layouts that exist, who uses them, and what is requested
    mig plan    the steps to a layout, and why each is taken
    mig apply   carries out the steps; with --slurm while the node is out of service in Slurm, which then has the new GRES
    mig resume  ends what a crash or a boot has left of a change, and brings the node into service in Slurm
    mig assert  whether a layout exists
    mig export  the existing layouts as a mig-parted configuration file

Defines the flags, the confirmation before a change and the exit codes: 0 done, 1 failed or refused by a rule, 2 wrong
use, 3 an assertion that does not hold. Errors are one line on stderr and say what to do next. Layouts themselves are
decided in `eelgrid_agent.enforce.mig`.
"""

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from eelgrid_agent.cli import close_output, terminal_width, write_output
from eelgrid_agent.devices.port import DeviceError, MigControlPort, ModeChange
from eelgrid_agent.enforce.mig.host import MigHost, MigHostError, open_mig_host
from eelgrid_agent.enforce.mig.inspection import LayoutPlan, MigInspection, inspect_host
from eelgrid_agent.enforce.mig.journal import MIG_JOURNAL
from eelgrid_agent.enforce.mig.layout_requests import (
    LayoutRequest,
    LayoutRequestError,
    export_parted_file,
    find_unmet_entries,
    find_unmet_requests,
    requests_from_entries,
    requests_from_texts,
)
from eelgrid_agent.enforce.mig.mig_service import LayoutReconciler
from eelgrid_agent.enforce.mig.parted_file import (
    MAX_FILE_BYTES,
    PartedEntry,
    PartedFileError,
    PartedFileUnreadable,
    format_parted_file,
    parse_parted_file,
    to_parted_document,
)
from eelgrid_agent.enforce.mig.partitioner import TransitionRefused
from eelgrid_agent.enforce.rules import RefusalRule
from eelgrid_agent.engine.local import PROCESSES, adopt_attempts
from eelgrid_agent.engine.slurm_node import SlurmNodeService
from eelgrid_agent.engine.slurm_node_host import SlurmNodeFileError, build_slurm_node, load_slurm_node
from eelgrid_agent.state_files import StateDirectoryError, StateFile, StateFileError, lock_state_directory
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.messages import ApplyResult, ApplyStatus

_Answer = TypeVar("_Answer")


class NarratedControl:
    """Wraps the control of MIG layouts and narrates it.

    `tell` receives a line, `changed` is called after every change, successful or not.
    """

    def __init__(self, control: MigControlPort, *, tell: Callable[[str], None], changed: Callable[[], None]) -> None:
        self._control = control
        self._tell = tell
        self._changed = changed
        self._said = ""
        self._geometries: dict[str, MigGeometry] = {}

    def mig_geometry(self, uuid: str) -> MigGeometry:
        """As the port."""
        self._geometries[uuid] = self._control.mig_geometry(uuid)
        return self._geometries[uuid]

    def set_mig_mode(self, uuid: str, *, enabled: bool) -> ModeChange:
        """As the port."""
        mode = "on" if enabled else "off"
        return self._narrate_change(
            uuid, f"turn MIG mode {mode}", lambda: self._control.set_mig_mode(uuid, enabled=enabled)
        )

    def create_gpu_instance(self, uuid: str, profile_id: int, start: int) -> int:
        """As the port."""
        geometry = self._geometries.get(uuid)
        profile = geometry.profile_by_id(profile_id) if geometry else None
        name = profile.name if profile else f"profile {profile_id}"
        return self._narrate_change(
            uuid, f"create {name} at {start}", lambda: self._control.create_gpu_instance(uuid, profile_id, start)
        )

    def destroy_gpu_instance(self, uuid: str, instance_id: int) -> None:
        """As the port."""
        text = f"destroy GPU instance {instance_id}"
        self._narrate_change(uuid, text, lambda: self._control.destroy_gpu_instance(uuid, instance_id))

    def create_compute_instance(self, uuid: str, instance_id: int, profile_id: int) -> int:
        """As the port."""
        text = f"create compute instance in GPU instance {instance_id}"
        return self._narrate_change(
            uuid, text, lambda: self._control.create_compute_instance(uuid, instance_id, profile_id)
        )

    def destroy_compute_instance(self, uuid: str, instance_id: int, compute_id: int) -> None:
        """As the port."""
        text = f"destroy compute instance {compute_id} of GPU instance {instance_id}"
        self._narrate_change(uuid, text, lambda: self._control.destroy_compute_instance(uuid, instance_id, compute_id))

    def _narrate_change(self, uuid: str, text: str, change: Callable[[], _Answer]) -> _Answer:
        try:
            answer = change()
        except DeviceError as error:
            # Whoever listens knows which device this is about.
            self._print_once(f"{text}: {str(error).removeprefix(f'{uuid}: ')}")
            raise
        finally:
            self._changed()
        self._said = ""
        if answer is ModeChange.PENDING:
            self._print_once(f"{text}: accepted, pending a reset")
        else:
            self._print_once(f"{text}: done{'' if answer is None or answer is ModeChange.DONE else f', id {answer}'}")
        return answer

    def _print_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._tell(text)


_GIVEN_UP = "given up: another program keeps changing this GPU; find it, then apply a layout again"
_UNDER_WAY = MappingProxyType(
    {
        "forward": "a change was interrupted; the agent or the next `mig apply` continues it",
        "pending": "the MIG mode waits for a reset of the GPU or a reboot; the layout follows then",
        "undo": "a change is being undone; the agent or the next `mig apply` continues it",
        "stuck": "a change was neither reached nor undone; the agent tries again, `mig apply` at once",
    }
)


def format_document(document: Any, output: str) -> str:
    """A document as JSON or YAML."""
    if output == "json":
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    import yaml

    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120))


def format_inspection(document: Mapping[str, Any], width: int | None = None) -> Iterator[str]:
    """Formats the existing layouts of the node and, under each device, the requested one."""
    kind = " (simulated)" if document["simulated"] else ""
    yield f"node {document['node']}{kind}   driver {document['driver']}   permission {document['permission']}"
    for note in document["notes"]:
        yield from _sentence("note: ", note, width, indent="")
    if not document["gpus"]:
        yield "no GPU"
    for gpu in document["gpus"]:
        yield ""
        yield from _gpu_lines(gpu, width)
        if "wanted" in gpu:
            yield from _wanted_lines(gpu, width)


def format_plan(document: Mapping[str, Any], width: int | None = None) -> Iterator[str]:
    """The steps alone, by device."""
    for gpu in document["gpus"]:
        if "wanted" in gpu:
            yield f"GPU {gpu['index']}  {gpu['product']}  {gpu['uuid']}"
            yield from _wanted_lines(gpu, width)


def _gpu_lines(gpu: Mapping[str, Any], width: int | None) -> Iterator[str]:
    yield f"GPU {gpu['index']}  {gpu['product']}  {gpu['uuid']}  {_mode(gpu['mig'])}"
    if gpu["problem"]:
        yield from _sentence("problem: ", gpu["problem"], width)
    if gpu.get("processes"):
        yield from _sentence("processes on the whole GPU: ", ", ".join(map(str, gpu["processes"])), width)
    if gpu.get("instances"):
        rows = [row for instance in gpu["instances"] for row in _instance_rows(instance)]
        yield from _table(("ID", "PROFILE", "SLICES", "FROM", "COMPUTE", "GEN", "USED BY", "UUID"), rows, width)
    free = gpu.get("free")
    if free:
        room = "; ".join(f"{name} at {' '.join(map(str, starts))}" for name, starts in _plain(free["room"]).items())
        slices = ", ".join(_runs(free["memory_slices"])) or "none"
        has = f"slices {slices}, {free['compute_slices']} compute; {f'room for {room}' if room else 'no room'}"
        yield from _sentence("free: ", has, width)
    kept = gpu.get("kept")
    if kept and kept["given_up"]:
        yield from _sentence("", _GIVEN_UP, width)
    if kept and kept["under_way"]:
        yield from _sentence("under way: ", _UNDER_WAY[kept["under_way"]], width)


def _mode(mig: Mapping[str, bool]) -> str:
    if not mig["capable"]:
        return "no MIG"
    now = "on" if mig["enabled"] else "off"
    other = "off" if mig["enabled"] else "on"
    return f"MIG {now}, {other} after a reset" if mig["pending"] else f"MIG {now}"


def _instance_rows(instance: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    last = instance["start"] + instance["size"] - 1
    head: tuple[str, ...] = (
        str(instance["id"]),
        instance["profile"],
        f"{instance['start']}-{last}" if instance["size"] > 1 else str(last),
        instance["origin"],
    )
    held = ["a lease"] if instance["leased"] else []
    for child in instance["compute_instances"]:
        slices = "?" if child["slices"] is None else f"{child['slices']}c"
        used = ", ".join([*(f"pid {pid}" for pid in child["processes"]), *held])
        used = used or ("in use" if instance["in_use"] else "-")
        yield (*head, f"{child['id']} ({slices})", str(child["generation"]), used, child["uuid"] or "-")
        head = ("", "", "", "")
    if not instance["compute_instances"]:
        yield (*head, "none", "-", "in use" if instance["in_use"] else "-", "-")


def _plain(room: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[int]]:
    """Without the variants of media and graphics, which -o json has."""
    return {name: starts for name, starts in room.items() if "+" not in name and "-" not in name}


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    """0, 1, 2, 5 is 0-2 and 5."""
    begin = 0
    for place, number in enumerate(numbers):
        if place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            first = numbers[begin]
            yield str(first) if first == number else f"{first}-{number}"
            begin = place + 1


def _wanted_lines(gpu: Mapping[str, Any], width: int | None) -> Iterator[str]:
    goal = gpu["wanted"]
    yield from _sentence("wanted: ", f"{goal['layout']}   ({goal['because']})", width)
    if goal["refused"]:
        yield from _sentence(f"refused by rule {goal['refused']['rule']}: ", goal["refused"]["detail"], width)
    elif not goal["steps"]:
        yield "  exists already"
    longest = max((len(step["step"]) for step in goal["steps"]), default=0)
    reasons = max((len(step["why"]) for step in goal["steps"]), default=0)
    beside = width is None or len("  12. ") + longest + 3 + reasons <= width
    for number, step in enumerate(goal["steps"], 1):
        if beside:
            yield f"  {number:2}. {step['step']:<{longest}}   {step['why']}"
        else:
            yield f"  {number:2}. {step['step']}"
            yield f"        {step['why']}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> Iterator[str]:
    """Columns side by side; where they do not fit, the last one goes below its row."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    below = width is not None and sum(widths) + 2 * len(widths) > width
    beside = len(head) - below
    for row in (head, *rows):
        cells = zip(row[:beside], widths[:beside], strict=True)
        yield "  " + "  ".join(cell.ljust(size) for cell, size in cells).rstrip()
        if below:
            yield f"      {row[-1]}"


def _sentence(label: str, text: str, width: int | None, indent: str = "  ") -> Iterator[str]:
    """A line, or as many as it takes; nothing is cut and no word is broken."""
    if width is None:
        yield f"{indent}{label}{text}"
        return
    yield from textwrap.wrap(
        label + text,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


DONE, FAILED, WRONG_USE, NOT_SO = 0, 1, 2, 3
_INTERRUPTED = 130
_YES = frozenset({"y", "yes"})


class MigCommandError(Exception):
    """The command failed; the message says what to do."""


class MigUsageError(MigCommandError):
    """The flags are wrong, or do not go together."""


class MigCommandFailed(MigCommandError):
    """A rule refuses it, or it did not work."""


def run_mig_command(arguments: Sequence[str]) -> int:
    """Runs one subcommand; returns the exit code. Exits by itself for --help and unknown flags, as argparse does."""
    from eelgrid_agent.simulation.node_files import NodeStateFileError
    from eelgrid_agent.simulation.spec import FleetFileError, SpecError

    flags = _parser().parse_args(arguments)
    act: Callable[[argparse.Namespace, MigHost], int] = flags.act
    try:
        with open_mig_host(simulate=flags.simulate, node=flags.node, seed=flags.seed, state=flags.state) as site:
            processes = site.directory / PROCESSES
            return act(flags, replace(site, adopt_leases=lambda leases: adopt_attempts(leases, processes)))
    except (
        MigUsageError,
        PartedFileError,
        LayoutRequestError,
        MigHostError,
        FleetFileError,
        SpecError,
        NodeStateFileError,
        SlurmNodeFileError,
    ) as error:
        return _fail(error, WRONG_USE)
    except (MigCommandFailed, DeviceError, StateFileError, StateDirectoryError, TransitionRefused) as error:
        return _fail(error, FAILED)
    except BrokenPipeError:
        # Whoever read our output has gone; nothing more can be told.
        close_output()
        return FAILED
    except OSError as error:
        close_output()
        return _fail(f"{error.filename or 'the output'}: {error.strerror}; make room, or write it elsewhere", FAILED)
    except KeyboardInterrupt:
        return _fail(
            "interrupted; `mig show` shows the existing layouts, `mig apply` continues from there", _INTERRUPTED
        )


def _fail(error: Exception | str, code: int) -> int:
    sys.stderr.write(f"eelgrid-agent mig: {error}\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eelgrid-agent mig",
        allow_abbrev=False,
        description="MIG layouts of this node. Exit codes: 0 done, 1 failed or refused, 2 wrong use, 3 not as asserted.",
    )
    site = argparse.ArgumentParser(add_help=False)
    add = site.add_argument_group("which node").add_argument
    add("--simulate", type=Path, metavar="FILE", help="a node of this fleet file in place of this machine")
    add("--node", default="", metavar="NAME", help="which node of the fleet file, where it has several")
    add("--seed", type=int, default=1, help="seed of the simulation (default %(default)s)")
    add("--state", type=Path, metavar="DIR", help="the agent's state directory (default /var/lib/eelgrid as root)")
    wanted = argparse.ArgumentParser(add_help=False)
    add = wanted.add_argument_group("what is wanted").add_argument
    add("file", nargs="?", metavar="FILE", help="a mig-parted configuration file, or - for standard input")
    add("-c", "--config", metavar="NAME", help="which configuration of the file, where it has several")
    add(
        "-l",
        "--layout",
        action="append",
        default=[],
        metavar="GPU=LAYOUT",
        help="GPU is an index, a UUID or all; LAYOUT is off, empty or [Nx]PROFILE[@START],...; may be repeated",
    )
    slurm = argparse.ArgumentParser(add_help=False)
    slurm.add_argument("--slurm", type=Path, metavar="FILE", help="this node in Slurm (a file like slurm-node.toml)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, act: Callable[[argparse.Namespace, MigHost], int], text: str, *parents: Any) -> Any:
        made = commands.add_parser(name, parents=[site, *parents], allow_abbrev=False, help=text, description=text)
        made.set_defaults(act=act)
        choices = ("json", "yaml") if name == "export" else ("table", "json", "yaml")
        default = "yaml" if name == "export" else "table"
        made.add_argument("-o", "--output", choices=choices, default=default, help="how to print (default %(default)s)")
        return made

    command("show", _show_layouts, "the layout of each GPU, who uses it, and the requested layout", wanted)
    command("plan", _plan, "the steps to a layout and why, without taking any", wanted)
    apply_ = command("apply", _apply, "bring the GPUs to a layout, which the agent keeps from then on", wanted, slurm)
    apply_.add_argument("-y", "--yes", action="store_true", help="do not ask before changing anything")
    apply_.add_argument("--adopt", action="store_true", help="take over instances that something else made")
    apply_.add_argument(
        "--drain-wait",
        type=float,
        metavar="SECONDS",
        help="with --slurm: how long jobs may run on once the node is drained (default: that of the file)",
    )
    command("resume", _resume, "end what is left of an interrupted change, and bring the node into service", slurm)
    assert_ = command("assert", _assert, "exit with 0 if a layout exists and with 3 if it does not", wanted)
    assert_.add_argument("--mode-only", action="store_true", help="compare the MIG mode and not the instances")
    export_ = command("export", _export, "the existing layouts as a mig-parted configuration file")
    export_.add_argument(
        "--label", default="current", metavar="NAME", help="the configuration's name (default current)"
    )
    return parser


# What is wanted


def _entries(flags: argparse.Namespace) -> tuple[PartedEntry, ...]:
    """The configuration that was chosen; raises PartedFileError."""
    name, source = flags.file, "standard input" if flags.file == "-" else flags.file
    try:
        if name == "-":
            content = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode("utf-8")
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise PartedFileUnreadable(source, None, "", problem, "give a mig-parted configuration file") from None
    except UnicodeDecodeError:
        raise PartedFileUnreadable(
            source, None, "", "is no UTF-8 text", "give a mig-parted configuration file"
        ) from None
    return parse_parted_file(text, source).get_config(flags.config)[1]


def _asks(flags: argparse.Namespace, *, needed: bool) -> bool:
    """Whether the flags want anything; raises MigUsageError."""
    if flags.file is not None and flags.layout:
        raise MigUsageError("FILE and --layout: both request a layout; give one of them")
    if flags.config is not None and flags.file is None:
        raise MigUsageError("--config: names a configuration of a file; give the file, too")
    if needed and flags.file is None and not flags.layout:
        raise MigUsageError("no layout is requested; give a mig-parted file, or --layout GPU=LAYOUT")
    return flags.file is not None or bool(flags.layout)


def _wishes(flags: argparse.Namespace, inspection: MigInspection) -> tuple[LayoutRequest, ...]:
    if flags.file is not None:
        return requests_from_entries(_entries(flags), inspection.subjects)
    return requests_from_texts(flags.layout, inspection.subjects)


def _print(
    flags: argparse.Namespace, found: dict[str, Any], lines: Callable[[dict[str, Any], int | None], Iterable[str]]
) -> None:
    if flags.output == "table":
        text = "".join(f"{line}\n" for line in lines(found, terminal_width()))
    else:
        text = format_document(found, flags.output)
    write_output(text)


# The commands


def _show_layouts(flags: argparse.Namespace, site: MigHost) -> int:
    asks = _asks(flags, needed=False)
    inspection = inspect_host(site)
    wishes = _wishes(flags, inspection) if asks else inspection.journaled_requests()
    plans = [inspection.plan_request(wish) for wish in wishes]
    _print(flags, inspection.to_document(plans), format_inspection)
    return DONE


def _plan(flags: argparse.Namespace, site: MigHost) -> int:
    _asks(flags, needed=True)
    inspection = inspect_host(site)
    plans = [inspection.plan_request(wish) for wish in _wishes(flags, inspection)]
    if not plans:
        _print_line("eelgrid-agent mig: no GPU of this node is selected; there is nothing to do")
    _print_notes(inspection)
    _print(flags, inspection.to_document(plans), format_plan)
    barred = next(filter(None, map(inspection.find_access_barrier, plans)), "")
    if barred:
        _print_line(f"eelgrid-agent mig: `mig apply` would be refused: {barred}")
    return FAILED if any(plan.is_refused for plan in plans) else DONE


def _apply(flags: argparse.Namespace, site: MigHost) -> int:
    _asks(flags, needed=True)
    with ExitStack() as stack:
        stack.enter_context(lock_state_directory(site.directory, "eelgrid-agent mig apply"))
        inspection = inspect_host(site)
        wishes = _wishes(flags, inspection)
        if flags.adopt:
            inspection = inspection.with_adopted(wish.layout.gpu_uuid for wish in wishes)
            wishes = _wishes(flags, inspection)
        plans = [inspection.plan_request(wish) for wish in wishes]
        _print_notes(inspection)
        if flags.output == "table":
            _print(flags, inspection.to_document(plans), format_plan)
        _refuse(flags, inspection, plans)
        _confirm(flags, plans)
        return _carry_out(flags, site, plans)


def _print_notes(inspection: MigInspection) -> None:
    for note in inspection.notes:
        _print_line(f"eelgrid-agent mig: note: {note}")


def _refuse(flags: argparse.Namespace, inspection: MigInspection, plans: Sequence[LayoutPlan]) -> None:
    """Raises MigCommandFailed before anything is changed where one of the plans cannot be had."""
    for plan in plans:
        barred = inspection.find_access_barrier(plan)
        rule, detail = (plan.rule, plan.detail) if plan.is_refused else (RefusalRule.NO_PERMISSION.value, barred)
        if plan.is_refused or barred:
            gpu = plan.wish.subject.gpu
            if flags.output != "table":
                row = {"gpu": gpu.uuid, "status": "refused", "rule": rule, "detail": detail}
                write_output(format_document({"results": [row]}, flags.output))
            raise MigCommandFailed(f"GPU {gpu.index}: refused by rule {rule}: {detail}; nothing was changed")


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _confirm(flags: argparse.Namespace, plans: Sequence[LayoutPlan]) -> None:
    """Asks before anything is changed; raises MigUsageError where the answer is not yes."""
    steps = sum(len(plan.steps) for plan in plans)
    if flags.yes or not steps:
        return
    if flags.file == "-" or not sys.stdin.isatty():
        raise MigUsageError("--yes: is missing, and there is no terminal to confirm on; add it to change the GPUs")
    gpus = sum(bool(plan.steps) for plan in plans)
    sys.stderr.write(f"Take {_count(steps, 'step')} on {_count(gpus, 'GPU')}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in _YES:
        raise MigUsageError("not confirmed; nothing was changed")


def _open_slurm_node(flags: argparse.Namespace, site: MigHost) -> SlurmNodeService | None:
    """The node in Slurm; None without --slurm. Raises SlurmNodeFileError."""
    if flags.slurm is None:
        return None
    wait_s = getattr(flags, "drain_wait", None)
    return build_slurm_node(
        load_slurm_node(flags.slurm),
        site.directory,
        list_gpus=site.device.gpus,
        open_nodes=site.open_nodes,
        drain_wait_s=None if wait_s is None else max(0.0, wait_s),
    )


def _open_executor(site: MigHost, current: list[str], service: SlurmNodeService | None) -> LayoutReconciler:
    """What changes layouts, and says so with the name of the device that is current."""
    control = NarratedControl(site.control, tell=lambda text: _print_line(f"{current[0]}: {text}"), changed=site.keep)
    return LayoutReconciler(
        site.device,
        control,
        StateFile(site.journal_path, MIG_JOURNAL),
        boot_id=lambda: site.boot_id,
        sleep=time.sleep,
        monotonic_s=time.monotonic,
        wall_ns=time.time_ns,
        obstacle=site.find_mode_obstacle,
        leases=site.read_leases(),
        service=service,
    )


def _carry_out(flags: argparse.Namespace, site: MigHost, plans: Sequence[LayoutPlan]) -> int:
    """Every layout in turn, up to the first that cannot be had; all of them in one outage of the node."""
    current, results = [""], list[ApplyResult]()
    node = _open_slurm_node(flags, site)
    executor = _open_executor(site, current, node)
    with ExitStack() as stack:
        is_cut_off = node is not None and not node.is_in_service
        if node is not None and (is_cut_off or any(plan.steps for plan in plans)):
            stack.enter_context(node.outage())
        if is_cut_off:
            # Other GPUs may be left in the middle of a change, too.
            executor.recover()
        for plan in plans:
            gpu = plan.wish.subject.gpu
            current[0] = f"GPU {gpu.index}"
            if flags.adopt:
                executor.adopt_instances(gpu.uuid)
            result = executor.apply_layout(plan.wish.layout)
            results.append(result)
            if result.status is not ApplyStatus.APPLIED:
                break
            _print_line(f"GPU {gpu.index}: {result.detail}")
            _open_nodes(site, gpu.uuid)
    site.keep()
    _tell_outage(node)
    if flags.output != "table":
        rows = [
            {"gpu": r.subject, "status": r.status.name.lower(), "rule": r.rule, "detail": r.detail} for r in results
        ]
        write_output(format_document({"results": rows}, flags.output))
    if results and results[-1].status is not ApplyStatus.APPLIED:
        last, left = results[-1], len(plans) - len(results)
        rest = f"; {_count(left, 'GPU')} after it {'was' if left == 1 else 'were'} not touched" if left else ""
        detail = last.detail.removeprefix(f"{last.subject}: ")
        raise MigCommandFailed(f"{current[0]}: {last.status.name.lower()} by rule {last.rule}: {detail}{rest}")
    return DONE


def _resume(flags: argparse.Namespace, site: MigHost) -> int:
    """What a crash left is finished or undone, and the node in service."""
    with lock_state_directory(site.directory, "eelgrid-agent mig resume"):
        node = _open_slurm_node(flags, site)
        executor = _open_executor(site, ["GPU"], node)
        with ExitStack() as stack:
            if node is not None:
                stack.enter_context(node.recovery())
            results = executor.recover()
        site.keep()
        _tell_outage(node)
    rows = [{"gpu": r.subject, "status": r.status.name.lower(), "rule": r.rule, "detail": r.detail} for r in results]
    if flags.output != "table":
        write_output(format_document({"results": rows}, flags.output))
    else:
        lines = [f"GPU {one.subject}: {one.status.name.lower()}: {one.detail}\n" for one in results]
        write_output("".join(lines) or "nothing was left to do\n")
    return FAILED if any(one.status is ApplyStatus.FAILED for one in results) else DONE


def _tell_outage(node: SlurmNodeService | None) -> None:
    if node is not None and node.outage_s:
        _print_line(f"the node was out of service in Slurm for {node.outage_s:.2f} s")


def _open_nodes(site: MigHost, uuid: str) -> None:
    """Containers need a device node for each instance; that there is none is told, and undoes nothing."""
    gpu = next((gpu for gpu in site.device.gpus() if gpu.uuid == uuid), None)
    problem = site.open_nodes(gpu) if gpu is not None else ""
    if problem:
        _print_line(f"GPU {gpu.index if gpu else uuid}: {problem}")


def _print_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _assert(flags: argparse.Namespace, site: MigHost) -> int:
    _asks(flags, needed=True)
    inspection = inspect_host(site)
    if flags.file is not None:
        reasons = find_unmet_entries(_entries(flags), inspection.subjects, mode_only=flags.mode_only)
    else:
        reasons = find_unmet_requests(requests_from_texts(flags.layout, inspection.subjects), mode_only=flags.mode_only)
    if flags.output != "table":
        write_output(format_document({"stands": not reasons, "reasons": list(reasons)}, flags.output))
    elif not reasons:
        write_output("the layout exists\n")
    for reason in reasons:
        _print_line(f"eelgrid-agent mig: {reason}")
    return NOT_SO if reasons else DONE


def _export(flags: argparse.Namespace, site: MigHost) -> int:
    inspection = inspect_host(site)
    if inspection.problems:
        uuid, problem = next(iter(inspection.problems.items()))
        raise MigCommandFailed(f"GPU {uuid}: its layout cannot be read, so that an export would be wrong: {problem}")
    if not inspection.subjects:
        raise MigCommandFailed("this node has no GPU; there is nothing to export")
    bare = [
        gpu.index
        for s in inspection.subjects
        for gpu in [s.gpu]
        if any(not i.compute_instances for i in gpu.gpu_instances)
    ]
    for index in bare:
        _print_line(
            f"eelgrid-agent mig: GPU {index} has GPU instances without compute instances; the format has no word for them"
        )
    file = export_parted_file(inspection.subjects, flags.label)
    write_output(
        format_parted_file(file) if flags.output == "yaml" else format_document(to_parted_document(file), "json")
    )
    return DONE
