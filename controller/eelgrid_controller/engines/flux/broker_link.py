"""Broker link: what every module of ours in a Flux broker has: its arguments, its connection, and the journal of jobs.

Owns the version of flux-core that is accepted, and what is passed on of jobspecs and users. Must not know whether its module
schedules. To be inherited beside Flux's own base class, whose handle and log it uses.

Theory. The journal begins with the past of each job that Flux still knows, and is asked for anew with each connection: a
controller that has forgotten everything hears it again. It ends its past with a message of job -1. Only those events are asked
for that the controller makes something of: each is a message to this module, and another to the controller.
"""

import errno
import json
import pwd
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from flux.constants import FLUX_POLLIN, FLUX_RPC_NORESPONSE, FLUX_RPC_STREAMING

from eelgrid_controller.engines.flux.controller_stream import ControllerStream, StreamAnswer
from eelgrid_controller.engines.flux.resource_sets import parse_idset
from eelgrid_protos.transport import TlsFiles

VERSION_LEAST, VERSION_BEYOND = (0, 84), (1, 0)
_PATIENCE_S = 30.0
_USERS_KEPT = 10_000
# Events from which it follows who held what, and how a job ended.
_EVENTS = ("submit", "alloc", "start", "finish", "exception", "release", "free")
# What the text of a message has that tells of any event, and of a submission, to which the user's name is added.
_NAME, _SUBMIT = '"name"', '"submit"'
# What a scheduler needs to know of a jobspec; the rest, such as the command, stays in Flux.
_ATTRIBUTES = ("duration", "queue", "constraints", "job")


class ModuleArguments(NamedTuple):
    """The module's own arguments; the others are Flux's."""

    controller: str
    patience_s: float
    tls: TlsFiles | None
    insecure: bool
    rest: tuple[str, ...]


def read_arguments(args: tuple[str, ...]) -> ModuleArguments:
    """Reads the arguments of `flux module load`; raises ValueError with the remedy."""
    found, rest = {}, []
    for arg in args:
        name, equals, value = arg.partition("=")
        if name in ("controller", "patience", "tls-certificate", "tls-key", "tls-authority") and equals:
            found[name] = value
        elif arg == "insecure":
            found[name] = "yes"
        else:
            rest.append(arg)
    try:
        patience_s = float(found.get("patience", _PATIENCE_S))
    except ValueError:
        patience_s = -1.0
    if not 1.0 <= patience_s <= 86_400.0:
        raise ValueError(f"patience={found['patience']}: give seconds between 1 and 86400")
    files = [found.get(f"tls-{name}") for name in ("certificate", "key", "authority")]
    if any(files) and not all(files):
        raise ValueError("tls-certificate, tls-key and tls-authority: give all three, or none")
    tls = TlsFiles(*(Path(one) for one in files if one)) if all(files) else None
    controller = found.get("controller", "127.0.0.1:7443")
    return ModuleArguments(controller, patience_s, tls, "insecure" in found, tuple(rest))


def check_version(text: str) -> None:
    """Checks the version of flux-core; raises ValueError with the remedy."""
    matched = re.match(r"(\d+)\.(\d+)", text)
    version = (int(matched[1]), int(matched[2])) if matched is not None else (0, 0)
    if not VERSION_LEAST <= version < VERSION_BEYOND:
        raise ValueError(
            f"flux-core is {text}; this module is made for 0.84 and later 0.x: use another flux-core or another Eelgrid, "
            "or load sched-simple"
        )


@lru_cache(maxsize=_USERS_KEPT)
def name_user(userid: int) -> str:
    """Returns the name of a user, or the number where there is none."""
    try:
        return pwd.getpwuid(userid).pw_name
    except (KeyError, OverflowError):
        return str(userid)


def reduce_jobspec(jobspec: dict[str, Any]) -> dict[str, Any]:
    """Returns what is needed of a jobspec to place it."""
    system = (jobspec.get("attributes") or {}).get("system") or {}
    job = dict(system.get("job") or {})
    if not job.get("name"):
        command = ((jobspec.get("tasks") or [{}])[0].get("command") or [""])[0]
        job["name"] = str(command).rpartition("/")[2]
    kept = {name: system[name] for name in _ATTRIBUTES if name in system} | {"job": {"name": job["name"]}}
    return {"version": 1, "resources": jobspec.get("resources"), "attributes": {"system": kept}}


