"""Command blocks of tutorials and guides are run or say why not; those of guides run against a living fleet.

Tutorials have a file of their own, so that both run side by side.
"""

import json
import shutil

import pytest
from tests.docs_rig import DOCS, EXAMPLE, GUIDES, OUTPUT, REASONS, TUTORIALS, Shell, blocks_of, name_of, runnable
from tests.e2e.processes import free_address

pytestmark = pytest.mark.usefixtures("compiled_kernels")

# Languages of blocks that are no commands.
OTHERS = {"csv", "ini", "json", "promql", "python", "text", "toml", "yaml"}
PROGRAMS = ("$ ", "eelctl ", "eelgrid-", "helm ", "kubectl ", "make ", "openssl ")
MIG = {
    "nodes": [
        {
            "name": "gpu-7",
            "cpu_milli": 96_000,
            "memory_bytes": 1,
            "gpus": [{"product": "a100-sxm4-40gb", "mig": ["3g@4", "1g@0"]}, {"product": "h100-sxm5-80gb"}],
        }
    ]
}
FLEET = {
    agent: [
        {
            "name": name,
            "cpu_milli": 192_000,
            "memory_bytes": 2**41,
            "topology": "r1",
            "gpus": [{"product": part, "count": 8}],
        }
        for name in names
    ]
    for agent, part, names in (("one", "h100-sxm5-80gb", ["gpu-1"]), ("two", "a100-sxm4-80gb", ["gpu-2", "gpu-3"]))
}


def prepare(folder):
    """What a reader of a guide has: files that guides show, and a clone of the repository."""
    folder.mkdir(exist_ok=True)
    (folder / "docs").symlink_to(DOCS)
    (folder / "mig-fleet.json").write_text(json.dumps(MIG))
    shutil.copy(DOCS / "examples" / "frontier-points.csv", folder / "points.csv")
    shutil.copy(DOCS / "examples" / "frontier-services.yaml", folder / "services.yaml")
    for page in GUIDES:
        for block in blocks_of(page):
            if block.is_file:
                (folder / block.title).write_text(block.text)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """A controller, two agents with three nodes, and work on them that guides name."""
    folder = tmp_path_factory.mktemp("fleet")
    prepare(folder)
    with Shell(folder) as shell:
        addresses = {
            "listen": shell.environment["DOCS_LISTEN"],
            "metrics": shell.environment["DOCS_METRICS"],
            "agent": free_address(),
        }
        for name, node in FLEET.items():
            (folder / f"{name}.json").write_text(json.dumps({"nodes": node}))
        begun = f"""
        eelgrid-controller --data data > controller.log 2>&1 &
        DOCS_SERVE={addresses["agent"]} STATE_DIRECTORY=$PWD/s1 eelgrid-agent --simulate one.json > one.log 2>&1 &
        STATE_DIRECTORY=$PWD/s2 eelgrid-agent --simulate two.json > two.log 2>&1 &
        until [ "$(eelctl nodes --no-headers 2>/dev/null | grep -c W)" = 3 ]; do sleep 0.5; done
        eelctl submit -f chat.yaml
        eelctl submit -f train.yaml
        """
        code, printed = shell.run(begun)
        assert code == 0, printed
        yield addresses


@pytest.mark.parametrize("page", [*TUTORIALS, *GUIDES], ids=name_of)
def test_blocks_of_a_page_are_run_or_say_why_not(page):
    for block in blocks_of(page):
        where = f"{name_of(page)}:{block.line}"
        if block.language == "bash":
            assert not block.title or block.title.startswith(REASONS), f"{where}: {block.title!r} is no reason"
        else:
            assert block.language in OTHERS, f"{where}: commands are `bash`, their output `text`"
            if block.title not in {OUTPUT, EXAMPLE}:
                commands = [line for line in block.text.splitlines() if line.lstrip().startswith(PROGRAMS)]
                assert commands == [] or "source " in block.text, f"{where}: commands in a block that is not run"


@pytest.mark.parametrize("page", [*TUTORIALS, *GUIDES], ids=name_of)
def test_commands_of_a_page_are_in_fenced_blocks(page):
    fenced = False
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        assert fenced or not line.startswith(tuple(f"    {one}" for one in PROGRAMS)), f"{name_of(page)}:{number}"


@pytest.mark.parametrize("page", runnable(GUIDES), ids=name_of)
def test_commands_of_a_guide_run_against_a_living_fleet(tmp_path, fleet, page):
    if "openssl" in page.read_text("utf-8") and shutil.which("openssl") is None:
        pytest.skip("no openssl")
    folder = tmp_path / "guide"
    prepare(folder)
    with Shell(folder, fleet=fleet) as shell:
        shell.run_page(page)
