"""Columns on a terminal: texts of any script stand below one another."""

import pytest

from eelgrid_controller.cli.output import TableColumn, display_width, text_table


@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("", 0),
        ("abc", 3),
        ("Zürich", 6),
        ("Zu\u0308rich", 6),
        ("東京", 4),
        ("서울", 4),
        ("ＡＢ", 4),
        ("обучение", 8),
        ("a\u200bb", 2),
    ],
)
def test_the_columns_that_a_text_takes(text, width):
    assert display_width(text) == width


def test_wide_characters_push_no_column_aside():
    columns = [
        TableColumn[tuple[str, str]]("NAME", lambda row: row[0]),
        TableColumn[tuple[str, str]]("NUMBER", lambda row: row[1], right=True),
    ]
    lines = text_table(columns, [("東京大学", "1"), ("plain", "22"), ("Zu\u0308rich", "333")])
    assert {display_width(line) for line in lines} == {8 + 2 + 6}
    assert lines[1] == "東京大学       1"
