"""`eelgrid-agent energy`: whose a node's joules are, asked of a running agent.

Owns the flags, the two calls and the exit codes: 0 done, 1 it failed, 2 wrong
use. Errors are one line on stderr and say what to do next. Changes nothing.

CommandError                 the command cannot do what it was told
├── UsageError               the flags are wrong, or mean no node of that agent
└── Failed                   the agent cannot be asked
"""

import argparse
import json
import sys
from collections.abc import Sequence

from eelgrid_agent.config import ConfigError, add_tls_flags, check_address, check_name, tls_files
from eelgrid_agent.energy_tables import energy_lines
from eelgrid_agent.terminal import close_output, width, write
from eelgrid_protos.faults import DeadlineExceeded, Fault, InvalidArgument, NotFound, Unavailable
from eelgrid_protos.messages import GetInventoryRequest, GetNodeEnergyRequest, GetNodeEnergyResponse, Inventory
from eelgrid_protos.plain import to_plain
from eelgrid_protos.rpc import NODE_SERVICE, client
from eelgrid_protos.safe_text import printable_json
from eelgrid_protos.transport import ListenError, blocking_channel

__all__ = ["CommandError", "Failed", "UsageError", "run"]

DONE, FAILED, WRONG_USE = 0, 1, 2
_INTERRUPTED = 130
_DEADLINE_S = 10.0


class CommandError(Exception):
    """The command cannot do what it was told; the message says what to do."""


class UsageError(CommandError):
    """The flags are wrong, or mean no node of that agent."""


class Failed(CommandError):
    """The agent cannot be asked."""


def run(arguments: Sequence[str]) -> int:
    """Asks once and prints; returns the exit code. Exits by itself for --help and unknown flags, as argparse does."""
    flags = _parser().parse_args(arguments)
    try:
        check_address("--address", flags.address)
        check_name("--node", flags.node)
        inventory, answer = _asked(flags)
        write(_text(flags.output, inventory, answer))
    except (UsageError, ConfigError, ListenError) as error:
        return _fail(error, WRONG_USE)
    except Failed as error:
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
        prog="eelgrid-agent energy", allow_abbrev=False,
        description="Whose a node's joules are, by the agent that runs there. Exit codes: 0 done, 1 failed, 2 wrong use.",
    )  # fmt: skip
    add = parser.add_argument
    add("--address", default="127.0.0.1:7444", metavar="HOST:PORT", help="the agent's --listen (default %(default)s)")
    add("--node", default="", metavar="NAME", help="which node of the agent, where it has several")
    add(
        "-o", "--output", choices=("table", "json"), default="table",
        help="how to print; json has the last interval by process, too (default %(default)s)",
    )  # fmt: skip
    add_tls_flags(add)
    return parser


def _asked(flags: argparse.Namespace) -> tuple[Inventory, GetNodeEnergyResponse]:
    """The node and its answer; raises UsageError, Failed, ConfigError and ListenError."""
    with blocking_channel(flags.address, tls=tls_files(flags), insecure=flags.insecure) as channel:
        node = client(NODE_SERVICE, channel)
        try:
            inventory: Inventory = node.get_inventory(
                GetInventoryRequest(node_name=flags.node), timeout=_DEADLINE_S
            ).inventory
            answer: GetNodeEnergyResponse = node.get_node_energy(
                GetNodeEnergyRequest(node_name=flags.node), timeout=_DEADLINE_S
            )
        except Fault as fault:
            raise _explained(fault, flags.address) from None
    return inventory, answer


def _explained(fault: Fault, address: str) -> CommandError:
    """The fault in the words of these flags."""
    reason = " ".join(fault.message.split())
    match fault:
        case InvalidArgument():
            told = "; ".join(f"{violation.problem}; {violation.remedy}" for violation in fault.violations)
            return UsageError(f"--node: {told or reason}")
        case NotFound():
            return UsageError(f"--node: {reason}")
        case Unavailable():
            remedy = "start the agent, or give its --listen as --address, and its --tls-* files if it has any"
            return Failed(f"{address}: no agent can be reached ({reason}); {remedy}")
        case DeadlineExceeded():
            return Failed(f"{address}: no answer within {_DEADLINE_S:.0f} s; see the agent's log, or try again")
        case _:
            remedy = "it may be no agent or an older one, whose --listen and version its log tells"
            return Failed(f"{address}: answers {reason}; {remedy}")


def _text(output: str, inventory: Inventory, answer: GetNodeEnergyResponse) -> str:
    if output == "json":
        document = {"node": inventory.node_name, **to_plain(answer)}
        return printable_json(json.dumps(document, indent=2, ensure_ascii=False)) + "\n"
    return "".join(f"{line}\n" for line in energy_lines(answer, inventory, width()))
