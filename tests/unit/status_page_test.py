"""docs/project/status.md says how far each feature of docs/project/features.md is, once."""

import re
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "docs" / "project"
FEATURES = re.findall(r"^\| ([A-Z]\d+) \|", (PROJECT / "features.md").read_text("utf-8"), re.MULTILINE)
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in (PROJECT / "status.md").read_text("utf-8").splitlines()
    if re.match(r"\| [A-Z]\d+ \|", line)
]


def test_each_feature_has_one_id():
    assert len(FEATURES) == len(set(FEATURES)) > 50


def test_each_feature_has_one_row_in_the_status():
    assert sorted(feature for feature, *_ in ROWS) == sorted(FEATURES)


def test_states_are_the_three_and_what_is_there_names_its_command():
    for feature, state, _, command in ROWS:
        assert state in {"proven", "partly", "open"}, feature
        assert state == "open" or "`" in command, feature
