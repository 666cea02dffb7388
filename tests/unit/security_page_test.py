"""docs/reference/security.md: its table of calls is `REQUIRED_ROLES`, and its limits are those of the code."""

import re
from pathlib import Path

import pytest

from eelgrid_agent.node.node_service import METHOD_ROLES as NODE_NEEDS
from eelgrid_controller.core import core
from eelgrid_controller.runtime.access_control import REQUIRED_ROLES
from eelgrid_controller.runtime.config import ControllerConfig
from eelgrid_controller.state import agent_liveness
from eelgrid_protos.messages import AUDIT_ARGUMENTS_MOST

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "security.md").read_text(encoding="utf-8")


def table_of(text):
    """The cells of a table's rows, without its head."""
    rows = [line.strip().strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_table_of_calls_is_the_one_that_is_asked():
    found = {
        call: role
        for role, calls in table_of(PAGE.partition("<!-- calls -->")[2].partition("<!-- calls end -->")[0])
        for call in re.findall(r"`(\w+)`", calls)
    }
    wanted = {
        path.rpartition("/")[2]: "any certificate" if role is None else role.value
        for path, role in REQUIRED_ROLES.items()
    }
    assert found == wanted


def test_the_calls_of_the_agents_own_api_are_named():
    for path in NODE_NEEDS:
        assert f"`{path.rpartition('/')[2]}`" in PAGE


@pytest.mark.parametrize(
    ("what", "limit"),
    [
        ("audit entries kept", ControllerConfig(data=Path()).audit_rows_most),
        ("new nodes of one certificate, or address, in an hour", ControllerConfig(data=Path()).registrations_most),
        ("nodes registered", core.NODES_MOST),
        ("workloads that wait or run", core.LIVE_WORKLOADS_MOST),
        ("arguments and reason kept of a call", AUDIT_ARGUMENTS_MOST),
        ("certificates distinguished by that limit", agent_liveness._PEERS_MOST),
        ("commands that wait", ControllerConfig(data=Path()).queue_most),
    ],
)
def test_limits_are_those_of_the_code(what, limit):
    (shown,) = (row[1] for row in table_of(PAGE.partition("## Limits")[2]) if row[0] == what)
    assert shown.startswith(f"{limit:,}")


@pytest.mark.parametrize("place", sorted({*re.findall(r"`([\w/]+\.py(?:: [\w, ]+)?)`", PAGE)}))
def test_a_place_in_the_code_is_there(place):
    """Files are named from the package's folder, or with the package; names are those of the module."""
    path, _, names = place.partition(": ")
    folders = ("controller/eelgrid_controller", "protos/eelgrid_protos", "agent/eelgrid_agent", "protos")
    found = [ROOT / folder / path for folder in folders if (ROOT / folder / path).is_file()]
    assert found, f"{path} is in none of {folders}"
    text = found[0].read_text(encoding="utf-8")
    for name in filter(None, names.split(", ")):
        assert re.search(rf"^\s*(class |def )?{name}\b", text, re.MULTILINE), f"{found[0]} defines no {name}"
