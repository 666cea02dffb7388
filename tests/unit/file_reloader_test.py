"""Files that change under a running process: loaded again on change, kept while the new ones cannot be used."""

import logging
import os
import ssl
import threading

import pytest
import trustme

from eelgrid_protos.file_reloader import RETRY_S, FileReloader, load_key_pair
from eelgrid_protos.transport import CertificateUnusable, MutualTlsReloader, ServerCertificates, TlsFiles

LOG = logging.getLogger("eelgrid.test.reloader")


class Refused(Exception):
    """What a loader raises for a file that it cannot use."""


class Loaded:
    """Loads a file of text and those that its lines name, in capitals; `bad` in any of them is an error."""

    def __init__(self, path):
        self.path = path
        self.now_s = 0.0
        self.loads = 0
        self.reloader = FileReloader(
            self.load, name="files", log=LOG, errors=(Refused,), monotonic_s=lambda: self.now_s
        )

    def load(self, watch):
        self.loads += 1
        watch(self.path)
        found = []
        for name in self.path.read_text().split():
            watch(self.path.parent / name)
            found.append((self.path.parent / name).read_text())
        if "bad" in found:
            raise Refused("one of them is bad")
        return " ".join(found).upper()


@pytest.fixture
def loaded(tmp_path):
    for name, text in (("all", "one two"), ("one", "a"), ("two", "b")):
        (tmp_path / name).write_text(text)
    return Loaded(tmp_path / "all")


def replace_file(path, text):
    aside = path.with_suffix(".new")
    aside.write_text(text)
    aside.replace(path)


def test_nothing_is_loaded_again_without_a_change(loaded):
    assert [loaded.reloader.refresh() for _ in range(3)] == ["A B"] * 3
    assert (loaded.loads, loaded.reloader.reloads, loaded.reloader.failures) == (1, 0, 0)


def test_a_change_of_any_file_is_loaded_and_files_named_since_are_watched(loaded, tmp_path):
    replace_file(tmp_path / "two", "c")
    assert loaded.reloader.refresh() == "A C"
    (tmp_path / "three").write_text("d")
    replace_file(tmp_path / "all", "three")
    assert loaded.reloader.refresh() == "D"
    replace_file(tmp_path / "three", "e")
    assert loaded.reloader.refresh() == "E"
    replace_file(tmp_path / "one", "nobody's any more")
    assert loaded.reloader.refresh() == "E"
    assert (loaded.loads, loaded.reloader.reloads) == (4, 3)


def test_a_file_written_in_place_with_the_time_of_before_is_reported_by_its_size(loaded, tmp_path):
    before = (tmp_path / "one").stat()
    (tmp_path / "one").write_text("longer")
    os.utime(tmp_path / "one", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert loaded.reloader.refresh() == "LONGER B"


def test_a_bad_file_keeps_the_last_good_one_and_is_reported_and_counted_once_for_each_change(loaded, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger=LOG.name)
    replace_file(tmp_path / "one", "bad")
    for _ in range(5):
        loaded.now_s += 0.3 * RETRY_S
        assert loaded.reloader.refresh() == "A B"
    assert loaded.loads == 1 + 2, "tried at the change and once more a second later"
    (tmp_path / "two").unlink()
    assert loaded.reloader.refresh() == "A B"
    assert loaded.reloader.failures == 2
    replace_file(tmp_path / "two", "c")
    replace_file(tmp_path / "one", "d")
    assert loaded.reloader.refresh() == "D C"
    assert (loaded.reloader.reloads, loaded.reloader.failures) == (1, 2)
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "files=kept reason=one of them is bad"
    assert [line.partition(" ")[0] for line in told] == ["files=kept", "files=kept", "files=reloaded"]


def test_what_fails_without_a_change_of_the_files_is_tried_again(loaded, tmp_path, monkeypatch):
    replace_file(tmp_path / "one", "c")
    monkeypatch.setattr(loaded, "path", tmp_path / "nothing")
    assert loaded.reloader.refresh() == "A B"
    monkeypatch.undo()
    assert loaded.reloader.refresh() == "A B"
    loaded.now_s += RETRY_S
    assert loaded.reloader.refresh() == "C B"


def test_the_first_load_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        Loaded(tmp_path / "nothing")


def test_a_change_is_loaded_once_whoever_asks(loaded, tmp_path):
    replace_file(tmp_path / "one", "c")
    threads = [threading.Thread(target=loaded.reloader.refresh) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (loaded.loads, loaded.reloader.current) == (2, "C B")


def write_tls(folder, authority):
    leaf = authority.issue_cert("localhost")
    files = TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
    for path, blob in (
        (files.key, leaf.private_key_pem),
        (files.certificate, leaf.cert_chain_pems[0]),
        (files.authority, authority.cert_pem),
    ):
        replace_file(path, blob.bytes().decode())
    return files


def test_servers_keep_a_pair_that_fits_and_tell_an_authority_that_left(tmp_path):
    old, new = trustme.CA(), trustme.CA()
    files = write_tls(tmp_path, old)
    reloader = MutualTlsReloader(files, lambda _, contents: contents.chain, name="tls", log=LOG)
    grpc_side = ServerCertificates(files, LOG)
    first = reloader.refresh_configuration()
    assert grpc_side.fetch() is None
    replace_file(files.key, old.issue_cert("localhost").private_key_pem.bytes().decode())
    assert reloader.refresh_configuration() == first
    assert grpc_side.fetch() is None, "a key of another certificate would fail every handshake"
    assert reloader.failures == 1
    write_tls(tmp_path, old)
    second = reloader.refresh_configuration()
    assert second != first
    assert grpc_side.fetch() is not None
    assert grpc_side.fetch() is None
    assert (reloader.authority_losses, grpc_side.lost_authority()) == (0, False)
    both = old.cert_pem.bytes().decode() + new.cert_pem.bytes().decode()
    replace_file(files.authority, both)
    assert (reloader.refresh() is reloader.current, reloader.authority_losses) == (True, 0)
    replace_file(files.authority, new.cert_pem.bytes().decode())
    reloader.refresh()
    assert reloader.authority_losses == 1
    assert [grpc_side.lost_authority() for _ in range(2)] == [True, False]


def test_files_that_do_not_fit_are_named_at_the_start(tmp_path):
    files = write_tls(tmp_path, trustme.CA())
    replace_file(files.key, trustme.CA().issue_cert("localhost").private_key_pem.bytes().decode())
    with pytest.raises(CertificateUnusable, match=r"tls\.key .*do not fit each other"):
        ServerCertificates(files, LOG)


def test_a_key_with_a_password_is_an_error_and_no_question(tmp_path):
    from cryptography.hazmat.primitives import serialization

    files = write_tls(tmp_path, trustme.CA())
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    replace_file(
        files.key,
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        ).decode(),
    )
    with pytest.raises(ssl.SSLError):
        load_key_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files.certificate, files.key)
