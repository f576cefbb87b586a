"""A ring of real standing nodes that encrypt, and its clients."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import anabranch as ab
from anabranch.coordinator.assembly import _check_ring as check
from anabranch.errors import ClusterFailed, DidNotHappen, PlanError, Refused
from anabranch.fragments import encode, recompute
from anabranch.nodes import Signer, codec
from anabranch.nodes.requests import Ping
from anabranch.nodes.standing.client import Access, Ring
from anabranch.nodes.standing.file import RingFile
from anabranch.nodes.standing.retrieving import retrieve
from anabranch.nodes.standing.saving import save
from anabranch.nodes.standing.store import encrypts, open_ring, where, with_key
from anabranch.nodes.standing.store import of_query as addressed
from anabranch.nodes.tls import Tls, read_root
from anabranch.ring import Settings
from anabranch.testing import LocalRing
from anabranch.testing.rings import hosts

HOSTS = hosts(5, start=130)
PERIOD = 0.5

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates need openssl"),
]


def certificate(folder: Path, named: tuple[str, ...]) -> Tls:
    """A certificate that names some hosts, and is its own root."""
    folder.mkdir(parents=True, exist_ok=True)
    files = Tls(str(folder / "cert.pem"), str(folder / "key.pem"), str(folder / "cert.pem"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "1", "-subj", "/CN=nodes", "-addext",
         "subjectAltName=" + ",".join(f"IP:{host}" for host in named),
         "-keyout", files.key, "-out", files.certificate],
        capture_output=True, check=True,
    )  # fmt: skip
    return files


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return certificate(tmp_path_factory.mktemp("certificate"), HOSTS)


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory, tls: Tls) -> Iterator[LocalRing]:
    with LocalRing(tmp_path_factory.mktemp("ring"), HOSTS, period=PERIOD, tls=tls) as ring:
        yield ring


def other(ring: LocalRing, root: str) -> Ring:
    """A client that trusts something else than the file of the ring says."""
    return Ring(replace(Access.of(RingFile.read(ring.file), "words"), root=root))


def refusal(*command: str) -> str:
    """What a command says that fails."""
    program = [sys.executable, "-c", "from anabranch.cli import main; main()", *command]
    told = subprocess.run(program, capture_output=True, text=True)
    assert told.returncode == 1, told.stderr
    return told.stderr


def test_save_retrieve_and_repair(ring: LocalRing) -> None:
    store, data = ring.store(2, 2, "words"), os.urandom(3_000_000)
    store.put("words/parts/1", data)
    assert store.get("words/parts/1").to_pybytes() == data
    fragments = encode(2, 2, data, name="model/7", owner="10.0.0.1")
    assert save(fragments, ring.ring("words"), threads=4) == [True] * 4
    found = retrieve("model/7", ring.ring("words"), owner="10.0.0.1")
    assert bytes(recompute(found)) == data
    # Nodes encrypt what they send to each other, too: they make a lost fragment again.
    lost = HOSTS[0]
    ring.kill([lost])

    def made() -> int:
        with ring.ring("") as whole:
            return sum(view.repaired for view in whole.everyone())

    ring.wait(made, "the lost fragment was not made again")
    ring.start([lost])
    ring.wait_closed()
    assert store.get("words/parts/1").to_pybytes() == data


def test_a_query_gets_the_certificate_with_its_key(ring: LocalRing) -> None:
    """Executors have neither the file of the ring nor one of the certificate."""
    address = addressed(where(str(ring.file), 2, 2), "words")
    assert encrypts(address)
    sent = with_key(address, 1, 30.0)
    assert RingFile.read(ring.file).root not in repr(sent)
    store = open_ring(**sent.arguments)
    store.put("words/parts/2", b"x" * 1000)
    assert store.get("words/parts/2").to_pybytes() == b"x" * 1000


def test_a_client_without_the_certificate_is_refused(ring: LocalRing, tmp_path: Path) -> None:
    address = ring.address(HOSTS[1])
    with pytest.raises(Refused, match="this node encrypts"):
        other(ring, "").look(address)
    stranger = read_root(certificate(tmp_path, HOSTS).root)
    with pytest.raises(DidNotHappen, match="certificate"):
        other(ring, stranger).look(address)
    assert other(ring, RingFile.read(ring.file).root).look(address).joined


def test_nothing_is_answered_in_clear(ring: LocalRing) -> None:
    """Whatever is sent so: neither is a right signature looked at."""
    address = ring.address(HOSTS[1])
    host, _, port = address.rpartition(":")
    signed = Signer(RingFile.read(ring.file).secret).sign(codec.encode(Ping(), 5.0), address)
    for data in (signed, b"anb", b"GET / HTTP/1.1\r\n\r\n", os.urandom(500)):
        with socket.create_connection((host, int(port)), 10) as sock:
            came = b""
            with suppress(OSError):  # the node may have closed the connection already
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                while more := sock.recv(1000):
                    came += more
        assert b"pid" not in came
        assert (b"this node encrypts" in came) == data.startswith(b"anb")


def test_a_certificate_that_does_not_name_the_host_is_refused(tmp_path: Path) -> None:
    wrong = certificate(tmp_path, HOSTS[1:])
    with pytest.raises(ClusterFailed, match="name what --host says"):
        LocalRing(tmp_path / "ring", HOSTS[:1], period=PERIOD, tls=wrong)


def test_the_files_of_ring_and_node_have_to_go_together(
    ring: LocalRing, tls: Tls, tmp_path: Path
) -> None:
    one = RingFile.read(ring.file)
    bare = ["node", "--ring", str(ring.file), "--host", "127.0.0.140", "--folder", str(tmp_path)]
    for options, why in (
        ([], "give the certificate of this one with --tls-certificate"),
        (["--tls-certificate", "x"], "both --tls-certificate and --tls-key"),
        (["--tls-root", str(ring.file)], "no PEM text"),
        (["--tls-root", tls.root], "--tls-root needs --tls-certificate"),
        (["--tls-root", str(tmp_path / "none")], "cannot read the certificate to trust"),
        (["--tls-certificate", "none", "--tls-key", "none"], "cannot use none"),
    ):
        assert why in refusal(*bare, *options)
    assert RingFile.read(ring.file) == one
    plain = RingFile.create(tmp_path / "plain.json", Settings())
    assert not encrypts(where(str(plain.path), 2, 2))
    bare[2] = str(plain.path)
    assert "give one with --tls-root" in refusal(*bare, "--tls-certificate", "x", "--tls-key", "y")


def test_a_ring_that_did_not_encrypt_does_once_all_are_started_again(
    tls: Tls, tmp_path: Path
) -> None:
    with LocalRing(tmp_path / "ring", HOSTS[:3], period=PERIOD) as plain:
        plain.store(1, 1).put("a", b"x" * 1000)
        with pytest.raises(PlanError, match="tls= does not reach the standing nodes"):
            check(ab.Fragments(1, 1, ring=str(plain.file)), tls)
        check(ab.Fragments(1, 1, ring=str(plain.file)), None)
        plain.stop(plain.alive)
    with LocalRing(tmp_path / "ring", HOSTS[:3], period=PERIOD, tls=tls) as ring:
        assert RingFile.read(ring.file).root == read_root(tls.root)
        assert ring.store(1, 1).get("a").to_pybytes() == b"x" * 1000
        for of_query in (None, tls):
            check(ab.Fragments(1, 1, ring=str(ring.file)), of_query)


def test_certificates_are_replaced_while_the_ring_serves(tls: Tls, tmp_path: Path) -> None:
    """First all nodes and clients trust both, and then nodes show the new one."""
    new = certificate(tmp_path / "new", HOSTS)
    both = tmp_path / "both.pem"
    both.write_text(read_root(tls.root) + read_root(new.root))
    steps = (
        ["--tls-root", str(both)],
        ["--tls-root", str(both), "--tls-certificate", new.certificate, "--tls-key", new.key],
    )
    with LocalRing(tmp_path / "ring", HOSTS[:3], period=PERIOD, tls=tls) as ring:
        ring.store(1, 1).put("a", b"x" * 1000)
        for options in steps:
            for host in ring.hosts:
                ring.stop([host])
                ring.start([host], options=options)
                ring.wait_closed()
                assert ring.store(1, 1).get("a").to_pybytes() == b"x" * 1000
        only_new = replace(Access.of(RingFile.read(ring.file), ""), root=read_root(new.root))
        assert all(Ring(only_new).look(ring.address(host)).joined for host in ring.hosts)


def test_the_certificate_to_trust_is_replaced_in_the_file(tls: Tls, tmp_path: Path) -> None:
    made = RingFile.create(tmp_path / "ring.json", Settings(), read_root(tls.root))
    made.remember(["a:1"])
    both = made.root + read_root(certificate(tmp_path / "new", HOSTS).root)
    assert RingFile.read(made.path).trust(both).root == both
    found = RingFile.read(made.path)
    assert (found.root, found.nodes, found.secret) == (both, ("a:1",), made.secret)
    with pytest.raises(PlanError, match="cannot write"):
        RingFile.create(tmp_path / "none" / "ring.json", Settings())


def test_a_file_without_secret_or_certificate_in_its_text(tmp_path: Path, tls: Tls) -> None:
    made = RingFile.create(tmp_path / "ring.json", Settings(), read_root(tls.root))
    made.remember(["a:1"])
    found = RingFile.read(made.path)
    assert found.root == read_root(tls.root)
    assert "CERTIFICATE" not in f"{found} {Access.of(found, 'words')}"
    with pytest.raises(PlanError, match="cannot be the id of a query"):
        Access.of(found, "wörter")
