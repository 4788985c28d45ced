"""Versions in the registry and promotions: nothing half written counts, and a person's word does."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import promoter
import pytest
from sidecars import make_sidecar

from flyte_ddp import storage
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import SIDECAR, WEIGHTS, file_digest
from flyte_ddp.release.promotion import (
    apply_verdict,
    download_champion,
    promote_version,
    roll_back_champion,
    store_version,
)
from flyte_ddp.release.promotion_log import Entry, replay_promotions
from flyte_ddp.release.registry import Registry, Version
from flyte_ddp.release.verdict import Verdict


def judged(model: Path, **values: Any) -> Verdict:
    """A verdict that promotes."""
    digest = file_digest(model / WEIGHTS)
    about = {"decision": "promote", "reason": "better", "challenger": digest, "best": digest}
    return Verdict(**{**about, **values})


def trained(folder: Path) -> Path:
    """Files that a registry takes for a model's, with the verdict and its page; weights differ by the folder's name."""
    folder.mkdir(parents=True)
    (folder / WEIGHTS).write_text(folder.name)
    (folder / SIDECAR).write_text(json.dumps(make_sidecar().to_json_value()))
    (folder / "page.html").write_text("page")
    (folder / "verdict.json").write_text(judged(folder).to_json())
    return folder


def stored(registry: Registry, model: Path, **values: Any) -> tuple[Version, Verdict]:
    """The version that the files of a folder become, and the verdict."""
    verdict = judged(model, **values)
    files = model / WEIGHTS, model / SIDECAR
    beside = {name: model / name for name in ("page.html", "model.onnx") if (model / name).exists()}
    return store_version(registry, *files, verdict, beside), verdict


@pytest.fixture
def local(tmp_path: Path) -> Registry:
    return Registry(str(tmp_path / "registry"), "model")


@pytest.fixture
def registry(address: str) -> Registry:
    return Registry(address, "model")


def store_all(registry: Registry, tmp_path: Path, *names: str) -> list[str]:
    """Store a version for each folder name; return the versions' names."""
    return [stored(registry, trained(tmp_path / name))[0].name for name in names]


@pytest.mark.parametrize("address", ["folder", "S3"], indirect=True)
def test_two_rivals(registry: Registry, tmp_path: Path) -> None:
    """Both were better than the champion of before; the second one's verdict does not count any more."""
    first, second = (stored(registry, trained(tmp_path / name)) for name in ("one", "two"))
    won = apply_verdict(registry, *first, by="one's execution")
    lost = apply_verdict(registry, *second, by="another execution")
    assert (won.champion, won.outcome) == (first[0].name, "promoted: better")
    assert lost.champion == first[0].name
    assert lost.outcome.startswith("not promoted: one's execution was faster: entry 1 ")
    assert [entry.version for entry in registry.read_log()] == [first[0].name]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.exhaustive)])
def test_killed_at_every_write_a_second_try_ends_well(when: str, address: str, tmp_path: Path) -> None:
    model = trained(tmp_path / "trained")
    whole = file_digest(model / WEIGHTS)
    for place in range(20):
        arguments = {"args": (f"{address}{place}", model, place), "kwargs": {"after": when == "after"}}
        killed = get_context("spawn").Process(target=promoter.release_and_be_killed, **arguments)
        killed.start()
        killed.join()
        registry = Registry(f"{address}{place}", "model")
        assert registry.read_champion() == next(reversed(registry.read_log()), None)
        for entry in registry.read_log():
            registry.verify_files(registry.read_version(entry.version, entry.manifest))
        assert promoter.release_model(f"{address}{place}", model) == "promoted: better"
        assert [(entry.number, entry.version) for entry in registry.read_log()] == [(1, whole)]
        if killed.exitcode == 0:
            break
        assert killed.exitcode == 9
    assert place == 8, "as many writes as there are"


