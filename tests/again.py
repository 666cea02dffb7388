"""Runs the few tests that failed once more, alone: a deadline may be missed where several processes share a busy machine.

`python -m tests.again CODE`, CODE being how pytest ended. What fails twice fails; so does a run in
which many failed, or that did not come to its end. What failed once is printed as unstable: mend it.
"""

import json
import subprocess
import sys
from pathlib import Path

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
# pytest's exit code where all were run and some failed.
SOME_FAILED = 1
# More than these are no accident of timing.
FEW = 5


def failed_last(path: Path = LAST_FAILED) -> tuple[str, ...]:
    """The tests that failed in the last run, sorted; raises OSError where no run left its word."""
    return tuple(sorted(json.loads(path.read_text())))


def worth_it(code: int, failed: tuple[str, ...]) -> bool:
    """Whether a second run could tell anything: few single tests failed in a run that came to its end."""
    return code == SOME_FAILED and 0 < len(failed) <= FEW and all("::" in name for name in failed)


def main(code: int) -> int:
    """The exit code of both runs."""
    failed = failed_last() if code == SOME_FAILED else ()
    if not worth_it(code, failed):
        return code
    print("once more, alone:", *failed, sep="\n  ", flush=True)
    again = subprocess.run([sys.executable, "-m", "pytest", "-q", *failed], check=False).returncode
    if again == 0:
        print("UNSTABLE, passed alone only:", *failed, sep="\n  ", flush=True)
        # A runner's last line is what a reader of a log looks for.
        print(f"{len(failed)} passed, 0 failed", flush=True)
    return again


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
