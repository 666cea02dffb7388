"""Where the API server is and who we are to it: kubeconfigs, service accounts, tokens and programs that renew."""

import base64
import stat
import sys

import pytest
import trustme
from tests.fakes.kubernetes.cluster import FakeCluster

from eelgrid_controller.engines.kubernetes.api import errors
from eelgrid_controller.engines.kubernetes.api.client import HttpClusterClient, RequestLimits
from eelgrid_controller.engines.kubernetes.api.kubeconfig import (
    ClusterAccess,
    build_tls_context,
    find_access,
    load_kubeconfig,
    load_service_account,
)
from eelgrid_controller.engines.kubernetes.api.port import PODS
from eelgrid_controller.errors import ControllerConfigError

CONFIG = """
apiVersion: v1
kind: Config
current-context: one
clusters:
- {name: c1, cluster: {server: "https://c1:6443/", certificate-authority: ca.crt, tls-server-name: kubernetes}}
- {name: c2, cluster: {server: "http://c2", insecure-skip-tls-verify: true}}
users:
- {name: token, user: {token: secret}}
- {name: pair, user: {client-certificate-data: Y2VydA==, client-key-data: a2V5}}
- {name: old, user: {auth-provider: {name: gcp}}}
- {name: program, user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: ./give, args: [x], env: [{name: A, value: b}]}}}
contexts:
- {name: one, context: {cluster: c1, user: token, namespace: ml}}
- {name: two, context: {cluster: c2, user: pair}}
- {name: three, context: {cluster: c1, user: old}}
- {name: four, context: {cluster: c1, user: program}}
- {name: five, context: {cluster: c9, user: token}}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config"
    path.write_text(CONFIG)
    (tmp_path / "ca.crt").write_bytes(b"pem")
    return path


def test_a_kubeconfig_gives_the_access_of_its_context(config):
    one = load_kubeconfig([config])
    assert one == ClusterAccess(
        server="https://c1:6443", namespace="ml", authority_pem=b"pem", server_name="kubernetes", token="secret"
    )
    two = load_kubeconfig([config], context="two")
    assert (two.certificate_pem, two.key_pem, two.is_insecure, two.namespace) == (b"cert", b"key", True, "default")
    program = load_kubeconfig([config], context="four").plugin
    assert (program.command, program.args, program.env) == (str(config.parent / "give"), ("x",), (("A", "b"),))


@pytest.mark.parametrize(
    ("context", "problem"), [("three", "auth-provider"), ("five", "c9"), ("six", "one of its contexts")]
)
def test_what_cannot_be_used_is_named(config, context, problem):
    with pytest.raises(ControllerConfigError, match=problem):
        load_kubeconfig([config], context=context)


def test_of_several_kubeconfigs_the_first_to_name_a_thing_wins(config, tmp_path):
    other = tmp_path / "other"
    other.write_text("users: [{name: token, user: {token: mine}}]\n")
    assert find_access({"KUBECONFIG": f"{other}:{config}"}).token == "mine"
    assert find_access({"KUBECONFIG": f"{config}:{other}"}).token == "secret"
    with pytest.raises(ControllerConfigError):
        find_access({"HOME": str(tmp_path / "nobody")})


def test_a_pod_knows_its_server_by_what_is_mounted(tmp_path):
    for name, text in (("token", "t"), ("ca.crt", "pem"), ("namespace", "eelgrid\n")):
        (tmp_path / name).write_text(text)
    found = load_service_account({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}, tmp_path)
    assert (found.server, found.namespace) == ("https://[fd00::1]:443", "eelgrid")
    assert found.token_file == tmp_path / "token"
    (tmp_path / "token").unlink()
    with pytest.raises(ControllerConfigError, match="automountServiceAccountToken"):
        load_service_account({"KUBERNETES_SERVICE_HOST": "x"}, tmp_path)


def test_a_client_certificate_is_loaded_and_leaves_no_file(tmp_path):
    authority = trustme.CA()
    pair = authority.issue_cert("someone")
    access = ClusterAccess(
        server="https://x",
        authority_pem=authority.cert_pem.bytes(),
        certificate_pem=pair.cert_chain_pems[0].bytes(),
        key_pem=pair.private_key_pem.bytes(),
    )
    assert len(build_tls_context(access).get_ca_certs()) == 1
    with pytest.raises(ControllerConfigError, match="renew it"):
        build_tls_context(ClusterAccess(server="https://x", authority_pem=b"no pem"))
    assert build_tls_context(ClusterAccess(server="http://x")) is None


async def test_a_token_that_was_replaced_is_read_again_when_it_is_refused(tmp_path):
    token = tmp_path / "token"
    token.write_text("old\n")
    async with FakeCluster() as fake:
        fake.access.grant("old")
        async with HttpClusterClient(ClusterAccess(server=fake.url, token_file=token)) as cluster:
            await cluster.list(PODS)
            del fake.access.users["old"]
            with pytest.raises(errors.Unauthenticated):
                await cluster.list(PODS)
            fake.access.grant("new")
            token.write_text("new\n")
            assert (await cluster.list(PODS)).items == []


def program(tmp_path, body):
    path = tmp_path / "give"
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    text = CONFIG.replace("https://c1:6443/", "URL").replace(", certificate-authority: ca.crt", "")
    (tmp_path / "config").write_text(text)
    return tmp_path / "config"


async def test_a_program_gives_credentials_until_they_are_refused(tmp_path):
    body = """import json, os, pathlib
