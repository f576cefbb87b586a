"""When a node looks for lost fragments, and what it does with its own: without a ring."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.fragments import encode
from anabranch.nodes.standing import repair as module
from anabranch.nodes.standing.client import Access, Ring
from anabranch.nodes.standing.names import FragmentName
from anabranch.nodes.standing.repair import Repair
from anabranch.nodes.tickets import Secret
from anabranch.nodes.vault import Vault
from anabranch.ring import Came, Contact, NodeId, Settings, Went

ME, OTHER = (Contact(NodeId.of(host), host, f"{host}:1", incarnation=7) for host in "ab")


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    return Vault(tmp_path / "vault", None)


@pytest.fixture
def repair(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> Repair:
    """One that looks after news only, a tenth of a second later."""
    monkeypatch.setattr(module, "AFTER_START", 10**6)
    settings = Settings(period=0.01)
    ring = Ring(Access(("127.0.0.1:1",), Secret.new(), "", settings))
    return Repair(ring, ME, vault, settings)


def looks(repair: Repair) -> bool:
    """Whether it looks, within a second."""
    end = threading.Timer(1.0, repair.close)
    end.start()
    try:
        return repair._is_due()
    finally:
        end.cancel()


def test_a_node_that_failed(repair: Repair) -> None:
    repair.news(Went(OTHER, failed=True))
    assert looks(repair)


def test_a_node_that_is_no_neighbour_any_more(repair: Repair) -> None:
    repair.news(Went(OTHER, failed=False))
    assert not looks(repair)


def test_a_process_that_is_heard_again(repair: Repair) -> None:
    repair.news(Went(OTHER, failed=True))
    repair.news(Came(OTHER))
    assert not looks(repair)


def test_a_node_that_was_started_again_may_have_lost_its_disk(repair: Repair) -> None:
    repair.news(Went(OTHER, failed=True))
    repair.news(Came(replace(OTHER, incarnation=8)))
    assert looks(repair)


def test_a_damaged_fragment_is_deleted_as_names_are_all_that_others_see(
    repair: Repair, vault: Vault
) -> None:
    data = bytearray(encode(2, 2, b"x" * 1000, name="a")[0].to_bytes())
    data[-20] ^= 1
    vault.put(f"words/{FragmentName('a', 1, 0, 2, 4)}", bytes(data))
    vault.put("words/no fragment".replace(" ", "-"), b"x")
    assert not repair._audit(), "it is not whole"
    assert vault.list() == ["words/no-fragment"]
