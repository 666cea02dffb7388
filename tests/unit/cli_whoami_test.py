"""eelctl whoami against a served fake: whose the certificate is, what it may, and for how long."""

import json

import pytest

from eelgrid_protos.messages import WhoAmIResponse

YEAR_NS = 365 * 86_400 * 10**9


@pytest.mark.parametrize(
    ("caller", "lines"),
    [
        (WhoAmIResponse(roles=("viewer",)), ["certificate  none: without TLS every caller may do everything"]),
        (
            WhoAmIResponse(subject="CN=a", roles=("viewer", "submitter"), not_after_ns=YEAR_NS),
            ["certificate  CN=a", "roles        viewer, submitter", "valid until  1971-01-01 00:00 UTC"],
        ),
        (
            WhoAmIResponse(roles=("agent",), node_names=("n1", "n2"), not_after_ns=2**63 - 1),
            ["certificate  none: a user of this machine", "roles        agent", "nodes        n1, n2"],
        ),
        (
            WhoAmIResponse(subject="CN=a", not_after_ns=YEAR_NS),
            [
                "certificate  CN=a",
                "roles        none: everything is allowed (--roles permit)",
                "valid until  1971-01-01 00:00 UTC",
            ],
        ),
        (
            WhoAmIResponse(subject="CN=a", roles_demanded=True, not_after_ns=YEAR_NS),
            ["certificate  CN=a", "roles        none: nothing is allowed", "valid until  1971-01-01 00:00 UTC"],
        ),
    ],
)
def test_it_says_what_the_controller_sees(eelctl, fake, caller, lines):
    fake.caller = caller
    assert eelctl("whoami").stdout.splitlines() == lines
    assert json.loads(eelctl("whoami", "-o", "json").stdout)["roles"] == list(caller.roles)