count = pathlib.Path(__file__).with_name("count")
number = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(number))
assert json.loads(os.environ["KUBERNETES_EXEC_INFO"])["kind"] == "ExecCredential" and os.environ["A"] == "b"
print(json.dumps({"status": {"token": f"t{number}", "expirationTimestamp": "2099-01-01T00:00:00Z"}}))"""
    config = program(tmp_path, body)
    async with FakeCluster() as fake:
        config.write_text(config.read_text().replace("URL", fake.url))
        fake.access.grant("t1")
        async with HttpClusterClient(load_kubeconfig([config], context="four")) as cluster:
            await cluster.list(PODS)
            await cluster.list(PODS)
            assert (tmp_path / "count").read_text() == "1"
            del fake.access.users["t1"]
            fake.access.grant("t2")
            await cluster.list(PODS)
            assert (tmp_path / "count").read_text() == "2"


@pytest.mark.parametrize(
    ("body", "problem"), [("raise SystemExit(3)", "ended with 3"), ("print('t')", "ExecCredential")]
)
async def test_a_program_that_fails_is_named_and_not_repeated(tmp_path, body, problem):
    config = program(tmp_path, body)
    config.write_text(config.read_text().replace("URL", "http://127.0.0.1:1"))
    async with HttpClusterClient(load_kubeconfig([config], context="four")) as cluster:
        with pytest.raises(ControllerConfigError, match=problem):
            await cluster.list(PODS)


async def test_a_server_that_is_not_there_was_certainly_not_asked():
    async with HttpClusterClient(ClusterAccess(server="http://127.0.0.1:1")) as cluster:
        with pytest.raises(errors.ClusterUnreachable) as away:
            await cluster.list(PODS)
    assert not away.value.is_sent


async def test_an_answer_that_does_not_come_is_given_up_and_may_have_been_carried_out():
    async with FakeCluster() as fake:
        cluster = fake.client(bounds=RequestLimits(request_s=0.2))
        fake.knobs.add("hang", times=1)
        with pytest.raises(errors.ClusterUnreachable) as away:
            await cluster.list(PODS)
        assert away.value.is_sent
        fake.knobs.add("lose", times=1)
        with pytest.raises(errors.ClusterUnreachable) as away:
            await cluster.patch(PODS, "a", {}, namespace="default")
        assert away.value.is_sent


async def test_answers_are_bounded():
    async with FakeCluster() as fake:
        for index in range(50):
            body = {"metadata": {"name": f"c{index}"}, "data": {"x": "y" * 1000}}
            fake.api.create(fake.api.catalogue.find("", "v1", "configmaps"), "default", body)
        cluster = fake.client(bounds=RequestLimits(answer_bytes=10_000))
        from tests.fakes.kubernetes.resources import CONFIG_MAPS

        with pytest.raises(errors.AnswerUnreadable, match="over 10000 bytes"):
            await cluster.list(CONFIG_MAPS)
        assert len((await cluster.list(CONFIG_MAPS, limit=2)).items) == 2


async def test_requests_take_turns():
    async with FakeCluster() as fake:
        cluster = fake.client(bounds=RequestLimits(at_once=2))
        fake.knobs.add("slow", delay_s=0.02)
        import asyncio

        await asyncio.gather(*(cluster.list(PODS) for _ in range(10)))
        assert cluster.exchange.requests == 10
        connections = {one for one in cluster.exchange._session.connector._conns.values() for one in one}
        assert len(connections) <= 2


async def test_discovery_works_with_servers_that_know_it_only_the_old_way():
    async with FakeCluster() as fake:
        new = await fake.client().discover()
        fake.knobs.aggregated = False
        assert await fake.client().discover() == new


def test_secrets_are_in_no_message():
    encoded = base64.b64encode(b"secret").decode()
    assert encoded not in repr(errors.error_of(401, {}, "get /x"))
