"""Which failures are worth a second run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.again import failed_last, worth_it

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("code", "failed", "expected"),
    [
        (1, ("a_test.py::b",), True),
        (1, tuple(f"a_test.py::b{number}" for number in range(5)), True),
        (1, tuple(f"a_test.py::b{number}" for number in range(6)), False),
        (1, ("a_test.py",), False),  # a whole file that cannot be imported
        (1, (), False),
        (2, ("a_test.py::b",), False),
        (5, ("a_test.py::b",), False),
    ],
)
def test_only_few_single_failures_of_a_whole_run_are_tried_again(code, failed, expected):
    assert worth_it(code, failed) is expected


def test_the_last_failures_are_read_in_order(tmp_path):
    path = tmp_path / "lastfailed"
    path.write_text(json.dumps({"b_test.py::x": True, "a_test.py::y": True}))
    assert failed_last(path) == ("a_test.py::y", "b_test.py::x")


def test_any_other_end_of_a_run_stays_what_it_was(tmp_path):
    ended = subprocess.run([sys.executable, "-m", "tests.again", "3"], cwd=ROOT, check=False)
    assert ended.returncode == 3


@pytest.mark.parametrize(
    ("body", "code"), [("Path('seen').exists() or Path('seen').write_text('') is None", 0), ("False", 1)]
)
def test_what_fails_twice_fails(tmp_path, body, code):
    (tmp_path / "some_test.py").write_text(f"from pathlib import Path\n\ndef test_one():\n    assert {body}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\npython_files = *_test.py\n")
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    first = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, env=environment, check=False)
    assert first.returncode == 1
    again = subprocess.run(
        [sys.executable, "-m", "tests.again", "1"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == code
    assert ("UNSTABLE" in again.stdout) is (code == 0)
