"""`eelgrid-agent energy`: queries a running agent for energy by owner and prints a table or JSON.

On a terminal that is too narrow, the last column goes to a line of its own; into a file or a pipe (`width` None) every
row is one line. Joules are printed to the millijoule, so that they can be added up.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from eelgrid_agent.cli import close_output, terminal_width, write_output
from eelgrid_agent.node.config import AgentConfigError, add_tls_flags, check_address, check_node_name, read_tls_flags
from eelgrid_protos.faults import DeadlineExceeded, Fault, InvalidArgument, NotFound, Unavailable
from eelgrid_protos.messages import (
    AttributionConfidence,
    AttributionMethod,
    DeviceEnergy,
    EnergyAnomaly,
    EnergyOwner,
    EnergyPart,
    EnergyStatus,
    GetInventoryRequest,
    GetNodeEnergyRequest,
    GetNodeEnergyResponse,
    Inventory,
    OwnedEnergy,
)
from eelgrid_protos.plain_messages import to_plain
from eelgrid_protos.rpc import NODE_SERVICE, build_client
from eelgrid_protos.safe_text import escape_json
from eelgrid_protos.transport import ListenError, open_blocking_channel

_STATUS = {
    EnergyStatus.NOT_YET: "nothing was sampled yet; retry in a few seconds",
    EnergyStatus.NOT_KEPT: "this agent simulates several nodes and divides no energy; simulate one node alone",
    EnergyStatus.UNSPECIFIED: "the agent is newer than this command and sent a value that this command does not know",
}
_PARTS = (EnergyPart.BARE_IDLE, EnergyPart.CONTEXT_IDLE, EnergyPart.ACTIVE)


@dataclass(slots=True)
class _Sum:
    """One owner on one place."""

    energy_mj: int = 0
    parts_mj: Counter[EnergyPart] = field(default_factory=Counter)
    methods_mj: Counter[AttributionMethod] = field(default_factory=Counter)
    confidences_mj: Counter[AttributionConfidence] = field(default_factory=Counter)


def format_energy_lines(answer: GetNodeEnergyResponse, inventory: Inventory, width: int | None = None) -> Iterator[str]:
    """Devices, owners with the most joules first, and anomalies."""
    kind = " (simulated)" if inventory.simulated else ""
    yield f"node {inventory.node_name}{kind}   joules since the agent started, up to its last sample"
    if answer.status is not EnergyStatus.KNOWN:
        yield _STATUS[answer.status]
        return
    places = {gpu.uuid: str(gpu.index) for gpu in inventory.gpus}
    yield ""
    if not answer.devices:
        yield "no GPU"
    else:
        yield from _table(_DEVICES, [_device_row(one, answer.owners, places) for one in answer.devices], width)
    for device in answer.devices:
        if device.estimate is not None and device.estimate.uncounted_s > 0.0:
            lost = f"{device.estimate.uncounted_s:.0f} of {device.estimate.seconds:.0f} s"
            yield f"  GPU {_format_device(device.gpu_uuid, None, places)}: {lost} were not measured and are in no total"
    yield ""
    if answer.owners:
        yield from _table(_OWNERS, list(_owner_rows(answer.owners, places)), width)
    else:
        yield "no owner"
    yield ""
    if answer.anomalies:
        yield from _table(_ANOMALIES, [_anomaly_row(one, places) for one in answer.anomalies], width)
    else:
        yield "no anomaly"


# Headings; those of numbers stand to the right, as the numbers do.
_DEVICES = ("GPU", ">ENERGY J", ">+- J", "METHOD", ">SECONDS", ">OWNED J", "UNOWNED J", "UUID")
_OWNERS = ("GPU", ">ENERGY J", ">BARE IDLE J", ">CONTEXT IDLE J", ">ACTIVE J", "METHOD", "CONFIDENCE", "OWNER")
_ANOMALIES = ("ANOMALY", "GPU", ">FOR S", ">WASTED J", "OWNER")


def _device_row(device: DeviceEnergy, owners: Iterable[OwnedEnergy], places: Mapping[str, str]) -> tuple[str, ...]:
    owned_mj = sum(row.energy_mj for row in owners if row.gpu_uuid == device.gpu_uuid)
    unowned = [f"{_joules(one.energy_mj)} {one.reason.name.lower()}" for one in device.unowned if one.energy_mj]
    told = device.estimate
    doubt = (
        ("-", "-", "-")
        if told is None
        else (f"{told.uncertainty_j:.1f}", told.method.name.lower(), f"{told.seconds:.0f}")
    )
    return (
        _format_device(device.gpu_uuid, None, places),
        _joules(device.total_mj),
        *doubt,
        _joules(owned_mj),
        ", ".join(unowned) or "-",
        device.gpu_uuid,
    )


def _owner_rows(rows: Iterable[OwnedEnergy], places: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """One row for each owner on each place; of methods and confidences those by which most of it was found."""
    sums: dict[tuple[EnergyOwner, str, int | None], _Sum] = {}
    for row in rows:
        one = sums.setdefault((row.owner, row.gpu_uuid, row.gpu_instance_id), _Sum())
        one.energy_mj += row.energy_mj
        one.parts_mj[row.part] += row.energy_mj
        one.methods_mj[row.method] += row.energy_mj
        one.confidences_mj[row.confidence] += row.energy_mj
    for (owner, uuid, instance), one in sorted(sums.items(), key=lambda item: -item[1].energy_mj):
        yield (
            _format_device(uuid, instance, places),
            _joules(one.energy_mj),
            *(_joules(one.parts_mj[part]) for part in _PARTS),
            _most(one.methods_mj),
            _most(one.confidences_mj),
            _title(owner),
        )


def _most(energies_mj: Mapping[AttributionMethod, int] | Mapping[AttributionConfidence, int]) -> str:
    return max(energies_mj.items(), key=lambda item: item[1])[0].name.lower()


def _anomaly_row(anomaly: EnergyAnomaly, places: Mapping[str, str]) -> tuple[str, ...]:
    return (
        anomaly.kind.name.lower(),
        _format_device(anomaly.gpu_uuid, anomaly.gpu_instance_id, places),
        f"{anomaly.lasted_s:.0f}",
        _joules(anomaly.wasted_mj),
        _title(anomaly.owner),
    )


def _format_device(gpu_uuid: str, instance: int | None, places: Mapping[str, str]) -> str:
    """A device's index and, after a colon, its GPU instance; a device that left has no index."""
    index = places.get(gpu_uuid, "gone")
    return index if instance is None else f"{index}:{instance}"


