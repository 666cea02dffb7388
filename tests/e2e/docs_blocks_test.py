"""Every command block of the tutorials and how-to guides does what the page says, against programs that run."""

import shutil

import pytest
from tests.docs_rig import DOCS, OUTPUT, REASONS, Shell, blocks_of

TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
GUIDES = sorted((DOCS / "how-to").rglob("*.md"))
# Languages of blocks that are no commands.
OTHERS = {"csv", "ini", "json", "promql", "python", "text", "yaml"}
PROGRAMS = ("$ ", "eelctl ", "eelgrid-", "helm ", "kubectl ", "make ", "openssl ")


def name_of(page):
    return str(page.relative_to(DOCS))


@pytest.mark.parametrize("page", [*TUTORIALS, *GUIDES], ids=name_of)
def test_blocks_of_a_page_are_run_or_say_why_not(page):
    for block in blocks_of(page):
        where = f"{name_of(page)}:{block.line}"
        if block.language == "bash":
            assert not block.title or block.title.startswith(REASONS), f"{where}: {block.title!r} is no reason"
        else:
            assert block.language in OTHERS, f"{where}: commands are `bash`, their output `text`"
            if block.title != OUTPUT:
                commands = [line for line in block.text.splitlines() if line.lstrip().startswith(PROGRAMS)]
                assert commands == [] or "source " in block.text, f"{where}: commands in a block that is not run"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize(
    "page", [page for page in TUTORIALS if any(block.runs for block in blocks_of(page))], ids=name_of
)
def test_commands_of_a_tutorial_do_what_it_shows(tmp_path, page):
    with Shell(tmp_path) as shell:
        shell.run_page(page)
