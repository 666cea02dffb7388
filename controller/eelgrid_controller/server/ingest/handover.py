"""What of an agent's stream at an ingest process outlives the controller that leads: a state machine without I/O.

Theory. An agent opens a stream by Hello or Resume, a controller answers with Welcome, and whatever is said between those
two concerns the opening alone. When the controller is lost, the agent is asked to open the stream again (ResumeRequest),
and what it said to the former controller and still arrives is dropped until it does: a batch that no controller has
acknowledged, an event, or a window of energy is sent again after the next Welcome, as on a new connection. So a
controller gets nothing that was said to another one, and nothing is kept here but the opening, while there is no
controller. Each request is answered by one opening, and there is one request at a time: an agent that the former
controller has asked for Hello already is not asked again.

A stream of an agent that does not say that it answers such a request ends with its controller. Must not know links.
"""

from enum import Enum

from eelgrid_protos import codec
from eelgrid_protos.errors import ContractError
from eelgrid_protos.messages import ConnectRequest, ConnectResponse, Hello, HelloReceived, Resume, Welcome
from eelgrid_protos.rpc import CONNECT_BYTES_MOST

# Tags of fields in ConnectRequest and ConnectResponse: the field's number, and that its length follows.
_HELLO, _RESUME = b"\x0a", b"\x42"
_WELCOME, _HELLO_RECEIVED = b"\x0a", b"\x32"


class StreamPhase(Enum):
    """How far an agent and a controller are."""

    NEW = "nothing was said"
    ASKED = "the agent is to open the stream again, and what it says until then is dropped"
    HELD = "the opening waits for a controller"
    HANDED = "a controller has the opening, and has not answered"
    WELCOMED = "a controller has welcomed the agent"


class StreamHandover:
    """One agent's stream over the controllers that lead one after another."""

    def __init__(self) -> None:
        self.phase = StreamPhase.NEW
        # Whether the agent has said that it answers ResumeRequest.
        self.is_keepable = False
        # While it is held.
        self.opening = b""
        self._is_hello_due = False

    def admit_message(self, data: bytes) -> bool:
        """Takes note of what the agent says; False for what is to be dropped."""
        match self.phase:
            case StreamPhase.NEW:
                self.is_keepable = _accepts_request(data)
            case StreamPhase.ASKED if data[:1] not in (_HELLO, _RESUME):
                return False
            case StreamPhase.ASKED:
                pass
            case StreamPhase.HELD:
                # Nothing is due before Welcome.
                return False
            case _:
                self._is_hello_due = self._is_hello_due and data[:1] != _HELLO
                return True
        self.phase, self.opening = StreamPhase.HELD, data
        return True

    def hand_over(self) -> bytes:
        """Returns the opening, for a controller that leads; it is not kept."""
        assert self.phase is StreamPhase.HELD
        opening, self.opening = self.opening, b""
        self.phase = StreamPhase.HANDED
        return opening

    def on_response(self, data: bytes) -> Welcome | None:
        """Takes note of what the controller says; returns its Welcome."""
        if self.phase is not StreamPhase.HANDED or data[:1] not in (_WELCOME, _HELLO_RECEIVED):
            return None
        message = codec.decode_message(ConnectResponse, data).message
        if isinstance(message, Welcome):
            self.phase = StreamPhase.WELCOMED
            return message
        self._is_hello_due |= isinstance(message, HelloReceived) and message.inventory_wanted
        return None

    def lose_controller(self) -> bool:
        """The controller that had the stream is lost; returns whether the agent is to be asked."""
        if self.phase not in (StreamPhase.HANDED, StreamPhase.WELCOMED):
            return False
        is_asked = self._is_hello_due
        self.phase, self._is_hello_due = StreamPhase.ASKED, False
        return not is_asked


def _accepts_request(data: bytes) -> bool:
    """Whether this opening is of an agent that answers ResumeRequest; a bad one is left to the controller."""
    if data[:1] not in (_HELLO, _RESUME):
        return False
    try:
        message = codec.decode_message(ConnectRequest, data, bytes_most=CONNECT_BYTES_MOST, is_counted=True).message
    except ContractError:
        return False
    return isinstance(message, Hello | Resume) and message.accepts_resume_request
