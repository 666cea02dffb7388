"""No input that a role may send changes what another principal sees beyond what the role grants: a bounded run.

`make fuzz` runs for an hour. A finding prints its seed: python -m tests.fuzz --seed N.
"""

import asyncio
import random

import pytest
from tests.fuzz.__main__ import run_scene
from tests.fuzz.grammar import Grammar

from eelgrid_protos import codec, rpc
from eelgrid_protos.schema import list_violations

CLASSES = sorted(
    {method.request for service in (rpc.OPERATOR_SERVICE, rpc.AGENT_SERVICE) for method in service.methods},
    key=lambda cls: cls.__name__,
)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_what_is_drawn_obeys_the_rules_and_goes_over_the_wire(cls):
    grammar = Grammar(random.Random(cls.__name__))
    drawn = [grammar.message(cls) for _ in range(40)]
    sound = [message for message in drawn if message is not None]
    assert len(sound) > 20
    for message in sound:
        assert next(list_violations(message), None) is None
        assert codec.decode_message(cls, codec.encode_message(message), is_counted=True) == message
    assert len(set(map(repr, sound))) > 1 or not codec.encode_message(sound[0])


def test_one_seed_draws_one_sequence():
    one, other = (Grammar(random.Random(7)) for _ in range(2))
    assert [one.message(cls) for cls in CLASSES] == [other.message(cls) for cls in CLASSES]


@pytest.mark.parametrize("seed", [20_261_122, 20_261_123])
def test_honest_clients_are_served_whatever_others_send(seed):
    assert asyncio.run(run_scene(seed, 160)) > 80
