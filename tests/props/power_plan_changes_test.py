"""Limits on their way under any failures: no budget is exceeded at any moment, and what can be done gets done.

The watch beside the code keeps its own account from commands and from what the
simulated nodes really have, and knows nothing of the code's claims.
"""

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_controller.objectives.power.budgets import (
    BudgetTooSmall,
    BudgetTree,
    Holding,
    LimitSetting,
    PowerBudgetNode,
)
from eelgrid_controller.objectives.power.control_events import (
    LimitConfirmed,
    LimitFailed,
    NodeReachable,
    NodeUnreachable,
)
from eelgrid_controller.objectives.power.power_cap_controller import LimitRollout

LIMITS_W = (100.0, 150.0, 200.0, 250.0)
HAIR_W = 1e-5


def fleet(nodes, each, gpus):
    """Nodes in two racks under a cluster, feeds across them."""
    return [
        Holding(f"n{node}/{at}", f"n{node}", gpus[(node * each + at) % len(gpus)], (f"n{node}", f"feed{node % 2}"))
        for node in range(nodes)
        for at in range(each)
    ]


def chains(node):
    return {f"n{node}", f"rack{node % 3 // 2}", "cluster", f"feed{node % 2}"}


def tree(nodes, rooms):
    return BudgetTree(
        [
            PowerBudgetNode("cluster", rooms["cluster"]),
            PowerBudgetNode("rack0", rooms["rack0"], "cluster"),
            PowerBudgetNode("rack1", rooms["rack1"], "cluster"),
            *(PowerBudgetNode(f"n{node}", rooms[f"n{node}"], f"rack{node % 3 // 2}") for node in range(nodes)),
            PowerBudgetNode("feed0", rooms["feed0"]),
            PowerBudgetNode("feed1", rooms["feed1"]),
        ]
    )


class World:
    """Nodes that obey, refuse, forget to answer or vanish; the truth is `has`."""

    def __init__(self, holdings, now):
        self.holdings = {one.name: one for one in holdings}
        self.has = dict(now)
        self.may = {name: {limit} for name, limit in now.items()}  # what it may have since it was last read
        self.flight = []
        self.down = set()

    def send(self, commands):
        for command in commands:
            assert command.node not in self.down, "no command goes to a lost node"
            assert not any(other.holding == command.holding for other in self.flight), "one at a time"
            self.may[command.holding].add(command.limit_w)
            self.flight.append(command)

    def most_w(self):
        """The most that each budget may be drawn from, whatever happened to commands."""
        most = {}
        for name, holding in self.holdings.items():
            watts = holding.gpus * max(self.may[name])
            for budget in chains(int(holding.node[1:])):
                most[budget] = most.get(budget, 0.0) + watts
        return most

    def answer(self, draw):
        """One command meets its fate."""
        command = self.flight.pop(draw(st.integers(0, len(self.flight) - 1)))
        name = command.holding
        if command.node in self.down:
            if draw(st.booleans()):
                self.has[name] = command.limit_w  # it arrived before the node vanished
            return LimitConfirmed(0.0, command.number, command.limit_w)  # late: nobody may believe it
        fate = draw(st.sampled_from(["done", "done", "refused", "silent", "silent", "silent done", "other"]))
        if fate in {"done", "silent done"}:
            self.has[name] = command.limit_w
        elif fate == "other":
            self.has[name] = draw(st.sampled_from(sorted(self.may[name])))
        if fate.startswith("silent"):
            return LimitFailed(0.0, command.number, None)
        self.may[name] = {self.has[name]}
        if fate == "refused":
            return LimitFailed(0.0, command.number, self.has[name])
        return LimitConfirmed(0.0, command.number, self.has[name])


def rooms_for(draw, holdings, settings_of):
    """Budgets that a set of limits just fits, or with some room to spare."""
    need = {}
    for holding in holdings:
        for budget in chains(int(holding.node[1:])):
            need[budget] = need.get(budget, 0.0) + holding.gpus * settings_of[holding.name]
    spare = draw(st.sampled_from([0.0, 0.0, 0.1, 0.5]))
    return {
        name: need.get(name, 0.0) * (1.0 + spare)
        for name in ("cluster", "rack0", "rack1", "feed0", "feed1", *(f"n{node}" for node in range(4)))
    }


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_no_budget_is_exceeded_at_any_moment_and_all_ends_well(data):
    draw = data.draw
    nodes = 4
    holdings = fleet(nodes, draw(st.integers(1, 3)), draw(st.lists(st.integers(1, 8), min_size=1, max_size=5)))
    limits = st.sampled_from(LIMITS_W)
    now = {one.name: draw(limits) for one in holdings}
    wanted = {one.name: draw(limits) for one in holdings}
    at_first, in_the_end = rooms_for(draw, holdings, now), rooms_for(draw, holdings, wanted)
    rooms = {name: max(at_first[name], in_the_end[name]) for name in at_first}

    def setting(name, limit):
        return LimitSetting(limit, next(one.gpus for one in holdings if one.name == name) * limit)

    changes = LimitRollout(tree(nodes, rooms), holdings, {name: setting(name, limit) for name, limit in now.items()})
    world = World(holdings, now)

    def check():
        for budget, watts in world.most_w().items():
            assert watts <= rooms[budget] + HAIR_W, budget
        claims = changes.claims_w()
        for budget, watts in world.most_w().items():
            assert claims[budget] >= watts - HAIR_W, "nothing that may be drawn is left out"

    world.send(changes.request_settings({name: setting(name, limit) for name, limit in wanted.items()}))
    check()
    for _ in range(draw(st.integers(0, 40))):
        act = draw(st.sampled_from(["answer", "answer", "answer", "lose", "back", "want"]))
        if act == "answer" and world.flight:
            world.send(changes.handle_event(world.answer(draw)))
        elif act == "lose":
            node = f"n{draw(st.integers(0, nodes - 1))}"
            world.down.add(node)
            world.send(changes.handle_event(NodeUnreachable(0.0, node)))
        elif act == "back" and world.down:
            node = draw(st.sampled_from(sorted(world.down)))
            bring_back(world, changes, node)
        elif act == "want":
            name = draw(st.sampled_from([one.name for one in holdings]))
            with suppress(BudgetTooSmall):
                world.send(changes.request_settings({name: setting(name, draw(limits))}))
        check()
    finish(world, changes, {name: setting(name, limit) for name, limit in wanted.items()}, check)


def bring_back(world, changes, node):
    """The node answers again, and commands of before are void there."""
    world.down.discard(node)
    world.flight = [command for command in world.flight if command.node != node]
    mine = {name: world.has[name] for name, one in world.holdings.items() if one.node == node}
    for name, limit in mine.items():
        world.may[name] = {limit}
    world.send(changes.handle_event(NodeReachable(0.0, node, mine)))


def finish(world, changes, wanted, check):
    """Failures end: every command is done, and everything gets what is wanted."""
    for node in sorted(world.down):
        bring_back(world, changes, node)
        check()
    world.send(changes.request_settings(wanted))
    while world.flight:
        command = world.flight.pop(0)
        world.has[command.holding] = command.limit_w
        world.may[command.holding] = {command.limit_w}
        world.send(changes.handle_event(LimitConfirmed(0.0, command.number, command.limit_w)))
        check()
    assert changes.unfinished_holdings() == ()
    assert {name: setting.limit_w for name, setting in wanted.items()} == world.has