def test_what_was_kept_and_is_promoted_later_has_both_verdicts(registry: Registry, tmp_path: Path) -> None:
    """A version is a folder for all that was made with the judgement; the champion's is that of its promotion."""
    model = trained(tmp_path / "one")
    kept, verdict = stored(registry, model, decision="keep", reason="worse")
    assert apply_verdict(registry, kept, verdict, by="x").outcome == "kept: worse"
    assert not registry.read_log()
    assert stored(registry, model, decision="keep", reason="no better")[0] == kept, "nothing new is written for that"
    (model / "model.onnx").write_text("exported now")
    version, verdict = stored(registry, model)
    assert stored(registry, model)[0] == version
    assert (version.name, version.folder) == (kept.name, f"versions/{kept.name}/2")
    apply_verdict(registry, version, verdict, by="x")
    entry = registry.read_champion()
    assert entry is not None
    champion = registry.read_version(entry.version, entry.manifest)
    assert champion == version == registry.read_version(entry.version)
    contents = {name: registry.read_version_file(champion, name) for name in champion.files}
    assert json.loads(contents["verdict.json"])["decision"] == "promote"
    assert contents["model.onnx"] == b"exported now"
    assert not Path(registry.address_of(champion.folder, "model.pt")).exists(), "weights are stored once"
    assert json.loads(storage.read_file(registry.address_of(kept.folder, "verdict.json")))["decision"] == "keep"
    assert "model.onnx" not in registry.read_version(kept.name, kept.manifest).files


def test_two_writers_of_other_files_have_a_revision_each(local: Registry) -> None:
    """Whoever comes second at the list of files: no list that is not in the store is ever handed on."""
    files: dict[str, Path | bytes] = {"verdict.json": b"{}", "model.pt": b"weights", "model.json": b"{}"}
    create, others = storage.create_file, []

    def interrupted(to: str, content: bytes | Path) -> None:
        if to.endswith("manifest.json") and not others:
            others.append(None)
            others[0] = local.write_version({**files, "model.onnx": b"exported"})
        create(to, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "create_file", interrupted)
        mine = local.write_version(files)
    assert local.read_version(mine.name, mine.manifest) == mine
    assert local.read_version(mine.name, others[0].manifest) == others[0]
    assert [mine.folder, others[0].folder] == [f"versions/{mine.name}/2", f"versions/{mine.name}"]


def test_a_gap_in_the_log_is_promoted_over_by_nobody(local: Registry, tmp_path: Path) -> None:
    one, two, three = (trained(tmp_path / name) for name in ("one", "two", "three"))
    apply_verdict(local, *stored(local, one), by="x")
    late = stored(local, three, log_number=1)
    apply_verdict(local, *stored(local, two, log_number=1), by="y")
    Path(local.address_of("log", "00000001.json")).unlink()
    with pytest.raises(UserError, match=r"model/log/00000001.json is missing"):
        apply_verdict(local, *late, by="z")
    for entry in Path(local.address_of("log")).iterdir():
        entry.unlink()
    with pytest.raises(UserError, match=r"model/log/00000001.json is missing; restore it"):
        apply_verdict(local, *late, by="z")
    assert not [*Path(local.address_of("log")).iterdir()]


@pytest.mark.parametrize("file", ["model.pt", "manifest.json"])
def test_an_altered_version_is_named(file: str, local: Registry, tmp_path: Path) -> None:
    apply_verdict(local, *stored(local, trained(tmp_path / "trained")), by="x")
    version = local.read_log()[0].version
    path = Path(local.address_of("versions", version, file))
    path.write_bytes(path.read_bytes() + b" ")
    said = (
        f"{version}: the manifest.json with the SHA-256 .* altered"
        if file == "manifest.json"
        else f"{file}: is missing, damaged or"
    )
    with pytest.raises(UserError, match=said):
        download_champion(local, tmp_path / "fetched")
    path.unlink()
    said = (
        "has no complete version"
        if file == "manifest.json"
        else f"{file}: is missing, damaged or was altered; restore it"
    )
    with pytest.raises(UserError, match=said):
        download_champion(local, tmp_path / "again")
    assert not [*(tmp_path / "again").glob("*.pt")]


