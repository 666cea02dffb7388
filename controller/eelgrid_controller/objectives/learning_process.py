"""Learns a profile family in a child process with bounded CPU time, memory and wall time.

The child reads one line of JSON from standard input and writes one to standard output. It alone imports scikit-learn.
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
    from eelgrid_controller.profiles.store import ProfileStore
    from eelgrid_controller.profiles.surfaces import LearnedFamily


CHILD_CPU_S = 600
WALL_S = 1800.0
MEMORY_BYTES = 4 << 30  # of addresses; 0.3 GB of them are used
_NICE = 10
_MESSAGE_LENGTH_MOST = 500  # characters of what a child says when it fails
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class LearningFailed(ControllerError):
    """The child ended without an answer."""


class LearningProcess:
    """Learns in a child, one at a time; `close` may come from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def __call__(self, profiles: "ProfileStore", family: str) -> "LearnedFamily":
        """What a family teaches; raises LearningFailed. Waits for the child, WALL_S at most."""
        from eelgrid_controller.profiles.profile_service import decode_record, encode_record
        from eelgrid_controller.profiles.surfaces import LearnedFamily

        question = json.dumps({"family": family, "profiles": encode_record(profiles)}).encode()
        with self._lock:
            if self._is_closed:
                raise LearningFailed("the daemon stops", "start it again")
            self._child = child = subprocess.Popen(  # our own module
                [sys.executable, "-m", "eelgrid_controller.objectives.learning_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **_ONE_THREAD},
            )
        try:
            answer, said = child.communicate(question, timeout=WALL_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            raise LearningFailed(f"learning took over {WALL_S:g} s", "give the controller more CPU time") from None
        finally:
            with self._lock:
                self._child = None
        if child.returncode != 0:
            last = said.decode(errors="replace").strip()[-_MESSAGE_LENGTH_MOST:]
            raise LearningFailed(f"learning ended with {child.returncode}: {last}", "see its last output")
        found = decode_record(json.loads(answer))
        if not isinstance(found, LearnedFamily):
            raise LearningFailed("the learning process gave an unexpected answer", "install one release of eelgrid")
        return found

    def close(self) -> None:
        """Ends a child that runs; none is begun after this."""
        with self._lock:
            self._is_closed = True
            if self._child is not None:
                self._child.kill()


def run_child() -> int:
    """The child: one question from standard input, one answer to standard output."""
    from eelgrid_controller.profiles.learning import learn_family
    from eelgrid_controller.profiles.profile_service import decode_record, encode_record
    from eelgrid_controller.profiles.store import ProfileStore
    from eelgrid_protos.catalogue.loader import load_catalogue

    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CPU, (CHILD_CPU_S, CHILD_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    question = json.loads(sys.stdin.buffer.read())
    profiles = decode_record(question["profiles"])
    assert isinstance(profiles, ProfileStore), "the parent sends a store"
    try:
        learned = learn_family(profiles, question["family"], load_catalogue())
    except ControllerError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(encode_record(learned)))
    return 0


if __name__ == "__main__":
    sys.exit(run_child())
