"""Versions in the registry and promotions: nothing half written counts, and a person's word does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli import HELPERS, ROOT

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.files import file_digest
from flyte_ddp.release import looks, versions
from flyte_ddp.release.promotion import champion_files, promote, promote_judged, roll_back, store
from flyte_ddp.release.registry import Registry
from flyte_ddp.release.verdict import Verdict


def helper(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HELPERS / "promoter.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def judged(challenger: Path, **values: Any) -> Verdict:
    """A verdict that promotes."""
    digest = file_digest(challenger / versions.WEIGHTS)
    about = {"decision": "promote", "reason": "better", "challenger": digest, "champion": "", "best": digest}
    numbers = {"log_number": 0, "samples": 9, "challenger_accuracy": 1.0, "champion_accuracy": 0.0, "look": 1}
    return Verdict(**{**about, **numbers, "test_digest": "t", "alpha": 0.05, "power": "", "time": "", **values})


def trained(folder: Path, weights: bytes = b"weights") -> Path:
    """Files that a registry takes for a model's, with the verdict and its page."""
    folder.mkdir()
    (folder / versions.WEIGHTS).write_bytes(weights)
    takes = {"channels": 1, "height": 8, "width": 8}
    sidecar = {"model": "small_cnn", "classes": ["a", "b"], "input": takes, "digests": {"weights": "w"}}
    (folder / versions.SIDECAR).write_text(json.dumps(sidecar))
    (folder / "page.html").write_text("page")
    (folder / "verdict.json").write_text(judged(folder).to_json())
    return folder


def stored(registry: Registry, model: Path, **values: Any) -> tuple[versions.Version, Verdict]:
    verdict = judged(model, **values)
    files = model / versions.WEIGHTS, model / versions.SIDECAR
    return store(registry, *files, verdict, {"page.html": model / "page.html"}, by="somebody"), verdict


def test_two_rivals(address: str, tmp_path: Path) -> None:
    """Both were better than the champion of before; the second one's verdict does not count any more."""
    registry = Registry(address, "model")
    first, second = (stored(registry, trained(tmp_path / name, name.encode())) for name in ("one", "two"))
    won = promote_judged(registry, *first, by="one's execution")
    lost = promote_judged(registry, *second, by="another execution")
    assert (won.champion, won.reason) == (first[0].name, "promoted: better")
    assert lost.champion == first[0].name
    assert lost.reason.startswith("not promoted: entry 1 of the log is another one's")
    assert [entry.version for entry in registry.history()] == [first[0].name]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.exhaustive)])
def test_killed_at_every_write_a_second_try_ends_well(when: str, tmp_path: Path) -> None:
    model = trained(tmp_path / "trained")
    whole = file_digest(model / versions.WEIGHTS)
    for place in range(20):
        address = str(tmp_path / f"registry{place}")
        killed = helper("release", address, str(model), KILL_AT=f"{place} {when}")
        registry = Registry(address, "model")
        for entry in registry.history():
            version = versions.read(registry, entry.version, entry.manifest)
            versions.fetch(registry, version, tmp_path / f"fetched{place}", tuple(version.files))
        again = helper("release", address, str(model))
        assert again.stdout.strip() == "promoted: better", again.stderr
        assert [(entry.number, entry.version) for entry in registry.history()] == [(1, whole)]
        if killed.returncode == 0:
            break
        assert killed.returncode == 9, killed.stderr
    assert place == 12, "as many writes as there are"


def test_a_version_may_be_written_by_two(address: str, tmp_path: Path) -> None:
    """Of equal weights: what the first one has written stays."""
    registry = Registry(address, "model")
    first, _ = stored(registry, trained(tmp_path / "one"))
    second, _ = stored(registry, trained(tmp_path / "two"), reason="another one")
    assert first == second
    content = storage.read(registry.at("versions", first.name, "verdict.json"))
    assert json.loads(content)["reason"] == "better"


@pytest.mark.parametrize("file", ["model.pt", "manifest.json"])
def test_an_altered_version_is_named(file: str, tmp_path: Path) -> None:
    registry = Registry(str(tmp_path), "model")
    promote_judged(registry, *stored(registry, trained(tmp_path / "trained")), by="x")
    version = registry.history()[0].version
    path = tmp_path / "model/versions" / version / file
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(UserError, match=rf"versions/{version}/{file}: is damaged or was altered"):
        champion_files(registry, tmp_path / "fetched")
    path.unlink()
    said = "has no complete version" if file == "manifest.json" else "cannot be read: no such file"
    with pytest.raises(UserError, match=said):
        champion_files(registry, tmp_path / "again")
    assert not [*(tmp_path / "again").glob("*.pt")]


