"""The device port both ways, over the same devices, on several driver branches."""

from collections.abc import Iterator

import pytest
from tests.device_rig import BRANCHES, WAYS, Rig, open_rig


@pytest.fixture(params=[f"{way} {branch}" for branch in BRANCHES for way in WAYS])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    way, branch = request.param.split()
    with open_rig(way, driver_version=branch) as rig:
        yield rig


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param
