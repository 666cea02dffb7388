"""The web configuration file: what it takes, what it refuses by name, and real HTTPS, passwords and rotation."""

import base64
import http.client
import logging
import shutil
import socket
import ssl
from pathlib import Path

import bcrypt
import pytest
import trustme

from eelgrid_agent.metrics.access import BasicAuthenticator, MetricsError, PasswordVerdict, WebConfigUnusable
from eelgrid_agent.metrics.server import MetricsEndpoint, ScrapeResponse
from eelgrid_agent.metrics.web_config import WebConfigError, load_web_config

# The cheapest that bcrypt makes: these prove nothing about strength.
HASH = "$2y$04$sNFiW24NgPIRphlmARhtC.bZdRxzGK5IVj05wXQbf1vwmxIQhL5q6"  # right
OTHER = "$2b$04$nQN.zmwPiTZWKbo2T0vHRe5vsGpRaHyNCV6YNdzIfrslaVBOVfce2"  # other
TLS = "tls_server_config: {cert_file: tls.crt, key_file: tls.key%s}\n"


class StillPage:
    """A page that says what it was asked."""

    def answer(self, path, *, accept="", accept_encoding=""):
        return ScrapeResponse(200, "text/plain", f"{path}\n".encode(), "")


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def folder(tmp_path, authority):
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    certificate.private_key_pem.write_to_path(tmp_path / "tls.key")
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    return tmp_path


def write(folder, text):
    path = folder / "web.yml"
    path.write_text(text)
    return path


class Served:
    """A server on a free port; its own clock for re-reading is not waited for."""

    def __init__(self, path, *, address="127.0.0.1:0", insecure=False, log=None):
        self.server = MetricsEndpoint(
            address, StillPage(), tls=None, insecure=insecure, web_config=path, log=log or logging.getLogger("test")
        )

    def __enter__(self):
        self.server.start()
        return self

    def __exit__(self, *_):
        self.server.close()

    def get(self, path="/metrics", *, trust=None, client=None, user=None, authorization=None, newest=None):
        """Status, headers and body."""
        if trust is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=5)
        else:
            context = ssl.create_default_context()
            trust.configure_trust(context)
            if client is not None:
                client.configure_cert(context)
            if newest is not None:
                context.maximum_version = newest
            connection = http.client.HTTPSConnection("localhost", self.server.port, timeout=5, context=context)
        if user is not None:
            authorization = "Basic " + base64.b64encode(":".join(user).encode()).decode()
        try:
            connection.request("GET", path, headers={"Authorization": authorization} if authorization else {})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def look_again(self):
        """As though the second between two looks at the files were over."""
        self.server._server.door._looked_s -= 10.0


