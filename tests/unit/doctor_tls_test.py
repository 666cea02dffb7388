"""Every finding of eelctl doctor about certificates, on certificates that are made for it."""

import datetime as dt

import pytest
import trustme

from eelgrid_controller.cli import doctor as checks
from eelgrid_controller.cli.doctor import TlsFilesState, read_tls_state
from eelgrid_controller.cli.doctor_machine import FindingStatus
from eelgrid_protos.certificate import Certificate, read_certificate
from eelgrid_protos.messages import WhoAmIResponse

OK, WARN, FAIL, SKIPPED = FindingStatus.OK, FindingStatus.WARN, FindingStatus.FAIL, FindingStatus.SKIPPED
DAY_S = 86_400.0
ENDS = dt.datetime(2030, 5, 6, 7, 8, 9, tzinfo=dt.UTC)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """An authority and another; a certificate, one that is over, and their keys."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    trustme.CA().cert_pem.write_to_path(folder / "other-ca.pem")
    for name, ends in (("ours", ENDS), ("over", dt.datetime(2021, 1, 1, tzinfo=dt.UTC))):
        made = authority.issue_cert(
            "gpu-1.example", "127.0.0.1", "::1", not_after=ends, not_before=dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
        )
        made.private_key_pem.write_to_path(folder / f"{name}.key")
        (folder / f"{name}.key").chmod(0o600)
        (folder / f"{name}.pem").write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    return folder


def test_a_certificate_is_read(files):
    found = read_certificate((files / "ours.pem").read_text())
    assert found.ends_s == ENDS.timestamp()
    assert found.begins_s == dt.datetime(2020, 1, 1, tzinfo=dt.UTC).timestamp()
    assert set(found.names) == {"gpu-1.example", "127.0.0.1", "::1"}
    assert read_certificate((files / "ca.pem").read_text()).names == ()


@pytest.mark.parametrize(
    ("names", "host", "is_covered"),
    [
        (("a.example",), "A.example", True),
        (("*.example",), "a.example", True),
        (("*.example",), "a.b.example", False),
        (("10.0.0.1",), "10.0.0.1", True),
        (("10.0.0.1",), "10.0.0.2", False),
        ((), "a", False),
    ],
)
def test_names(names, host, is_covered):
    assert checks.covers_host(names, host) is is_covered


@pytest.mark.parametrize(
    ("now_s", "host", "status", "said"),
    [
        (50 * DAY_S, "", OK, "expires in 50 days"),
        (80 * DAY_S, "", WARN, "expires in 20 days"),
        (103 * DAY_S, "", FAIL, "expired 3 days ago"),
        (-2 * DAY_S, "", FAIL, "is not valid for another 2 days"),
        (50 * DAY_S, "a", OK, "expires in 50 days"),
        (50 * DAY_S, "b", FAIL, "is not valid for b, only for a"),
    ],
)
def test_dates_and_names(now_s, host, status, said):
    found = checks.check_certificate(
        "TLS", Certificate(0.0, 100 * DAY_S, alternatives=(("DNS", "a"),)), now_s=now_s, host=host
    )
    assert found.status is status
    assert said in found.what


def findings(files, certificate="ours.pem", key="ours.key", authority="ca.pem"):
    state = read_tls_state(files / certificate, files / key, files / authority)
    now_s = ENDS.timestamp() - 100 * DAY_S
    return {one.check: one for one in checks.check_tls_files(state, now_s=now_s, is_loopback=False, insecure=False)}


def statuses(files, *names):
    return {check: one.status for check, one in findings(files, *names).items()}


def test_files_that_are_well(files):
    assert statuses(files) == {"TLS certificate": OK, "TLS authority": OK, "TLS key": OK}


def test_each_fault_of_the_files_is_found(files):
    assert statuses(files, "over.pem", "over.key") == {"TLS certificate": FAIL, "TLS authority": OK, "TLS key": OK}
    assert statuses(files, "ours.pem", "over.key")["TLS key"] is FAIL
    assert statuses(files, "ours.pem", "ours.key", "other-ca.pem")["TLS chain"] is FAIL
    missing = findings(files, "none.pem")["TLS files"]
    assert (missing.status, "none.pem: No such file" in missing.what) == (FAIL, True)
    assert "not a certificate" in findings(files, "ours.key")["TLS files"].what
    (files / "open.key").write_bytes((files / "ours.key").read_bytes())
    (files / "open.key").chmod(0o644)
    assert findings(files, "ours.pem", "open.key")["TLS key"].what == "can be read by everyone"


@pytest.mark.parametrize(
    ("is_loopback", "insecure", "status"), [(True, True, SKIPPED), (False, False, SKIPPED), (False, True, WARN)]
)
def test_no_files(is_loopback, insecure, status):
    (found,) = checks.check_tls_files(None, now_s=0.0, is_loopback=is_loopback, insecure=insecure)
    assert found.status is status


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (WhoAmIResponse(roles=("viewer",)), SKIPPED, "without TLS"),
        (WhoAmIResponse(subject="CN=a", roles=("viewer",), not_after_ns=1), OK, "CN=a has viewer"),
        (WhoAmIResponse(subject="CN=a", not_after_ns=1), WARN, "may do everything, like every certificate"),
        (WhoAmIResponse(subject="CN=a", not_after_ns=1, roles_demanded=True), FAIL, "the controller requires one"),
    ],
)
def test_the_role_of_our_certificate(answer, status, said):
    found = checks.check_role(answer)
    assert (found.status, said in found.what) == (status, True)
    assert status in {OK, SKIPPED} or "eelgrid:ROLE" in found.remedy


def test_unreadable_files_are_reported_one_by_one():
    found = checks.check_tls_files(
        TlsFilesState(unreadable=("a: b", "c: d")), now_s=0.0, is_loopback=True, insecure=False
    )
    assert [one.what for one in found] == ["a: b", "c: d"]