def read_ranks(found: dict[str, Any]) -> frozenset[int]:
    """Reads the ranks of an R, which need not name hosts."""
    return frozenset().union(*(parse_idset(one["rank"]) for one in found["execution"]["R_lite"]))


class BrokerLink:
    """A module's connection to the controller; `handle` and `log` are those of Flux's base class."""

    handle: Any
    log: Any

    def __init__(self, h: Any, *args: str) -> None:
        """Raises ValueError for arguments or a version that cannot be used; Flux shows it to who loads the module."""
        self.arguments = read_arguments(args)
        check_version(h.attr_get("version"))
        super().__init__(h, *self.arguments.rest)  # type: ignore[call-arg]
        self.is_connected = False
        self._journal: Any = None
        self._stream = ControllerStream(
            self.arguments.controller, tls=self.arguments.tls, insecure=self.arguments.insecure
        )
        self._answers_watcher = h.fd_watcher_create(self._stream.fileno, self._on_answers, FLUX_POLLIN)

    def run(self) -> None:
        """Connects, and runs until the module is removed."""
        self._answers_watcher.start()
        self._stream.start()
        try:
            super().run()  # type: ignore[misc]
        finally:
            self._stream.close()

    def send(self, topic: str, payload: dict[str, Any]) -> bool:
        """Sends a message; returns False if there is no connection."""
        return self._stream.send(topic, payload)

    def say_all(self) -> None:
        """Says all that stands; called after each connection."""
        raise NotImplementedError

    def on_answers(self, answers: list[StreamAnswer]) -> None:
        """Follows answers of the controller, in their order."""

    def on_lost(self) -> None:
        """The controller is away."""

    def on_past_told(self) -> None:
        """The journal has told its past."""

    def _on_answers(self, *_: Any) -> None:
        answers: list[StreamAnswer] = []
        for answer in self._stream.take_answers():
            if answer.topic in ("welcome", "lost") and answers:
                self.on_answers(answers)
                answers = []
            if answer.topic == "welcome":
                self.is_connected = True
                self.log.info(f"connected to Eelgrid's controller at {self.arguments.controller}")
                self.say_all()
            elif answer.topic == "lost":
                if self.is_connected:
                    self.is_connected = False
                    self._end_journal()
                    self.log.warning(f"Eelgrid's controller is away: {answer.payload.get('reason')}")
                    self.on_lost()
            else:
                answers.append(answer)
        if answers:
            self.on_answers(answers)

    def follow_journal(self) -> None:
        """Passes the journal on, from its beginning; does nothing while the one of the last connection is ending."""
        if self._journal is not None:
            return
        asked = {"full": True, "allow": dict.fromkeys(_EVENTS, 1)}
        self._journal = self.handle.rpc("job-manager.events-journal", asked, flags=FLUX_RPC_STREAMING)
        self._journal.then(self._on_journal)

    def _end_journal(self) -> None:
        """Ends the journal, which begins anew with the next connection: the controller may have forgotten what it said."""
        if self._journal is not None:
            tag = {"matchtag": self._journal.pimpl.get_matchtag()}
            self.handle.rpc("job-manager.events-journal-cancel", tag, flags=FLUX_RPC_NORESPONSE)

    def _on_journal(self, future: Any) -> None:
        try:
            text = future.get_str()
        except OSError as error:
            if error.errno != errno.ENODATA:
                self.log.warning(f"the journal of jobs has ended: {error}")
            self._journal = None
            if self.is_connected:
                self.follow_journal()
            return
        future.reset()
        if _NAME in text and _SUBMIT not in text:
            # Most are passed on as they are: the controller reads them.
            self._stream.send_text("event", text)
            return
        found = json.loads(text)
        if found.get("id") == -1:
            self.on_past_told()
            return
        events = found.get("events") or []
        if events:
            users = [(one.get("context") or {}).get("userid") for one in events if one.get("name") == "submit"]
            named = {"user": name_user(users[0])} if users and isinstance(users[0], int) else {}
            self.send("event", {"id": found.get("id"), "events": events, "R": found.get("R")} | named)
