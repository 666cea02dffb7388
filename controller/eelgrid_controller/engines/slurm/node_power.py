"""Slurm's SuspendProgram and ResumeProgram: shuts nodes down, or starts them, by their BMCs; decides nothing.

    python -m eelgrid_controller.engines.slurm.node_power off|on HOSTLIST [--bmcs FILE]

Owns the order in which nodes are asked, retries, and the exit code: 0 if every node has taken the order, else 1 with a line
for each that has not; 2 if nothing could be asked. Must not know which nodes should sleep: that is the controller's, or
whoever called. Nodes are asked side by side, a few at a time, and one that fails costs the others nothing.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eelgrid_controller.engines.bmc import Bmc, BmcError, BmcFileError, load_bmcs
from eelgrid_controller.engines.element_lists import UnreadableAnswer
from eelgrid_controller.engines.host_lists import expand_hosts

_FILE = Path("/etc/eelgrid/bmcs.toml")
_AT_ONCE = 32
_TRIES = 3
_PAUSE_S = 2.0


def set_power(bmc: Bmc, *, on: bool, sleep: Callable[[float], None] = time.sleep) -> str:
    """Has a node start or shut down, with a few tries; returns why it did not take the order, empty if it did."""
    problem = ""
    for number in range(_TRIES):
        if number:
            sleep(_PAUSE_S * number)
        try:
            if bmc.read_power() is not on:
                if on:
                    bmc.power_on()
                else:
                    bmc.power_off()
        except BmcError as error:
            problem = str(error)
        else:
            return ""
    return problem


def set_power_of_all(
    names: Sequence[str], bmcs: Mapping[str, Bmc], *, on: bool, sleep: Callable[[float], None] = time.sleep
) -> dict[str, str]:
    """Returns, by name, why nodes did not take the order; empty if all did."""
    unknown = {name: "is not in the file of BMCs; add it" for name in names if name not in bmcs}
    asked = [name for name in names if name in bmcs]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        answers = threads.map(lambda name: set_power(bmcs[name], on=on, sleep=sleep), asked)
        found = dict(zip(asked, answers, strict=True))
    return unknown | {name: problem for name, problem in found.items() if problem}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="node_power", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("power", choices=("on", "off"))
    parser.add_argument("hosts", help="host list of Slurm, such as n[1-4]")
    parser.add_argument("--bmcs", type=Path, default=_FILE, help="which node has which BMC (default %(default)s)")
    options = parser.parse_args(arguments)
    try:
        names, bmcs = tuple(dict.fromkeys(expand_hosts(options.hosts))), load_bmcs(options.bmcs)
    except (UnreadableAnswer, BmcFileError) as error:
        sys.stderr.write(f"node_power: {error}\n")
        return 2
    failed = set_power_of_all(names, bmcs, on=options.power == "on")
    for name, problem in sorted(failed.items()):
        sys.stderr.write(f"node_power: {name}: {problem}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
