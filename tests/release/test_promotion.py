"""Versions in the registry and promotions: nothing half written counts, and a person's word does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import promoter
import pytest
from cli import HELPERS, ROOT

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.files import file_digest
from flyte_ddp.release import looks, versions
from flyte_ddp.release.promotion import (
    apply_verdict,
    download_champion,
    promote_version,
    roll_back_champion,
    store_version,
)
from flyte_ddp.release.registry import Entry, Registry, replay_promotions
from flyte_ddp.release.verdict import Verdict


def helper(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HELPERS / "promoter.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def judged(model: Path, **values: Any) -> Verdict:
    """A verdict that promotes."""
    digest = file_digest(model / versions.WEIGHTS)
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
    return store_version(registry, *files, verdict, {"page.html": model / "page.html"}, by="somebody"), verdict


def test_two_rivals(address: str, tmp_path: Path) -> None:
    """Both were better than the champion of before; the second one's verdict does not count any more."""
    registry = Registry(address, "model")
    first, second = (stored(registry, trained(tmp_path / name, name.encode())) for name in ("one", "two"))
    won = apply_verdict(registry, *first, by="one's execution")
    lost = apply_verdict(registry, *second, by="another execution")
    assert (won.champion, won.reason) == (first[0].name, "promoted: better")
    assert lost.champion == first[0].name
    assert lost.reason.startswith("not promoted: one's execution was faster: by entry 1 of the log version ")
    assert [entry.version for entry in registry.history()] == [first[0].name]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.exhaustive)])
def test_killed_at_every_write_a_second_try_ends_well(when: str, address: str, tmp_path: Path) -> None:
    model = trained(tmp_path / "trained")
    whole = file_digest(model / versions.WEIGHTS)
    for place in range(20):
        killed = helper("release", f"{address}{place}", str(model), KILL_AT=f"{place} {when}")
        registry = Registry(f"{address}{place}", "model")
        assert registry.champion() == next(reversed(registry.history()), None)
        for entry in registry.history():
            version = versions.read_version(registry, entry.version, entry.manifest)
            versions.fetch_files(registry, version, tmp_path / f"fetched{place}", tuple(version.files))
        assert promoter.release_model(f"{address}{place}", str(model)) == "promoted: better"
        assert [(entry.number, entry.version) for entry in registry.history()] == [(1, whole)]
        assert json.loads(storage.read_file(registry.at("champion.json")))["version"] == whole
        if killed.returncode == 0:
            break
        assert killed.returncode == 9, killed.stderr
    assert place == 12, "as many writes as there are"


def test_what_was_kept_and_is_promoted_later_has_both_verdicts(address: str, tmp_path: Path) -> None:
    """A version is a folder for all that was made with the judgement; the champion's is that of its promotion."""
    registry, model = Registry(address, "model"), trained(tmp_path / "one")
    kept, verdict = stored(registry, model, decision="keep", reason="worse")
    assert apply_verdict(registry, kept, verdict, by="x").reason == "kept: worse"
    assert not registry.history()
    assert stored(registry, model, decision="keep", reason="no better")[0] == kept, "nothing new is written for that"
    (model / "model.onnx").write_text("exported now")
    files = model / versions.WEIGHTS, model / versions.SIDECAR
    verdict = judged(model)
    beside = {name: model / name for name in ("page.html", "model.onnx")}
    version = store_version(registry, *files, verdict, beside, by="x")
    assert store_version(registry, *files, verdict, beside, by="x") == version
    assert (version.name, version.folder) == (kept.name, f"versions/{kept.name}/2")
    apply_verdict(registry, version, verdict, by="x")
    entry = registry.champion()
    assert entry is not None
    champion = versions.read_version(registry, entry.version, entry.manifest)
    assert champion == version == versions.read_version(registry, entry.version)
    versions.fetch_files(registry, champion, tmp_path, ("model.onnx", "verdict.json", "README.md"))
    assert json.loads((tmp_path / "verdict.json").read_text())["decision"] == "promote"
    assert "`model.onnx`" in (tmp_path / "README.md").read_text()
    assert json.loads(storage.read_file(registry.at(kept.folder, "verdict.json")))["decision"] == "keep"
    assert "model.onnx" not in versions.read_version(registry, kept.name, kept.manifest).files


