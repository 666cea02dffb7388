"""`eelgrid-agent mig`: MIG layouts of this node, seen and changed by hand.

    mig show    what stands, who uses it, and what is wanted of it
    mig plan    the steps to a layout, and why each is taken
    mig apply   the steps carried out
    mig assert  whether a layout stands
    mig export  what stands, as a mig-parted configuration file

Owns the flags, the question before a change and the exit codes: 0 done, 1 it
failed or a rule refuses it, 2 wrong use, 3 an assertion that does not hold.
Errors are one line on stderr and say what to do next. Decides nothing about
layouts.

CommandError                 the command cannot do what it was told
├── UsageError               the flags are wrong, or do not go together
└── Failed                   a rule refuses it, or it did not work
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from eelgrid_agent.device import DeviceError
from eelgrid_agent.mig import tables
from eelgrid_agent.mig.executor import MigExecutor
from eelgrid_agent.mig.inspection import Inspection, Plan, inspect
from eelgrid_agent.mig.journal import FileJournal, JournalError
from eelgrid_agent.mig.narrated import Narrated
from eelgrid_agent.mig.parted_file import BYTES_MOST, Entry, PartedFileError, Unreadable, document, read, write
from eelgrid_agent.mig.partitioner import TransitionRefused
from eelgrid_agent.mig.site import Site, SiteError, opened
from eelgrid_agent.mig.wishes import Wish, WishError, by_entries, by_texts, export, unmet_entries, unmet_wishes
from eelgrid_agent.refusal import Rule
from eelgrid_agent.state_directory import StateError, hold
from eelgrid_agent.terminal import close_output, width
from eelgrid_agent.terminal import write as write_out
from eelgrid_protos.messages import ApplyResult, ApplyStatus

__all__ = ["CommandError", "Failed", "UsageError", "run"]

DONE, FAILED, WRONG_USE, NOT_SO = 0, 1, 2, 3
_INTERRUPTED = 130
_YES = frozenset({"y", "yes"})


class CommandError(Exception):
    """The command cannot do what it was told; the message says what to do."""


class UsageError(CommandError):
    """The flags are wrong, or do not go together."""


class Failed(CommandError):
    """A rule refuses it, or it did not work."""


def run(arguments: Sequence[str]) -> int:
    """Runs one subcommand; returns the exit code. Exits by itself for --help and unknown flags, as argparse does."""
    from eelgrid_agent.simulation import FleetFileError, SpecError
    from eelgrid_agent.simulation.state_file import StateFileError

    flags = _parser().parse_args(arguments)
    act: Callable[[argparse.Namespace, Site], int] = flags.act
    try:
        with opened(simulate=flags.simulate, node=flags.node, seed=flags.seed, state=flags.state) as site:
            return act(flags, site)
    except (UsageError, PartedFileError, WishError, SiteError, FleetFileError, SpecError, StateFileError) as error:
        return _fail(error, WRONG_USE)
    except (Failed, DeviceError, JournalError, StateError, TransitionRefused) as error:
        return _fail(error, FAILED)
    except BrokenPipeError:
        # Whoever read our output has gone; nothing more can be told.
        close_output()
        return FAILED
    except OSError as error:
        close_output()
        return _fail(f"{error.filename or 'the output'}: {error.strerror}; make room, or write it elsewhere", FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted; `mig show` tells what stands, `mig apply` goes on from there", _INTERRUPTED)


def _fail(error: Exception | str, code: int) -> int:
    sys.stderr.write(f"eelgrid-agent mig: {error}\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eelgrid-agent mig", allow_abbrev=False,
        description="MIG layouts of this node. Exit codes: 0 done, 1 failed or refused, 2 wrong use, 3 not as asserted.",
    )  # fmt: skip
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
        "-l", "--layout", action="append", default=[], metavar="GPU=LAYOUT",
        help="GPU is an index, a UUID or all; LAYOUT is off, empty or [Nx]PROFILE[@START],...; may be repeated",
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, act: Callable[[argparse.Namespace, Site], int], text: str, *parents: Any) -> Any:
        made = commands.add_parser(name, parents=[site, *parents], allow_abbrev=False, help=text, description=text)
        made.set_defaults(act=act)
        choices = ("json", "yaml") if name == "export" else ("table", "json", "yaml")
        default = "yaml" if name == "export" else "table"
        made.add_argument("-o", "--output", choices=choices, default=default, help="how to print (default %(default)s)")
        return made

    command("show", _show, "what stands on each GPU, who uses it, and what is wanted of it", wanted)
    command("plan", _plan, "the steps to a layout and why, without taking any", wanted)
    apply_ = command("apply", _apply, "bring the GPUs to a layout, which the agent keeps from then on", wanted)
    apply_.add_argument("-y", "--yes", action="store_true", help="do not ask before changing anything")
    apply_.add_argument("--adopt", action="store_true", help="take over instances that something else made")
    assert_ = command("assert", _assert, "exit with 0 if a layout stands and with 3 if it does not", wanted)
    assert_.add_argument("--mode-only", action="store_true", help="compare the MIG mode and not the instances")
    export_ = command("export", _export, "what stands, as a mig-parted configuration file")
    export_.add_argument(
        "--label", default="current", metavar="NAME", help="the configuration's name (default current)"
    )
    return parser


# What is wanted


def _entries(flags: argparse.Namespace) -> tuple[Entry, ...]:
    """The configuration that was chosen; raises PartedFileError."""
    name, source = flags.file, "standard input" if flags.file == "-" else flags.file
    try:
        if name == "-":
            content = sys.stdin.buffer.read(BYTES_MOST + 1)
        else:
            with Path(name).open("rb") as file:
                content = file.read(BYTES_MOST + 1)
        text = content.decode("utf-8")
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise Unreadable(source, None, "", problem, "give a mig-parted configuration file") from None
    except UnicodeDecodeError:
        raise Unreadable(source, None, "", "is no UTF-8 text", "give a mig-parted configuration file") from None
    return read(text, source).config(flags.config)[1]


def _asks(flags: argparse.Namespace, *, needed: bool) -> bool:
    """Whether the flags want anything; raises UsageError."""
    if flags.file is not None and flags.layout:
        raise UsageError("FILE and --layout: both say what is wanted; give one of them")
    if flags.config is not None and flags.file is None:
        raise UsageError("--config: names a configuration of a file; give the file, too")
    if needed and flags.file is None and not flags.layout:
        raise UsageError("nothing says what is wanted; give a mig-parted file, or --layout GPU=LAYOUT")
    return flags.file is not None or bool(flags.layout)


def _wishes(flags: argparse.Namespace, inspection: Inspection) -> tuple[Wish, ...]:
    if flags.file is not None:
        return by_entries(_entries(flags), inspection.subjects)
    return by_texts(flags.layout, inspection.subjects)


def _print(
    flags: argparse.Namespace, found: dict[str, Any], lines: Callable[[dict[str, Any], int | None], Iterable[str]]
) -> None:
    if flags.output == "table":
        text = "".join(f"{line}\n" for line in lines(found, width()))
    else:
        text = tables.printed(found, flags.output)
    write_out(text)


# The commands


def _show(flags: argparse.Namespace, site: Site) -> int:
    asks = _asks(flags, needed=False)
    inspection = inspect(site)
    wishes = _wishes(flags, inspection) if asks else inspection.standing_wishes()
    plans = [inspection.plan(wish) for wish in wishes]
    _print(flags, inspection.document(plans), tables.found_lines)
    return DONE


def _plan(flags: argparse.Namespace, site: Site) -> int:
    _asks(flags, needed=True)
    inspection = inspect(site)
    plans = [inspection.plan(wish) for wish in _wishes(flags, inspection)]
    if not plans:
        _tell("eelgrid-agent mig: no GPU of this node is spoken of; there is nothing to do")
    _tell_notes(inspection)
    _print(flags, inspection.document(plans), tables.plan_lines)
    barred = next(filter(None, map(inspection.barred, plans)), "")
    if barred:
        _tell(f"eelgrid-agent mig: `mig apply` would be refused: {barred}")
    return FAILED if any(plan.refused for plan in plans) else DONE


def _apply(flags: argparse.Namespace, site: Site) -> int:
    _asks(flags, needed=True)
    with ExitStack() as stack:
        stack.enter_context(hold(site.directory, "eelgrid-agent mig apply"))
        inspection = inspect(site)
        wishes = _wishes(flags, inspection)
        if flags.adopt:
            inspection = inspection.adopted(wish.layout.gpu_uuid for wish in wishes)
            wishes = _wishes(flags, inspection)
        plans = [inspection.plan(wish) for wish in wishes]
        _tell_notes(inspection)
        if flags.output == "table":
            _print(flags, inspection.document(plans), tables.plan_lines)
        _refuse(flags, inspection, plans)
        _confirm(flags, plans)
        return _carry_out(flags, site, plans)


def _tell_notes(inspection: Inspection) -> None:
    for note in inspection.notes:
        _tell(f"eelgrid-agent mig: note: {note}")


def _refuse(flags: argparse.Namespace, inspection: Inspection, plans: Sequence[Plan]) -> None:
    """Raises Failed before anything is changed where one of the plans cannot be had."""
    for plan in plans:
        barred = inspection.barred(plan)
        rule, detail = (plan.rule, plan.detail) if plan.refused else (Rule.NO_PERMISSION.value, barred)
        if plan.refused or barred:
            gpu = plan.wish.subject.gpu
            if flags.output != "table":
                row = {"gpu": gpu.uuid, "status": "refused", "rule": rule, "detail": detail}
                write_out(tables.printed({"results": [row]}, flags.output))
            raise Failed(f"GPU {gpu.index}: refused by rule {rule}: {detail}; nothing was changed")


def _confirm(flags: argparse.Namespace, plans: Sequence[Plan]) -> None:
    """Asks before anything is changed; raises UsageError where the answer is not yes."""
    steps = sum(len(plan.steps) for plan in plans)
    if flags.yes or not steps:
        return
    if flags.file == "-" or not sys.stdin.isatty():
        raise UsageError("--yes: is missing, and nobody can be asked; add it to change the GPUs")
    gpus = sum(bool(plan.steps) for plan in plans)
    sys.stderr.write(f"Take {steps} step(s) on {gpus} GPU(s)? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in _YES:
        raise UsageError("not confirmed; nothing was changed")


def _carry_out(flags: argparse.Namespace, site: Site, plans: Sequence[Plan]) -> int:
    """Every layout in turn, up to the first that cannot be had."""
    current = [""]
    control = Narrated(site.control, tell=lambda text: _tell(f"{current[0]}: {text}"), changed=site.keep)
    executor = MigExecutor(
        site.device, control, FileJournal(site.journal), boot_id=lambda: site.boot_id, sleep=time.sleep,
        monotonic_s=time.monotonic, wall_ns=time.time_ns, obstacle=site.obstacle,
    )  # fmt: skip
    results: list[ApplyResult] = []
    for plan in plans:
        gpu = plan.wish.subject.gpu
        current[0] = f"GPU {gpu.index}"
        if flags.adopt:
            executor.adopt(gpu.uuid)
        result = executor.apply(plan.wish.layout)
        results.append(result)
        if result.status is not ApplyStatus.APPLIED:
            break
        _tell(f"GPU {gpu.index}: {result.detail}")
        _open_nodes(site, gpu.uuid)
    site.keep()
    if flags.output != "table":
        rows = [
            {"gpu": r.subject, "status": r.status.name.lower(), "rule": r.rule, "detail": r.detail} for r in results
        ]
        write_out(tables.printed({"results": rows}, flags.output))
    if results and results[-1].status is not ApplyStatus.APPLIED:
        last, left = results[-1], len(plans) - len(results)
        rest = f"; {left} GPU(s) after it were not touched" if left else ""
        detail = last.detail.removeprefix(f"{last.subject}: ")
        raise Failed(f"{current[0]}: {last.status.name.lower()} by rule {last.rule}: {detail}{rest}")
    return DONE


def _open_nodes(site: Site, uuid: str) -> None:
    """Containers need a device node for each instance; that there is none is told, and undoes nothing."""
    gpu = next((gpu for gpu in site.device.gpus() if gpu.uuid == uuid), None)
    problem = site.open_nodes(gpu) if gpu is not None else ""
    if problem:
        _tell(f"GPU {gpu.index if gpu else uuid}: {problem}")


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _assert(flags: argparse.Namespace, site: Site) -> int:
    _asks(flags, needed=True)
    inspection = inspect(site)
    if flags.file is not None:
        reasons = unmet_entries(_entries(flags), inspection.subjects, mode_only=flags.mode_only)
    else:
        reasons = unmet_wishes(by_texts(flags.layout, inspection.subjects), mode_only=flags.mode_only)
    if flags.output != "table":
        write_out(tables.printed({"stands": not reasons, "reasons": list(reasons)}, flags.output))
    elif not reasons:
        write_out("it stands\n")
    for reason in reasons:
        _tell(f"eelgrid-agent mig: {reason}")
    return NOT_SO if reasons else DONE


def _export(flags: argparse.Namespace, site: Site) -> int:
    inspection = inspect(site)
    if inspection.problems:
        uuid, problem = next(iter(inspection.problems.items()))
        raise Failed(f"GPU {uuid}: its layout cannot be read, so that an export would be wrong: {problem}")
    if not inspection.subjects:
        raise Failed("this node has no GPU; there is nothing to export")
    bare = [
        gpu.index
        for s in inspection.subjects
        for gpu in [s.gpu]
        if any(not i.compute_instances for i in gpu.gpu_instances)
    ]
    for index in bare:
        _tell(
            f"eelgrid-agent mig: GPU {index} has GPU instances without compute instances; the format has no word for them"
        )
    file = export(inspection.subjects, flags.label)
    write_out(write(file) if flags.output == "yaml" else tables.printed(document(file), "json"))
    return DONE
