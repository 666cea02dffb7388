"""Tutorials, from their first command to their last, print what they show."""

import shutil

import pytest
from tests.docs_rig import TUTORIALS, Shell, name_of, runnable


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("page", runnable(TUTORIALS), ids=name_of)
def test_commands_of_a_tutorial_do_what_it_shows(tmp_path, page):
    with Shell(tmp_path) as shell:
        shell.run_page(page)