def test_two_writers_of_other_files_have_a_revision_each(address: str) -> None:
    """Whoever comes second at the list of files: no list that is not in the store is ever handed on."""
    registry = Registry(address, "model")
    files: dict[str, Path | bytes] = {"verdict.json": b"{}", "model.pt": b"weights", "model.json": b"{}"}
    create, others = storage.create_file, []

    def interrupted(to: str, content: bytes | Path) -> None:
        if to.endswith("manifest.json") and not others:
            others.append(None)
            others[0] = versions.write_version(registry, {**files, "model.onnx": b"exported"})
        create(to, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "create_file", interrupted)
        mine = versions.write_version(registry, files)
    assert versions.read_version(registry, mine.name, mine.manifest) == mine
    assert versions.read_version(registry, mine.name, others[0].manifest) == others[0]
    assert [mine.folder, others[0].folder] == [f"versions/{mine.name}/2", f"versions/{mine.name}"]
    storage.write_file(registry.at(mine.folder, "manifest.json"), b"{}")
    with pytest.raises(UserError, match=rf"{mine.name}: has no manifest.json with the SHA-256 {mine.manifest[:12]}"):
        versions.read_version(registry, mine.name, mine.manifest)


@pytest.mark.parametrize("gone", [1, 2])
def test_a_gap_in_the_log_is_promoted_over_by_nobody(gone: int, tmp_path: Path) -> None:
    """Neither before the entry that was judged against, nor after it."""
    registry = Registry(str(tmp_path / "registry"), "model")
    one, two, three = (trained(tmp_path / name, name.encode()) for name in ("one", "two", "three"))
    apply_verdict(registry, *stored(registry, one), by="x")
    late = stored(registry, three, log_number=1)
    apply_verdict(registry, *stored(registry, two, log_number=1), by="y")
    Path(registry.at("log", f"0000000{gone}.json")).unlink()
    with pytest.raises(UserError, match=rf"model/log/0000000{gone}.json is missing"):
        apply_verdict(registry, *late, by="z")
    Path(registry.at("champion.json")).unlink()
    for entry in Path(registry.at("log")).iterdir():
        entry.unlink()
    with pytest.raises(UserError, match=r"model/log/00000001.json is missing; restore it"):
        apply_verdict(registry, *late, by="z")
    assert not [*Path(registry.at("log")).iterdir()]


@pytest.mark.parametrize("file", ["model.pt", "manifest.json"])
def test_an_altered_version_is_named(file: str, tmp_path: Path) -> None:
    registry = Registry(str(tmp_path), "model")
    apply_verdict(registry, *stored(registry, trained(tmp_path / "trained")), by="x")
    version = registry.history()[0].version
    path = tmp_path / "model/versions" / version / file
    path.write_bytes(path.read_bytes() + b" ")
    said = f"{version}: has no manifest.json with the SHA-256 " if file == "manifest.json" else f"{file}: is damaged or"
    with pytest.raises(UserError, match=said):
        download_champion(registry, tmp_path / "fetched")
    path.unlink()
    said = "has no complete version" if file == "manifest.json" else f"{file}: is missing; restore it, or promote"
    with pytest.raises(UserError, match=said):
        download_champion(registry, tmp_path / "again")
    assert not [*(tmp_path / "again").glob("*.pt")]


def test_a_person_can_promote_only_what_is_whole(tmp_path: Path) -> None:
    """Nor go back to it; an altered file that is no weights counts, too."""
    registry = Registry(str(tmp_path / "registry"), "model")
    names = [stored(registry, trained(tmp_path / name, name.encode()))[0].name for name in ("one", "two")]
    for name in names:
        promote_version(registry, name, "why", by="me")
    Path(registry.at("versions", names[0], "page.html")).write_text("altered")
    for decide in (
        lambda: promote_version(registry, names[0], "why", by="me"),
        lambda: roll_back_champion(registry, "why", by="me"),
    ):
        with pytest.raises(UserError, match=r"page.html: is damaged or was altered; restore it"):
            decide()
    Path(registry.at("versions", names[0], "model.pt")).unlink()
    for decide in (
        lambda: promote_version(registry, names[0], "why", by="me"),
        lambda: roll_back_champion(registry, "why", by="me"),
    ):
        with pytest.raises(UserError, match=r"model.pt: is missing; restore it"):
            decide()
    assert len(registry.history()) == 2


def test_what_a_person_decides(address: str, tmp_path: Path) -> None:
    registry = Registry(address, "model")
    with pytest.raises(UserError, match="model has no champion; promote a version first"):
        download_champion(registry, tmp_path / "fetched")
    with pytest.raises(UserError, match=r"there is no champion before the present one; nothing was changed"):
        roll_back_champion(registry, "why", by="me")
    names = [stored(registry, trained(tmp_path / name, name.encode()))[0].name for name in ("one", "two", "three")]
    for name in names:
        promote_version(registry, name, "I say so", by="me")
    with pytest.raises(UserError, match=r"is the champion already, since 20"):
        promote_version(registry, names[2], "again", by="me")
    with pytest.raises(UserError, match=r"reason='': must say why"):
        promote_version(registry, names[0], " ", by="me")
    with pytest.raises(UserError, match="must be the SHA-256 of its weights, 64 hexadecimal digits"):
        promote_version(registry, "latest", "why", by="me")
    with pytest.raises(UserError, match=f"has no complete version {'0' * 64}: there is no manifest.json"):
        promote_version(registry, "0" * 64, "why", by="me")
    assert roll_back_champion(registry, "too slow", by="me").version == names[1]
    assert roll_back_champion(registry, "too slow", by="me").version == names[0]
    with pytest.raises(UserError, match="there is no champion before"):
        roll_back_champion(registry, "too slow", by="me")
    log = registry.history()
    assert [entry.action for entry in log] == ["promote"] * 3 + ["rollback"] * 2
    assert {(entry.by, entry.best) for entry in log} == {("me", names[0])}
    weights, _ = download_champion(registry, tmp_path / "fetched")
    assert weights.read_bytes() == b"one"


