"""`eelgrid-agent lease`: takes, releases and lists the leases of this node's GPUs and MIG slices.

    lease take     before an engine uses devices: all of them are given, or none with the name of the holder
    lease release  when it uses them no more
    lease list     who holds what since when, and of whom it is not known whether he still exists

Defines the flags, the text and the exit codes: 0 done, 1 no agent answers, it does not know the device or it failed, 2
wrong use, 3 refused, because another engine holds a device or its MIG layout is being changed. Errors are one line on
stderr and say what to do next.
The protocol is `node/lease_socket.py`'s; a Slurm prolog and epilog that call this are in docs/how-to/two-engines.md.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eelgrid_agent.cli import close_output, write_output
from eelgrid_agent.node.config import LEASE_SOCKET
from eelgrid_agent.node.lease_socket import LeaseSocketError, ask_agent, read_leases
from eelgrid_protos.safe_text import escape_json

_TIMEOUT_S = 10.0
_REFUSED, _FAILED, _WRONG = 3, 1, 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eelgrid-agent lease",
        description=(
            "Takes, releases and lists the leases of this node's GPUs and MIG slices, so that no two engines (Slurm, Ray, "
            "Kubernetes, Eelgrid's own jobs) use one device. The exit code is 0 if it is done, 1 if no agent answers, it "
            "does not know a device or it fails, 2 for wrong use, and 3 if another engine holds a device."
        ),
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    take = commands.add_parser("take", help="lease devices, all or none; repeating it is harmless", allow_abbrev=False)
    _add_holder(take)
    _add_gpus(take, "the UUID of a GPU or MIG slice, or a GPU's index; may be repeated, or a list with commas")
    take.add_argument(
        "--shared", action="store_true", help="other owners of this engine may share the device: the engine divides it"
    )
    take.add_argument(
        "--pid", type=int, default=0, help="the lease ends with this process, if it is not released before"
    )
    release = commands.add_parser("release", help="end leases; nothing to end is no error", allow_abbrev=False)
    _add_holder(release)
    _add_gpus(release, "only this device; by default all of the owner's")
    listing = commands.add_parser("list", help="who holds what, since when", allow_abbrev=False)
    listing.add_argument("-o", "--output", choices=("table", "json"), default="table", help="default %(default)s")
    for command in (take, release, listing):
        command.add_argument(
            "--socket", type=Path, default=LEASE_SOCKET, help="the agent's --lease-socket (default %(default)s)"
        )
        command.add_argument(
            "--timeout",
            type=float,
            default=_TIMEOUT_S,
            metavar="SECONDS",
            help="how long an agent that does not answer is tried (default %(default)g)",
        )
    return parser


def _add_holder(command: argparse.ArgumentParser) -> None:
    command.add_argument("--engine", required=True, help="the engine that asks, such as slurm or ray")
    command.add_argument("--owner", required=True, help="what of it, such as the number of a Slurm job")


def _add_gpus(command: argparse.ArgumentParser, text: str) -> None:
    command.add_argument("--gpu", dest="gpus", action="append", default=[], metavar="GPU", help=text)


def build_request(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns the request to the agent."""
    if flags.command == "list":
        return {"op": "list"}
    gpus = [name.strip() for text in flags.gpus for name in text.split(",") if name.strip()]
    request = {"op": flags.command, "engine": flags.engine, "owner": flags.owner}
    if flags.command == "take":
        return {**request, "gpus": gpus, "shared": flags.shared, "pid": flags.pid}
    return {**request, "gpus": gpus or None}


def run_lease_command(arguments: Sequence[str]) -> int:
    """Runs one command; returns the exit code."""
    flags = _parser().parse_args(arguments)
    request = build_request(flags)
    if flags.command == "take" and not request["gpus"]:
        return _fail("--gpu: name the devices to lease; a job without GPUs needs no lease", _WRONG)
    try:
        answer = ask_agent(flags.socket, request, timeout_s=flags.timeout)
    except LeaseSocketError as error:
        return _fail(str(error), _FAILED)
    if answer.get("ok") is not True:
        problem = str(answer.get("problem") or "the agent gave no reason; see its log")
        code = _REFUSED if answer.get("refused") is True else _FAILED if answer.get("failed") is True else _WRONG
        return _fail(problem, code)
    is_json = flags.command == "list" and flags.output == "json"
    document = escape_json(json.dumps(answer, indent=2, ensure_ascii=False)) + "\n"
    try:
        write_output(document if is_json else "".join(f"{line}\n" for line in _describe(flags.command, answer)))
    except BrokenPipeError:
        # Whoever reads has enough; the lease is as it was answered.
        close_output()
    return 0


def _describe(command: str, answer: Mapping[str, Any]) -> Iterator[str]:
    if command == "release":
        yield f"released {answer.get('released', 0)}"
    elif command == "take":
        yield f"leased {', '.join(str(one.get('device_uuid') or one.get('gpu_uuid')) for one in read_leases(answer))}"
    else:
        yield from format_leases(answer)


def format_leases(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each lease, then what is wrong."""
    rows = [("DEVICE", "ENGINE", "OWNER", "SINCE", "STATE")]
    for one in read_leases(answer):
        since = datetime.fromtimestamp(int(one["since_ns"]) / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        note = f" ({one['note']})" if one["note"] else ""
        state = f"unknown: {one['unknown']}" if one["unknown"] else "held"
        rows.append((one["device_uuid"] or one["gpu_uuid"], one["engine"], f"{one['owner']}{note}", since, state))
    if len(rows) == 1:
        yield "no lease"
    else:
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        for row in rows:
            yield "  ".join([*(text.ljust(width) for text, width in zip(row[:4], widths, strict=True)), row[4]])
    for dispute in answer.get("disputes", ()):
        yield f"used by two: {dispute}"
    if answer.get("problem"):
        yield f"the journal was lost: {answer['problem']}"


def _fail(problem: str, code: int) -> int:
    sys.stderr.write(f"eelgrid-agent lease: {problem}\n")
    return code
