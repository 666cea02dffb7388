"""Tutorials, from their first command to their last, print what they show."""

import shutil
import tempfile
from contextlib import contextmanager, nullcontext

import pytest
from tests.docs_rig import TUTORIALS, Shell, name_of, runnable

pytestmark = pytest.mark.usefixtures("compiled_kernels")


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("page", runnable(TUTORIALS), ids=name_of)
def test_commands_of_a_tutorial_do_what_it_shows(tmp_path, page):
    with Shell(tmp_path) as shell, box_of_its_own(shell) if page.name == "one-box.md" else nullcontext():
        shell.run_page(page)


@contextmanager
def box_of_its_own(shell):
    """No other controller is named; the path of a socket is short, and what the page started ends with it."""
    with tempfile.TemporaryDirectory(prefix="box") as state:
        del shell.environment["EELGRID_CONTROLLER"]
        shell.environment |= {"XDG_STATE_HOME": state, "EELGRID_ALLOW_ROOT": "1"}
        try:
            yield
        finally:
            shell.run("eelctl box stop --cancel")
