"""What of an agent's stream outlives a controller: when it is asked for another opening, what is dropped, and what goes on."""

import pytest
from tests.builders.cluster import build_node

from eelgrid_controller.server.ingest.handover import StreamHandover, StreamPhase
from eelgrid_protos.codec import encode_message
from eelgrid_protos.messages import (
    Acknowledgement,
    ApplyStatus,
    Cadence,
    ConnectRequest,
    ConnectResponse,
    Hello,
    HelloReceived,
    PlanApplied,
    Resume,
    SampleBatch,
    Welcome,
)


def say(message):
    return encode_message(ConnectRequest(message=message))


def answer(message):
    return encode_message(ConnectResponse(message=message))


HELLO = say(Hello(incarnation=1, inventory=build_node("n1"), accepts_resume_request=True))
RESUME = say(Resume(incarnation=1, node_name="n1", inventory_digest="d", accepts_resume_request=True))
BATCH = say(SampleBatch(sequence=1, inventory_generation=1, time_ns=(1,)))
APPLIED = say(PlanApplied(epoch=1, status=ApplyStatus.APPLIED))
WELCOME = answer(Welcome(acknowledged_sequence=7, cadence=Cadence()))
WANTED = answer(HelloReceived(inventory_wanted=True))


def welcomed(opening=HELLO):
    stream = StreamHandover()
    assert stream.admit_message(opening)
    assert stream.hand_over() == opening
    assert stream.on_response(WELCOME).acknowledged_sequence == 7
    return stream


@pytest.mark.parametrize(
    ("opening", "is_keepable"),
    [
        (HELLO, True),
        (RESUME, True),
        (say(Hello(incarnation=1, inventory=build_node("n1"))), False),
        (say(Resume(incarnation=1, node_name="n1", inventory_digest="d")), False),
        (b"\x0a\xff", False),
        (BATCH, False),
    ],
    ids=["hello", "resume", "older hello", "older resume", "malformed", "no opening"],
)
def test_only_an_agent_that_says_so_is_asked_to_open_its_stream_again(opening, is_keepable):
    stream = StreamHandover()
    assert stream.admit_message(opening)
    # Whatever it is, the controller judges it.
    assert stream.hand_over() == opening
    assert stream.is_keepable is is_keepable


def test_what_was_said_to_a_lost_controller_is_dropped_until_the_stream_is_opened_again():
    stream = welcomed()
    assert stream.admit_message(BATCH)
    assert stream.lose_controller()
    assert not stream.admit_message(BATCH)
    assert not stream.admit_message(APPLIED)
    assert stream.admit_message(RESUME)
    assert stream.phase is StreamPhase.HELD
    # It says nothing more before Welcome; whoever does is not listened to.
    assert not stream.admit_message(BATCH)
    assert stream.hand_over() == RESUME
    assert stream.opening == b""
    assert stream.on_response(answer(HelloReceived(ahead=3))) is None
    assert stream.on_response(answer(Acknowledgement(sequence=9))) is None
    assert stream.on_response(WELCOME) is not None
    assert stream.admit_message(BATCH)


def test_a_controller_that_is_lost_twice_asks_once():
    stream = welcomed()
    assert stream.lose_controller()
    assert not stream.lose_controller()
    assert stream.admit_message(RESUME)
    # Nobody has it yet: it goes to whoever leads next.
    assert not stream.lose_controller()
    assert stream.hand_over() == RESUME
    # It was lost with the controller that had it.
    assert stream.lose_controller()


def test_an_agent_that_was_asked_for_its_inventory_is_not_asked_again():
    stream = welcomed()
    stream.lose_controller()
    stream.admit_message(RESUME)
    stream.hand_over()
    stream.on_response(WANTED)
    assert not stream.lose_controller()
    assert stream.admit_message(HELLO)
    assert stream.hand_over() == HELLO


def test_an_inventory_that_was_wanted_goes_on_to_the_controller_that_wants_it():
    stream = welcomed()
    stream.lose_controller()
    stream.admit_message(RESUME)
    stream.hand_over()
    stream.on_response(WANTED)
    assert stream.admit_message(HELLO)
    assert stream.phase is StreamPhase.HANDED
    assert stream.lose_controller()
