"""Local users prove who they are by a file: whose is believed, and what is not."""

import os
import stat
import threading

import pytest

from eelgrid_protos.local_users import create_proofs_folder, find_proofs_folder, read_proof, verify_proof

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
NOBODY = 65534


@pytest.fixture
def folder(tmp_path):
    return create_proofs_folder(f"unix:{tmp_path}/s")


def test_a_server_that_asks_for_proofs_has_a_folder_that_nobody_lists(tmp_path):
    assert find_proofs_folder(f"unix:{tmp_path}/s") is None
    assert find_proofs_folder("127.0.0.1:7443") is None
    made = create_proofs_folder(f"unix:{tmp_path}/s")
    assert find_proofs_folder(f"unix:{tmp_path}/s") == find_proofs_folder(f"unix://{tmp_path}/s") == made
    assert stat.S_IMODE(made.stat().st_mode) == 0o1733
    assert create_proofs_folder(f"unix:{tmp_path}/s") == made


def test_a_folder_that_is_a_link_or_anothers_is_not_used(tmp_path):
    (tmp_path / "s.users").symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        create_proofs_folder(f"unix:{tmp_path}/s")


def test_a_proof_names_the_user_of_this_process_and_is_made_once(folder):
    proof = read_proof(folder)
    assert read_proof(folder) == proof
    assert verify_proof(folder, proof).uid == os.geteuid()
    assert len(list(folder.iterdir())) == 1


def test_many_processes_at_once_have_one_proof(folder):
    found = []
    threads = [threading.Thread(target=lambda: found.append(read_proof(folder))) for _ in range(16)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 16
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    "proof", ["", ":", "x", "0:", "../s:" + "0" * 64, "gone:" + "0" * 64, "0:" + "é" * 64, "a" * 5000 + ":x"]
)
def test_what_proves_nothing_is_nobodys(folder, proof):
    read_proof(folder)
    assert verify_proof(folder, proof) is None


def test_a_wrong_secret_is_nobodys(folder):
    name, _, secret = read_proof(folder).partition(":")
    assert verify_proof(folder, f"{name}:{'0' * len(secret)}") is None
    assert verify_proof(folder, f"{name}:{secret}x") is None


@pytest.mark.parametrize("trick", ["readable", "linked", "symbolic", "folder", "pipe"])
def test_a_file_that_others_may_have_is_nobodys(folder, tmp_path, trick):
    name, _, secret = read_proof(folder).partition(":")
    path = folder / name
    if trick == "readable":
        path.chmod(0o640)
    elif trick == "linked":
        # Somebody else's file, brought here by a hard link.
        os.link(path, tmp_path / "original")
    else:
        path.rename(tmp_path / "original")
        if trick == "symbolic":
            path.symlink_to(tmp_path / "original")
        elif trick == "folder":
            path.mkdir()
        else:
            os.mkfifo(path)
    assert verify_proof(folder, f"{name}:{secret}") is None


@needs_root
def test_anothers_file_under_our_number_neither_proves_nor_blocks(folder):
    path = folder / "0"
    path.write_text("f" * 64)
    path.chmod(0o600)
    os.chown(path, NOBODY, NOBODY)
    proof = read_proof(folder)
    assert not proof.startswith("0:")
    assert verify_proof(folder, proof).uid == 0
    assert verify_proof(folder, "0:" + "f" * 64).uid == NOBODY


@needs_root
def test_a_user_without_a_name_is_nobody_that_owns_work(folder):
    proof = read_proof(folder)
    os.chown(folder / proof.partition(":")[0], 54321, 54321)
    assert verify_proof(folder, proof) is None
