"""The fixture of the end-to-end tests, and the children's last words in the report of a failure."""

import subprocess
import sys

import pytest
from tests.certificates_rig import Authority
from tests.e2e import installed
from tests.e2e.processes import KERNELS_S, Cluster


@pytest.fixture
def cluster(tmp_path):
    """An empty cluster; whatever the test starts in it ends with the test."""
    with Cluster(tmp_path) as found:
        yield found


@pytest.fixture
def parties(cluster):
    """An authority, and a way to write a party's certificate of it; the cluster asks as an administrator."""
    authority = Authority()

    def party(who, *subject, **options):
        return authority.write(cluster.folder / who, *subject, **options)

    cluster.tls = party("admin", ("O", "eelgrid:admin"), ("CN", "root"))
    return party


@pytest.fixture(scope="session")
def deployed():
    """The chart on a real cluster, once for all tests that need it; taken away at the end."""
    yield from installed.installed()


@pytest.fixture(scope="session")
def compiled_kernels():
    """The kernels of these sources are compiled, for tests that bound the time in which a program starts."""
    subprocess.run([sys.executable, "-m", "eelgrid_kernels"], check=True, capture_output=True, timeout=KERNELS_S)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Adds the logs of the processes that the failed test used."""
    report = yield
    if report.failed and call.when == "call":
        for value in getattr(item, "funcargs", {}).values():
            for child in getattr(value, "children", ()):
                report.sections.append((f"log of {child.name}", child.tail()))
    return report