def test_what_stands_and_what_was_taken_back() -> None:
    """By hand: who becomes champion by a rollback was not taken back, whatever was before."""

    def after(*log: str) -> tuple[list[str], set[str]]:
        entries = [
            Entry(number, "promote" if name.isupper() else "rollback", name.upper(), *["x"] * 7)
            for number, name in enumerate(log, 1)
        ]
        found = replay_promotions(entries)
        return [entry.version for entry in found.standing], {*found.taken_back}

    assert after("A", "B", "C") == (["A", "B", "C"], set())
    assert after("A", "B", "C", "b", "a") == (["A"], {"B", "C"})
    assert after("A", "B", "a", "B") == (["A", "B"], set())
    assert after("A", "B", "A", "b", "a") == (["A"], {"B"})


def test_a_pod_that_tries_again_decides_once(address: str, tmp_path: Path) -> None:
    """An execution wants something once: what an earlier try of it has written is its own."""
    registry = Registry(address, "model")
    names = [stored(registry, trained(tmp_path / name, name.encode()))[0].name for name in ("one", "two", "three")]
    for name in names:
        first = promote_version(registry, name, "why", by=f"p/d/{name}", once=True)
        assert promote_version(registry, name, "why", by=f"p/d/{name}", once=True) == first
    back = roll_back_champion(registry, "why", by="p/d/back", once=True)
    assert roll_back_champion(registry, "why", by="p/d/back", once=True) == back
    assert back.version == names[1]
    promote_version(registry, names[0], "by somebody else in between", by="p/d/else", once=True)
    storage.write_file(registry.at("champion.json"), b"{}")
    assert roll_back_champion(registry, "why", by="p/d/back", once=True) == back
    assert promote_version(registry, names[2], "why", by=f"p/d/{names[2]}", once=True).number == 3
    with pytest.raises(UserError, match="is the champion already"):
        promote_version(registry, names[0], "another model than before", by=f"p/d/{names[2]}", once=True)
    assert json.loads(storage.read_file(registry.at("champion.json")))["number"] == 5, "the copy is made again"
    assert roll_back_champion(registry, "why", by="p/d/another", once=True).version == names[1]
    assert len(registry.history()) == 6


def test_other_weights_and_other_classes_are_refused(address: str, tmp_path: Path) -> None:
    registry = Registry(address, "model")
    stored(registry, trained(tmp_path / "one"))
    with pytest.raises(UserError, match=r"verdict: is on version aaaaaaaaaaaa, not on .*; give what was judged"):
        stored(registry, tmp_path / "one", challenger="a" * 64)
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
    bests = [promote_version(registry, name, "why", by="me").best for name in (names[0], names[1], names[2], names[1])]
    assert bests == [names[0], names[0], names[2], names[1]]
    Path(registry.at("versions", names[1], versions.MANIFEST)).unlink()
    assert promote_version(registry, names[0], "why", by="me").best == names[0]


def test_looks_are_numbered_and_the_same_two_models_have_one(address: str) -> None:
    registry = Registry(address, "model")
    numbers = [looks.claim_look(registry, "t", pair, "champion", "superior") for pair in ("a", "b", "a", "c")]
    assert numbers == [1, 2, 1, 3]
    assert looks.claim_look(registry, "another test split", "a", "champion", "superior") == 1
    assert looks.claim_look(registry, "t", "a", "another champion", "superior") == 4
    assert looks.claim_look(registry, "t", "a", "champion", "not_worse 0.05") == 5, "another test is another look"


@pytest.mark.slow
def test_judges_at_the_same_time_have_a_look_each(address: str) -> None:
    """Also one who was killed before it had written down which: no look is two judges'."""
    script = [sys.executable, str(HELPERS / "promoter.py"), "look", address]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen([*script, f"judge {number}", "5"], env=environment, stdout=subprocess.PIPE)
        for number in range(4)
    ]
    said = [json.loads(line) for process in running for line in process.communicate()[0].splitlines()]
    assert sorted(said) == [*range(1, 21)]
