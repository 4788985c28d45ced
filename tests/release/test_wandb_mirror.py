"""The champion in wandb, with a real wandb: what arrives, and what a bad server costs."""

import json
from pathlib import Path

import pytest
from fake_wandb_server import fake_server

from flyte_ddp.release import versions
from flyte_ddp.release.promotion import promote_version
from flyte_ddp.release.registry import Entry, Registry
from flyte_ddp.release.wandb_mirror import copy_champion_to_wandb
from flyte_ddp.settings import Settings

pytestmark = pytest.mark.slow
MORE = [pytest.param(behaviour, marks=pytest.mark.exhaustive) for behaviour in ("refuses", "babbles", "hangs")]
FILES = {"model.pt": b"weights", "model.json": b"{}"}
ONLINE = Settings(wandb_mode="online", wandb_timeout=2.0)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 2 + "01234567")
    return Registry(str(tmp_path / "registry"), "digits")


@pytest.fixture
def champion(registry: Registry) -> Entry:
    version = versions.write_version(registry, FILES)
    return promote_version(registry, version.name, "a test", by="me")


def test_what_arrives(
    registry: Registry, champion: Entry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        copy_champion_to_wandb(registry, champion.version, Settings(wandb_mode="online"))
    [artifact] = server.artifacts
    assert {name: server.uploads[name] for name in ("model.pt", "model.json")} == FILES
    assert {"champion", champion.version[:12]} <= {each["alias"] for each in artifact["aliases"]}
    assert (artifact["artifactCollectionName"], artifact["artifactTypeName"]) == ("digits", "model")
    assert json.loads(artifact["metadata"])["version"] == champion.version
    assert capsys.readouterr().out == "wandb: champion 1 of digits is someone/flyte-ddp/digits:champion\n"


@pytest.mark.parametrize("behaviour", ["denies", *MORE])
def test_a_bad_server_costs_a_message(
    registry: Registry,
    champion: Entry,
    behaviour: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fake_server(behaviour) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        copy_champion_to_wandb(registry, champion.version, ONLINE)
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("wandb: champion 1 of digits not mirrored (")


def test_nothing_is_sent_without_a_key_or_of_an_altered_version(
    registry: Registry, champion: Entry, capsys: pytest.CaptureFixture[str]
) -> None:
    for mode in ("offline", "disabled"):
        copy_champion_to_wandb(registry, champion.version, Settings(wandb_mode=mode))
    assert not capsys.readouterr().out
    Path(registry.at("versions", champion.version, "model.json")).write_text("{ }")
    copy_champion_to_wandb(registry, champion.version, ONLINE)
    assert "not mirrored (" in capsys.readouterr().out