def test_a_person_can_promote_only_what_is_whole(local: Registry, tmp_path: Path) -> None:
    """Nor go back to it; an altered file that is no weights counts, too."""
    names = store_all(local, tmp_path, "one", "two")
    for name in names:
        promote_version(local, name, "why", by="me")
    Path(local.address_of("versions", names[0], "page.html")).write_text("altered")
    for said in (r"page.html: is missing, damaged or was altered; restore it", r"model.pt: is missing, damaged or"):
        with pytest.raises(UserError, match=said):
            promote_version(local, names[0], "why", by="me")
        with pytest.raises(UserError, match=said):
            roll_back_champion(local, "why", by="me")
        Path(local.address_of("versions", names[0], "model.pt")).unlink(missing_ok=True)
    assert len(local.read_log()) == 2


def test_what_a_person_decides(registry: Registry, tmp_path: Path) -> None:
    names = store_all(registry, tmp_path, "one", "two", "three")
    with pytest.raises(UserError, match="model has no champion; promote a version first"):
        download_champion(registry, tmp_path / "fetched")
    with pytest.raises(UserError, match="model 'model': has no previous champion"):
        roll_back_champion(registry, "why", by="me")
    for name in names:
        promote_version(registry, name, "I say so", by="me")
    for version, reason, said in (
        (names[2], "again", "already the champion, since 20"),
        (names[0], " ", "reason='': must not be empty"),
        ("latest", "why", "must be the SHA-256 of a version's weights, or at least its first 12 hexadecimal digits"),
        (names[0][:11], "why", f"must be .*; model has {', '.join(sorted(name[:12] for name in names))}"),
        ("0" * 64, "why", "does not exist; model has "),
    ):
        with pytest.raises(UserError, match=said):
            promote_version(registry, version, reason, by="me")
    assert roll_back_champion(registry, "too slow", by="me").version == names[1]
    assert roll_back_champion(registry, "too slow", by="me").version == names[0]
    with pytest.raises(UserError, match="no previous champion"):
        roll_back_champion(registry, "too slow", by="me")
    log = registry.read_log()
    assert [entry.action for entry in log] == ["promote"] * 3 + ["rollback"] * 2
    assert [(entry.by, entry.best) for entry in log] == [("me", entry.version) for entry in log]
    weights, _ = download_champion(registry, tmp_path / "fetched")
    assert weights.read_bytes() == b"one"


def test_a_version_is_known_by_its_first_digits(registry: Registry, tmp_path: Path) -> None:
    names = store_all(registry, tmp_path, "one", "two")
    given = (names[0][:12], names[1][:40].upper(), f" {names[0]}\n", f"{names[1][:12]} ")
    for version, expected in zip(given, (*names, *names), strict=True):
        assert promote_version(registry, version, "why", by="me").version == expected
    assert promote_version(registry, names[0][:12], "why", by="once", idempotent=True).number == 5
    assert promote_version(registry, names[0][:12], "why", by="once", idempotent=True).number == 5


def test_digits_of_two_versions_are_refused(local: Registry) -> None:
    """No two digests of real files begin with the same twelve digits."""
    names = ["a" * 12 + end * 52 for end in "bc"]
    for name in names:
        Path(local.address_of("versions", name)).mkdir(parents=True)
    with pytest.raises(UserError, match=f"matches {names[0]} and {names[1]}; give more"):
        promote_version(local, "a" * 12, "why", by="me")
    with pytest.raises(UserError, match=f"no complete version {names[1]} .*manifest.json is missing"):
        promote_version(local, names[1][:13], "why", by="me")