def _joules(energy_mj: int) -> str:
    """Without a float in between, which has no room for a large total's millijoules."""
    return f"{energy_mj // 1000}.{energy_mj % 1000:03}"


def _title(owner: EnergyOwner) -> str:
    """What it is and every name that is known."""
    names = {name: value for name, value in to_plain(owner, brief=True).items() if name != "kind"}
    return " ".join([owner.kind.name.lower(), *(f"{name}={value}" for name, value in names.items())])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> Iterator[str]:
    """Columns side by side; where they do not fit, the last one goes below its row."""
    names = [name.removeprefix(">") for name in head]
    sizes = [max(len(row[column]) for row in (names, *rows)) for column in range(len(head))]
    below = width is not None and sum(sizes) + 2 * len(sizes) > width
    beside = len(head) - below
    for row in (names, *rows):
        cells = [
            cell.rjust(size) if name.startswith(">") else cell.ljust(size)
            for name, cell, size in zip(head[:beside], row[:beside], sizes[:beside], strict=True)
        ]
        yield "  " + "  ".join(cells).rstrip()
        if below:
            yield f"      {row[-1]}"


DONE, FAILED, WRONG_USE = 0, 1, 2
_INTERRUPTED = 130
_DEADLINE_S = 10.0


class EnergyCommandError(Exception):
    """The command failed; the message says what to do."""


class EnergyUsageError(EnergyCommandError):
    """The flags are wrong, or name no node of that agent."""