# The file


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[]", "the file is no mapping"),
        ("a: [", "is not YAML"),
        ("a: 1", "a is no field"),
        ("rate_limit: {burst: 3}", "rate_limit is not kept"),
        ("tls_server_config: {}", "tls_server_config.cert_file is missing"),
        ("tls_server_config: {cert_file: a}", "tls_server_config.key_file is missing"),
        ("tls_server_config: {cert_file: a, key: secret}", "tls_server_config.key is given in the file itself"),
        (TLS % ", cert_fiel: x", "tls_server_config.cert_fiel is no field"),
        (TLS % ", min_version: TLS14", "tls_server_config.min_version is 'TLS14'"),
        (TLS % ", min_version: 1.2", "tls_server_config.min_version is float"),
        (TLS % ", min_version: TLS13, max_version: TLS12", "tls_server_config.min_version TLS13 is newer"),
        (TLS % ", client_auth_type: RequireAnyClientCert", "tls_server_config.client_auth_type RequireAny"),
        (TLS % ", client_auth_type: Maybe", "tls_server_config.client_auth_type is 'Maybe'"),
        (TLS % ", client_auth_type: RequireAndVerifyClientCert", "tls_server_config.client_ca_file is missing"),
        (TLS % ", client_ca_file: ca.crt", "tls_server_config.client_ca_file is given while"),
        (TLS % ", client_allowed_sans: [a]", "tls_server_config.client_allowed_sans needs"),
        (TLS % ", client_allowed_sans: a", "tls_server_config.client_allowed_sans is no list"),
        (TLS % ", cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]", "tls_server_config.cipher_suites 'TLS_RSA"),
        (TLS % ", curve_preferences: [CurveP256, X25519]", "tls_server_config.curve_preferences lists several"),
        (TLS % ", curve_preferences: [Curve25]", "tls_server_config.curve_preferences 'Curve25'"),
        (TLS % ", prefer_server_cipher_suites: 1", "tls_server_config.prefer_server_cipher_suites is neither"),
        ("http_server_config: {http3: true}", "http_server_config.http3 is no field"),
        ("http_server_config: {headers: {Server: x}}", "http_server_config.headers.Server is no field"),
        ("http_server_config: {headers: {X-Frame-Options: allow}}", "http_server_config.headers.X-Frame-Options is"),
        (
            'http_server_config: {headers: {X-XSS-Protection: "1\\r\\nSet-Cookie: a"}}',
            "http_server_config.headers.X-XSS-Protection holds",
        ),
        ("basic_auth_users: {a: secret}", "basic_auth_users.a is no bcrypt hash"),
        ("basic_auth_users: {a: 5}", "basic_auth_users.a is no bcrypt hash"),
        (f"basic_auth_users: {{'a:b': '{HASH}'}}", "basic_auth_users.a:b is no user name"),
        (f"basic_auth_users: {{a: '{HASH.replace('$04$', '$31$')}'}}", "basic_auth_users.a has cost 31"),
        ("basic_auth_users: [a]", "basic_auth_users is no mapping"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_the_field(tmp_path, text, field):
    path = write(tmp_path, text)
    with pytest.raises(WebConfigError) as refusal:
        load_web_config(path)
    assert str(refusal.value).startswith(f"{path}: {field}")
    assert "secret" not in str(refusal.value)


def test_a_file_that_is_not_there_or_too_large(tmp_path):
    with pytest.raises(WebConfigError, match="cannot be read"):
        load_web_config(tmp_path / "none.yml")
    with pytest.raises(WebConfigError, match="larger than"):
        load_web_config(write(tmp_path, "#" * (1024 * 1024 + 1)))
    assert load_web_config(write(tmp_path, "")).users == {}


def test_a_whole_file_as_the_toolkit_shows_it(tmp_path):
    config = load_web_config(
        write(
            tmp_path,
            f"""
tls_server_config:
  cert_file: server.crt
  key_file: /etc/keys/server.key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: ca.crt
  client_allowed_sans: [prometheus.example]
  min_version: TLS12
  max_version: TLS13
  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, TLS_AES_128_GCM_SHA256]
  prefer_server_cipher_suites: false
  curve_preferences: [CurveP256]
http_server_config:
  http2: true
  headers: {{Strict-Transport-Security: max-age=31536000, X-Frame-Options: deny}}
basic_auth_users:
  alice: {HASH}
""",
        )
    )
    tls = config.tls
    assert (tls.certificate, tls.key) == (tmp_path / "server.crt", Path("/etc/keys/server.key"))
    assert (tls.client_auth, tls.client_sans) == ("required", {"prometheus.example"})
    assert (tls.suites, tls.own_preference, tls.curve) == (("ECDHE-RSA-AES128-GCM-SHA256",), False, "prime256v1")
    assert config.headers == (("X-Frame-Options", "deny"), ("Strict-Transport-Security", "max-age=31536000"))
    assert config.users == {"alice": HASH}


# Over the wire


def test_tls_and_a_password_and_headers(folder, authority):
    text = TLS % "" + f"basic_auth_users: {{alice: '{HASH}'}}\n"
    text += "http_server_config: {headers: {X-Content-Type-Options: nosniff}}\n"
    with Served(write(folder, text), address="0.0.0.0:0") as served:
        status, headers, body = served.get(trust=authority, user=("alice", "right"))
        assert (status, body) == (200, b"/metrics\n")
        assert headers["X-Content-Type-Options"] == "nosniff"
        for wrong in (("alice", "wrong"), ("bob", "right")):
            status, headers, body = served.get(trust=authority, user=wrong)
            assert status == 401
            assert headers["WWW-Authenticate"].startswith("Basic ")
            assert b"/metrics" not in body
        assert served.get(trust=authority)[0] == 401
        assert served.get("/livez", trust=authority)[0] == served.get("/readyz?x=1", trust=authority)[0] == 200
        with pytest.raises((OSError, http.client.HTTPException)):
            served.get()


@pytest.mark.parametrize(
    "header", ["Bearer x", "Basic", "Basic !!!", "Basic " + base64.b64encode(b"alice").decode(), "Basic /w=="]
)
def test_a_header_that_is_no_password_is_turned_away(folder, header):
    with Served(write(folder, f"basic_auth_users: {{alice: '{HASH}'}}\n")) as served:
        assert served.get(authorization=header)[0] == 401


def test_users_are_read_again_when_the_file_changes(folder):
    path = write(folder, f"basic_auth_users: {{alice: '{HASH}'}}\n")
    with Served(path) as served:
        assert served.get(user=("alice", "right"))[0] == 200
        write(folder, f"basic_auth_users: {{alice: '{OTHER}', bob: '{HASH}'}}\n")
        served.look_again()
        assert served.get(user=("alice", "right"))[0] == 401, "a password that was right is not remembered"
        assert served.get(user=("alice", "other"))[0] == 200
        assert served.get(user=("bob", "right"))[0] == 200


def test_a_file_that_breaks_later_leaves_the_last_good_one(folder, caplog):
    log = logging.getLogger("web_config_test")
    path = write(folder, f"basic_auth_users: {{alice: '{HASH}'}}\n")
    with Served(path, log=log) as served, caplog.at_level(logging.INFO, logger=log.name):
        for text in ("basic_auth_users: {alice: right}\n", "a: ["):
            write(folder, text)
            served.look_again()
            assert served.get(user=("alice", "right"))[0] == 200
            assert served.get()[0] == 401, "a broken file opens no door"
        path.unlink()
        served.look_again()
        assert served.get()[0] == 401
        assert sum("web_config=kept" in record.message for record in caplog.records) == 3
        write(folder, "{}\n")
        served.look_again()
        assert served.get()[0] == 200


def test_certificates_are_rotated_without_a_restart(folder, authority):
    with Served(write(folder, TLS % "")) as served:
        assert served.get(trust=authority)[0] == 200
        following = trustme.CA()
        certificate = following.issue_cert("localhost")
        shutil.copy(folder / "tls.crt", folder / "old.crt")
        certificate.cert_chain_pems[0].write_to_path(folder / "tls.crt")
        served.look_again()
        assert served.get(trust=authority)[0] == 200, "a chain without its key is not taken"
        certificate.private_key_pem.write_to_path(folder / "tls.key")
        served.look_again()
        assert served.get(trust=following)[0] == 200
        with pytest.raises(ssl.SSLError):
            served.get(trust=authority)


def test_clients_show_certificates_with_an_allowed_name(folder, authority):
    extra = ", client_auth_type: RequireAndVerifyClientCert, client_ca_file: ca.crt, client_allowed_sans: [scraper.a]"
    with Served(write(folder, TLS % extra)) as served:
        assert served.get(trust=authority, client=authority.issue_cert("scraper.a"))[0] == 200
        for client in (None, authority.issue_cert("other.a"), trustme.CA().issue_cert("scraper.a")):
            with pytest.raises((OSError, http.client.HTTPException)):
                served.get(trust=authority, client=client)


def test_the_oldest_version_is_kept_to(folder, authority):
    with Served(write(folder, TLS % ", min_version: TLS13")) as served:
        assert served.get(trust=authority)[0] == 200
        with pytest.raises(ssl.SSLError):
            served.get(trust=authority, newest=ssl.TLSVersion.TLSv1_2)


def test_others_are_served_only_behind_tls_or_on_the_word(folder):
    path = write(folder, f"basic_auth_users: {{alice: '{HASH}'}}\n")
    with pytest.raises(MetricsError, match=r"add tls_server_config to .*--insecure"):
        Served(path, address="0.0.0.0:0")
    with Served(path, address="0.0.0.0:0", insecure=True) as served:
        assert served.get(user=("alice", "right"))[0] == 200


def test_a_file_that_is_wrong_at_the_start_is_the_users_to_mend(folder):
    with pytest.raises(WebConfigUnusable, match=r"--web-config .*web.yml: a is no field"):
        Served(write(folder, "a: 1"))
    (folder / "tls.key").unlink()
    with pytest.raises(WebConfigUnusable, match=r"tls_server_config.cert_file: .* cannot be used"):
        Served(write(folder, TLS % ""))


def test_a_client_that_says_nothing_holds_no_other_up(folder, authority):
    with Served(write(folder, TLS % "")) as served, socket.create_connection(("127.0.0.1", served.server.port)):
        assert served.get(trust=authority)[0] == 200


# Passwords


def test_answers_are_kept_and_keyed_by_the_hash():
    now_ns = 0
    credentials = BasicAuthenticator(secret=b"k", monotonic_ns=lambda: now_ns)
    for _ in range(20):
        assert credentials.check_password({"a": HASH}, "a", b"right") is PasswordVerdict.RIGHT
        assert credentials.check_password({"a": HASH}, "a", b"wrong") is PasswordVerdict.WRONG
    assert credentials.check_password({"a": OTHER}, "a", b"right") is PasswordVerdict.WRONG
    assert credentials.check_password({"a": HASH}, "b", b"right") is PasswordVerdict.WRONG
    assert credentials.check_password({"a": HASH}, "a", b"third") is PasswordVerdict.TOO_MANY
    assert credentials.check_password({"a": HASH}, "a", b"right") is PasswordVerdict.RIGHT, (
        "a known answer is never held up"
    )
    now_ns = 1_000_000_000
    assert credentials.check_password({"a": HASH}, "a", b"third") is PasswordVerdict.WRONG


@pytest.mark.parametrize("password", [b"", b"x" * 73, b"a\0b"])
def test_what_bcrypt_would_cut_short_is_wrong(password):
    kept = bcrypt.hashpw(password[:72].partition(b"\0")[0], bcrypt.gensalt(4)).decode()
    credentials = BasicAuthenticator(secret=b"k", monotonic_ns=lambda: 0)
    assert credentials.check_password({"a": kept}, "a", password) is (
        PasswordVerdict.WRONG if password else PasswordVerdict.RIGHT
    )