@pytest.mark.parametrize("address", ["folder", "S3"], indirect=True)
@pytest.mark.parametrize("use", [download_champion, promote_version, roll_back_champion])
def test_a_model_that_is_not_there_is_named(
    use: Callable[..., Any], address: str, registry: Registry, tmp_path: Path
) -> None:
    given: dict[Any, tuple[Any, ...]] = {promote_version: ("0" * 64, "why"), roll_back_champion: ("why",)}
    arguments = given.get(use, (tmp_path,))
    by = {"by": "me"} if use in given else {}
    with pytest.raises(UserError, match="has no models; release"):
        use(registry, *arguments, **by)
    for name in ("model", "digits"):
        store_all(Registry(address, name), tmp_path / name, "one")
    said = "unknown model 'Model': did you mean 'model'\\? choose one of digits, model"
    with pytest.raises(UserError, match=said):
        use(Registry(address, "Model"), *arguments, **by)


@pytest.mark.parametrize(
    ("log", "standing", "taken_back"),
    [("ABC", "ABC", ""), ("ABCba", "A", "BC"), ("ABaB", "AB", ""), ("ABAba", "A", "B")],
)
def test_what_stands_and_what_was_taken_back(log: str, standing: str, taken_back: str) -> None:
    """By hand, rollbacks in small letters: who becomes champion by one was not taken back, whatever was before."""
    entries = [
        Entry(number, "promote" if name.isupper() else "rollback", name.upper(), *["x"] * 6)
        for number, name in enumerate(log, 1)
    ]
    promotions, rollbacks = replay_promotions(entries)
    assert "".join(entry.version for entry in promotions) == standing
    assert {*rollbacks} == {*taken_back}


def test_a_pod_that_tries_again_decides_once(registry: Registry, tmp_path: Path) -> None:
    """An execution wants something once: what an earlier try of it has written is its own."""
    names = store_all(registry, tmp_path, "one", "two", "three")
    for name in names:
        first = promote_version(registry, name, "why", by=f"p/d/{name}", idempotent=True)
        assert promote_version(registry, name, "why", by=f"p/d/{name}", idempotent=True) == first
    back = roll_back_champion(registry, "why", by="p/d/back", idempotent=True)
    assert roll_back_champion(registry, "why", by="p/d/back", idempotent=True) == back
    assert back.version == names[1]
    promote_version(registry, names[0], "by somebody else in between", by="p/d/else", idempotent=True)
    assert roll_back_champion(registry, "why", by="p/d/back", idempotent=True) == back
    assert promote_version(registry, names[2], "why", by=f"p/d/{names[2]}", idempotent=True).number == 3
    with pytest.raises(UserError, match="already the champion"):
        promote_version(registry, names[0], "another model than before", by=f"p/d/{names[2]}", idempotent=True)
    assert roll_back_champion(registry, "why", by="p/d/another", idempotent=True).version == names[1]
    assert len(registry.read_log()) == 6


def test_other_weights_and_other_classes_are_refused(local: Registry, tmp_path: Path) -> None:
    one = trained(tmp_path / "one")
    stored(local, one)
    with pytest.raises(UserError, match=r"verdict: is about version aaaaaaaaaaaa, not "):
        stored(local, one, challenger="a" * 64)
    (one / SIDECAR).write_text((one / SIDECAR).read_text().replace('["a", "b"]', '["b", "a"]'))
    with pytest.raises(UserError, match="already in the registry, with another classes"):
        stored(local, one)


def test_looks_are_numbered_and_the_same_two_models_have_one(registry: Registry) -> None:
    numbers = [registry.register_look("t", pair, "champion", "superior") for pair in ("a", "b", "a", "c")]
    assert numbers == [1, 2, 1, 3]
    assert registry.register_look("another test split", "a", "champion", "superior") == 1
    assert registry.register_look("t", "a", "another champion", "superior") == 4
    assert registry.register_look("t", "a", "champion", "not_worse 0.05") == 5, "another test is another look"


def test_judges_at_the_same_time_have_a_look_each(local: Registry) -> None:
    """Also one who was killed before it had written down which: no look is two judges'."""

    def look(pair: int) -> int:
        return local.register_look("t", f"pair {pair}", "champion", "superior")

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(look, range(20))) == [*range(1, 21)]