def test_what_a_person_decides(address: str, tmp_path: Path) -> None:
    registry = Registry(address, "model")
    with pytest.raises(UserError, match="model has no champion; promote a version first"):
        champion_files(registry, tmp_path / "fetched")
    with pytest.raises(UserError, match=r"there is no champion before the present one; nothing was changed"):
        roll_back(registry, "why", by="me")
    names = [stored(registry, trained(tmp_path / name, name.encode()))[0].name for name in ("one", "two", "three")]
    for name in names:
        promote(registry, name, "I say so", by="me")
    with pytest.raises(UserError, match=r"is the champion already, since 20"):
        promote(registry, names[2], "again", by="me")
    with pytest.raises(UserError, match=r"reason='': must say why"):
        promote(registry, names[0], " ", by="me")
    with pytest.raises(UserError, match="must be the SHA-256 of its weights, 64 hexadecimal digits"):
        promote(registry, "latest", "why", by="me")
    with pytest.raises(UserError, match=f"has no complete version {'0' * 64}: there is no manifest.json"):
        promote(registry, "0" * 64, "why", by="me")
    assert roll_back(registry, "too slow", by="me").version == names[1]
    assert roll_back(registry, "too slow", by="me").version == names[0]
    with pytest.raises(UserError, match="there is no champion before"):
        roll_back(registry, "too slow", by="me")
    log = registry.history()
    assert [entry.action for entry in log] == ["promote"] * 3 + ["rollback"] * 2
    assert {(entry.by, entry.best) for entry in log} == {("me", names[0])}
    weights, _ = champion_files(registry, tmp_path / "fetched")
    assert weights.read_bytes() == b"one"


def test_a_pod_that_tries_again_decides_once(address: str, tmp_path: Path) -> None:
    """An execution wants something once: what an earlier try of it has written is its own."""
    registry = Registry(address, "model")
    names = [stored(registry, trained(tmp_path / name, name.encode()))[0].name for name in ("one", "two", "three")]
    for name in names:
        first = promote(registry, name, "why", by=f"p/d/{name}", again=True)
        assert promote(registry, name, "why", by=f"p/d/{name}", again=True) == first
    back = roll_back(registry, "why", by="p/d/back", again=True)
    assert roll_back(registry, "why", by="p/d/back", again=True) == back
    assert back.version == names[1]
    assert roll_back(registry, "why", by="p/d/another", again=True).version == names[0]
    assert len(registry.history()) == 5


def test_equal_weights_with_other_classes_are_refused(address: str, tmp_path: Path) -> None:
    registry = Registry(address, "model")
    stored(registry, trained(tmp_path / "one"))
    other = trained(tmp_path / "two")
    sidecar = other / versions.SIDECAR
    sidecar.write_text(sidecar.read_text().replace('["a", "b"]', '["b", "a"]'))
    with pytest.raises(UserError, match="is in the registry already, with another classes: equal weights are one"):
        stored(registry, other)


def test_the_best_version_is_one_that_can_be_compared(tmp_path: Path) -> None:
    """After new classes, or when its files are gone, the best one so far is whom a person promotes."""
    registry = Registry(str(tmp_path / "registry"), "model")
    one, two, three = (trained(tmp_path / name, name.encode()) for name in ("one", "two", "three"))
    sidecar = three / versions.SIDECAR
    sidecar.write_text(sidecar.read_text().replace('["a", "b"]', '["a", "b", "c"]'))
    names = [stored(registry, model)[0].name for model in (one, two, three)]
    bests = [promote(registry, name, "why", by="me").best for name in (names[0], names[1], names[2], names[1])]
    assert bests == [names[0], names[0], names[2], names[1]]
    Path(registry.at("versions", names[1], versions.MANIFEST)).unlink()
    assert promote(registry, names[0], "why", by="me").best == names[0]


def test_looks_are_numbered_and_the_same_two_models_have_one(address: str) -> None:
    registry = Registry(address, "model")
    numbers = [looks.claim(registry, "t", pair, "champion", "superior") for pair in ("a", "b", "a", "c")]
    assert numbers == [1, 2, 1, 3]
    assert looks.claim(registry, "another test split", "a", "champion", "superior") == 1
    assert looks.claim(registry, "t", "a", "another champion", "superior") == 4
    assert looks.claim(registry, "t", "a", "champion", "not_worse 0.05") == 5, "another test is another look"


def test_a_judge_who_was_killed_has_spent_one_look(tmp_path: Path) -> None:
    registry = Registry(str(tmp_path), "model")
    assert looks.claim(registry, "t", "a", "champion", "superior") == 1
    assert looks.claim(registry, "t", "b", "champion", "superior") == 2
    for pair in Path(registry.at("judgements", "t", "pairs")).iterdir():
        pair.unlink()  # as if it had not come that far
    assert looks.claim(registry, "t", "a", "champion", "superior") == 1
    assert looks.claim(registry, "t", "c", "champion", "superior") == 3
