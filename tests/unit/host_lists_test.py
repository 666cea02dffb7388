"""Host lists as Slurm and Flux write them: expanded in their order, or refused."""

import pytest

from eelgrid_controller.engines.element_lists import UnreadableAnswer
from eelgrid_controller.engines.host_lists import expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ("n1",)),
        ("n[0-2,7],m1", ("n0", "n1", "n2", "n7", "m1")),
        ("gpu[08-11]", ("gpu08", "gpu09", "gpu10", "gpu11")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("n[0-8:4]", ("n0", "n4", "n8")),
        ("", ()),
    ],
)
def test_host_lists_are_expanded_in_their_order(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "n[",
        "n]",
        "n[3-1]",
        "n[a-b]",
        "n[0-999999999]",
        "n1,,;",
        "n[[1]]",
        "n[1-2:0]",
        "n[0-999][0-99]",
        "n[0-65535,0-65535]",
    ],
)
def test_a_host_list_that_is_none_is_refused(text):
    with pytest.raises(UnreadableAnswer):
        expand_hosts(text)
