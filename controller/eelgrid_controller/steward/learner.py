"""Learning in a process of its own: a store in, what was learned of one of its families out.

Owns that process, on both sides: its bounds and its pipe. Must not know what is learned, or when it is worth it.

Theory. Learning takes seconds to minutes of one core and mostly holds Python's lock, so a
thread would slow every answer of the daemon. The child reads one line of JSON, lowers its
priority, works on one core, and ends. It may use MEMORY_BYTES and CHILD_CPU_S; the kernel ends it
beyond these, and the parent after WALL_S. Nothing is lost with it: the next try begins from the points.
"""

import json
import os
import resource
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from eelgrid_controller.errors import ControllerError

if TYPE_CHECKING:
    from eelgrid_controller.profiles.family import Learned
    from eelgrid_controller.profiles.store import Profiles

__all__ = ["CHILD_CPU_S", "MEMORY_BYTES", "WALL_S", "ChildLearner", "LearningFailed"]

CHILD_CPU_S = 600
WALL_S = 1800.0
MEMORY_BYTES = 4 << 30  # of addresses; 0.3 GB of them are used
_NICE = 10
_SAID_MOST = 500  # characters of what a child says when it fails
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class LearningFailed(ControllerError):
    """The child ended without an answer."""


class ChildLearner:
    """Learns in a child, one at a time; `close` may come from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def __call__(self, profiles: "Profiles", family: str) -> "Learned":
        """What a family teaches; raises LearningFailed. Waits for the child, WALL_S at most."""
        from eelgrid_controller.profiles.family import Learned
        from eelgrid_controller.profiles.record import decode, encode

        question = json.dumps({"family": family, "profiles": encode(profiles)}).encode()
        with self._lock:
            if self._is_closed:
                raise LearningFailed("the daemon stops", "start it again")
            self._child = child = subprocess.Popen(  # our own module
                [sys.executable, "-m", "eelgrid_controller.steward.learner"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **_ONE_THREAD},
            )  # fmt: skip
        try:
            answer, said = child.communicate(question, timeout=WALL_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            raise LearningFailed(f"learning took over {WALL_S:g} s", "give the machine more room") from None
        finally:
            with self._lock:
                self._child = None
        if child.returncode != 0:
            last = said.decode(errors="replace").strip()[-_SAID_MOST:]
            raise LearningFailed(f"learning ended with {child.returncode}: {last}", "see its last words")
        found = decode(json.loads(answer))
        if not isinstance(found, Learned):
            raise LearningFailed("the learner answered something else", "install one release of eelgrid")
        return found

    def close(self) -> None:
        """Ends a child that runs; none is begun after this."""
        with self._lock:
            self._is_closed = True
            if self._child is not None:
                self._child.kill()


def main() -> int:
    """The child: one question from standard input, one answer to standard output."""
    from eelgrid_controller.profiles.family import learn_family
    from eelgrid_controller.profiles.record import decode, encode
    from eelgrid_controller.profiles.store import Profiles
    from eelgrid_protos.catalogue import load

    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CPU, (CHILD_CPU_S, CHILD_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    question = json.loads(sys.stdin.buffer.read())
    profiles = decode(question["profiles"])
    assert isinstance(profiles, Profiles), "the parent sends a store"
    try:
        learned = learn_family(profiles, question["family"], load())
    except ControllerError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(encode(learned)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
