"""Where the trace comes from: each source in turn, and what is said about it."""

import os
from pathlib import Path

import pytest

from eelgrid_controller.replay import trace_loading as locating
from eelgrid_controller.replay.csv_reader import TraceMalformed, TraceMissing
from eelgrid_controller.replay.openb import NODE_LIST
from eelgrid_controller.replay.trace_loading import OpenbTrace, TraceSearch, TraceSource, locate_openb, synthesize_openb

NODES = "sn,cpu_milli,memory_mib,gpu,model\n" + "".join(f"n{i},64000,262144,2,P100\n" for i in range(10))
TASKS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\n" + "".join(f"p{i},1000,16,1,500\n" for i in range(30))
FILES = {NODE_LIST: NODES, "openb_pod_list_default.csv": TASKS}


class Home:
    """A public home in memory."""

    def __init__(self, files):
        self.files = files
        self.asked = []

    def fetch(self, address, most):
        self.asked.append(address)
        name = address.rpartition("/")[2]
        if name not in self.files:
            raise OSError("HTTP Error 404: Not Found")
        return self.files[name].encode()


@pytest.fixture
def around(tmp_path):
    def make(fetch=None, **environment):
        for name in ("here", "project", "cache"):
            (tmp_path / name / "x").mkdir(parents=True, exist_ok=True)
        return TraceSearch(
            environment=environment,
            directory=tmp_path / "here" / "x",
            project=tmp_path / "project" / "x",
            cache=tmp_path / "cache",
            fetch=fetch,
        )

    return make


@pytest.fixture
def published(monkeypatch):
    """Digests as if these small files were the published ones."""
    monkeypatch.setattr(locating, "DIGESTS", {name: locating._digest(text.encode()) for name, text in FILES.items()})


def put(folder):
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def test_the_environment_comes_first(around, tmp_path, published):
    put(tmp_path / "here" / "shared" / "data" / "openb" / "csv")
    named = put(tmp_path / "elsewhere" / "openb" / "csv")
    trace = locate_openb("auto", around(EELGRID_DATA=str(tmp_path / "elsewhere")))
    assert (trace.source, trace.where, trace.notes) == (
        TraceSource.LOCAL,
        min(str(named), os.path.relpath(named), key=len),
        (),
    )
    assert (len(trace.nodes), len(trace.tasks)) == (10, 30)


@pytest.mark.parametrize("root", ["here", "project"])
def test_shared_data_beside_the_checkout(around, tmp_path, root):
    put(tmp_path / root / "shared" / "data" / "openb" / "csv")
    trace = locate_openb("auto", around())
    assert trace.source is TraceSource.LOCAL
    assert "is not byte for byte the published file" in trace.notes[0]


def test_download_then_cache(around, tmp_path, published):
    home = Home(FILES)
    trace = locate_openb("auto", around(home.fetch))
    assert trace.source is TraceSource.DOWNLOADED
    assert len(home.asked) == 2
    assert all(address.startswith("https://raw.githubusercontent.com/hkust-adsl/") for address in home.asked)
    again = locate_openb("auto", around(home.fetch))
    assert again.source is TraceSource.CACHED
    assert len(home.asked) == 2
    assert (again.nodes, again.tasks) == (trace.nodes, trace.tasks)
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_a_damaged_cache_is_fetched_again(around, tmp_path, published):
    home = Home(FILES)
    locate_openb("auto", around(home.fetch))
    (tmp_path / "cache" / "openb" / NODE_LIST).write_text("broken")
    assert locate_openb("auto", around(home.fetch)).source is TraceSource.DOWNLOADED


def test_a_download_with_another_digest_is_not_used(around, tmp_path):
    trace = locate_openb("auto", around(Home(FILES).fetch))
    assert trace.source is TraceSource.GENERATED
    assert "SHA-256" in trace.notes[-1]
    assert not (tmp_path / "cache" / "openb" / NODE_LIST).exists()


def test_without_network_the_trace_is_generated_and_says_so(around, tmp_path):
    trace = locate_openb("auto", around(Home({}).fetch, EELGRID_DATA=str(tmp_path)))
    assert trace.source is TraceSource.GENERATED
    assert "EELGRID_DATA" in trace.notes[0]
    assert "404" in trace.notes[1]
    assert trace.nodes == synthesize_openb()[0]


def test_a_cache_that_cannot_be_written(around, tmp_path, published):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "openb").write_text("a file in the way")
    trace = locate_openb("auto", around(Home(FILES).fetch))
    assert trace.source is TraceSource.GENERATED
    assert trace.notes


def test_a_folder_that_was_named_must_have_it(around, tmp_path, published):
    folder = put(tmp_path / "mine")
    assert locate_openb(str(folder), around()).source is TraceSource.LOCAL
    with pytest.raises(TraceMissing, match="holds both files"):
        locate_openb(str(tmp_path / "here"), around())
    (folder / NODE_LIST).write_text("sn\n")
    with pytest.raises(TraceMalformed, match="cpu_milli"):
        locate_openb(str(folder), around())


def test_only_default_can_be_generated(around):
    assert locate_openb("generated", around()).source is TraceSource.GENERATED
    with pytest.raises(TraceMissing, match="EELGRID_DATA"):
        locate_openb("auto", around(), tasks="gpushare40")
    with pytest.raises(TraceMissing):
        locate_openb("auto", around(Home({}).fetch), tasks="no-such-list")


def test_a_limited_trace_keeps_the_load_and_the_mix():
    nodes, tasks = synthesize_openb()
    trace = OpenbTrace(nodes=nodes, tasks=tasks, source=TraceSource.GENERATED, where="")
    small = trace.truncated(nodes=50, tasks=None)
    assert (len(small.nodes), len(small.tasks)) == (50, 337)
    assert len({node.name for node in small.nodes}) == 50
    assert trace.truncated(nodes=None, tasks=10).tasks == tasks[:10]
    assert trace.truncated(nodes=9999, tasks=None) == trace


def test_the_digests_are_of_the_files_at_hand():
    """Every list of the shared data is the published one."""
    folder = Path(os.environ.get("EELGRID_DATA", "../shared/data")) / "openb" / "csv"
    found = [path for path in folder.glob("openb_*.csv") if path.name in locating.DIGESTS]
    if not found:
        pytest.skip("no shared data; set EELGRID_DATA")
    assert [path.name for path in found if locating._digest(path.read_bytes()) != locating.DIGESTS[path.name]] == []