class EnergyCommandFailed(EnergyCommandError):
    """The agent cannot be reached, or does not answer."""


def run_energy_command(arguments: Sequence[str]) -> int:
    """Asks once and prints; returns the exit code. Exits by itself for --help and unknown flags, as argparse does."""
    flags = _parser().parse_args(arguments)
    try:
        check_address("--address", flags.address)
        check_node_name("--node", flags.node)
        inventory, answer = _query_node(flags)
        write_output(_text(flags.output, inventory, answer))
    except (EnergyUsageError, AgentConfigError, ListenError) as error:
        return _fail(error, WRONG_USE)
    except EnergyCommandFailed as error:
        return _fail(error, FAILED)
    except BrokenPipeError:
        # Whoever read our output has gone; nothing more can be told.
        close_output()
        return FAILED
    except OSError as error:
        close_output()
        return _fail(f"the output: {error.strerror}; make room, or write it elsewhere", FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", _INTERRUPTED)
    return DONE


def _fail(error: Exception | str, code: int) -> int:
    sys.stderr.write(f"eelgrid-agent energy: {error}\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eelgrid-agent energy",
        allow_abbrev=False,
        description=(
            "Shows the energy of a node by owner, from the agent that runs there. "
            "Exit codes: 0 done, 1 failed, 2 wrong use."
        ),
    )
    add = parser.add_argument
    add("--address", default="127.0.0.1:7444", metavar="HOST:PORT", help="the agent's --listen (default %(default)s)")
    add("--node", default="", metavar="NAME", help="which node of the agent, where it has several")
    add(
        "-o",
        "--output",
        choices=("table", "json"),
        default="table",
        help="how to print; json has the last interval by process, too (default %(default)s)",
    )
    add_tls_flags(add)
    return parser


def _query_node(flags: argparse.Namespace) -> tuple[Inventory, GetNodeEnergyResponse]:
    """The node and its answer; raises EnergyUsageError, EnergyCommandFailed, AgentConfigError and ListenError."""
    with open_blocking_channel(flags.address, tls=read_tls_flags(flags), insecure=flags.insecure) as channel:
        node = build_client(NODE_SERVICE, channel)
        try:
            inventory: Inventory = node.get_inventory(
                GetInventoryRequest(node_name=flags.node), timeout=_DEADLINE_S
            ).inventory
            answer: GetNodeEnergyResponse = node.get_node_energy(
                GetNodeEnergyRequest(node_name=flags.node), timeout=_DEADLINE_S
            )
        except Fault as fault:
            raise _explain_fault(fault, flags.address) from None
    return inventory, answer


def _explain_fault(fault: Fault, address: str) -> EnergyCommandError:
    """The fault in the words of these flags."""
    reason = " ".join(fault.message.split())
    match fault:
        case InvalidArgument():
            told = "; ".join(f"{violation.problem}; {violation.remedy}" for violation in fault.violations)
            return EnergyUsageError(f"--node: {told or reason}")
        case NotFound():
            return EnergyUsageError(f"--node: {reason}")
        case Unavailable():
            remedy = "start the agent, or give its --listen as --address, and its --tls-* files if it has any"
            return EnergyCommandFailed(f"{address}: no agent can be reached ({reason}); {remedy}")
        case DeadlineExceeded():
            return EnergyCommandFailed(
                f"{address}: no answer within {_DEADLINE_S:.0f} s; see the agent's log, or try again"
            )
        case _:
            remedy = "it may not be an agent, or an older one; its log shows its --listen address and version"
            return EnergyCommandFailed(f"{address}: answers {reason}; {remedy}")


def _text(output: str, inventory: Inventory, answer: GetNodeEnergyResponse) -> str:
    if output == "json":
        document = {"node": inventory.node_name, **to_plain(answer)}
        return escape_json(json.dumps(document, indent=2, ensure_ascii=False)) + "\n"
    return "".join(f"{line}\n" for line in format_energy_lines(answer, inventory, terminal_width()))
