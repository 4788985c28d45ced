"""The registry's log: one winner for each number, whoever is killed and whatever is lost."""

import json
from pathlib import Path

import promoter
import pytest
from faulty_proxy import Proxy, faulty_proxy
from s3_server import S3Server

from flyte_ddp.core.errors import UserError
from flyte_ddp.release.promotion_log import replay_promotions
from flyte_ddp.release.registry import Registry


@pytest.mark.slow
@pytest.mark.parametrize("address", ["folder", "S3"], indirect=True)
@pytest.mark.parametrize(("processes", "rounds"), [(5, 3), pytest.param(20, 50, marks=pytest.mark.exhaustive)])
def test_of_many_who_want_the_next_entry_one_gets_it(processes: int, rounds: int, address: str) -> None:
    names = [f"process {number}" for number in range(processes)]
    said = promoter.race_at_once(address, names, rounds)
    log = Registry(address, "model").read_log()
    assert [entry.number for entry in log] == [*range(1, rounds + 1)]
    for number, entry in enumerate(log):
        winners, won, reasons = zip(*(each[number] for each in said), strict=True)
        assert {*winners} == {entry.by}
        assert [name for name, here in zip(names, won, strict=True) if here] == [entry.by]
        lost = [reason for reason, here in zip(reasons, won, strict=True) if not here]
        assert all(reason.startswith(f"{entry.by} was faster: entry {number + 1} ") for reason in lost)


def test_a_store_that_replaces_files_is_refused(s3: tuple[S3Server, Proxy], bucket: str, monkeypatch) -> None:
    """As the tests' S3 server is without the proxy."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3[0].endpoint)
    with pytest.raises(UserError, match="storage ignores If-None-Match"):
        promoter.append(Registry(bucket, "model"), None)
    assert not Registry(bucket, "model").read_log()


@pytest.mark.parametrize("fault", ["lost", "conflicts"])
def test_a_lost_answer_or_a_conflict_is_no_defeat(fault: str, s3: tuple[S3Server, Proxy], bucket: str) -> None:
    paths = getattr(s3[1], fault)
    paths.append(f"{bucket.removeprefix('s3://')}/model/log/00000001.json")
    assert promoter.append(Registry(bucket, "model"), None).number == 1
    assert not paths


@pytest.fixture
def three(tmp_path: Path) -> Registry:
    """A registry in a folder whose log has three entries."""
    registry, before = Registry(str(tmp_path / "registry"), "model"), None
    for who in ("one", "two", "three"):
        before = promoter.append(registry, before, who)
    return registry


@pytest.mark.parametrize("gone", [1, 2])
def test_a_lost_entry_stops_promotions_and_no_prediction(gone: int, three: Registry) -> None:
    last = three.read_champion()
    Path(three.entry_address(gone)).unlink()
    assert three.read_champion() == last
    with pytest.raises(ValueError, match=rf"model/log/0000000{gone}.json is missing; restore it, as no entry may be"):
        three.read_log()


@pytest.mark.parametrize(
    ("name", "content", "of_champion", "said"),
    [
        ("log/00000001.json", "", "", "log/00000002.json does not follow the entry before it: one of the two was"),
        ("log/00000001.json", "{", "", "log/00000001.json is damaged; restore it"),
        ("log/00000002.json", "", "does not follow", "log/00000003.json does not follow the entry before it"),
        ("log/00000003.json", "{", "damaged", "log/00000003.json is damaged; restore it"),
    ],
)
def test_what_was_altered_is_named(name: str, content: str, of_champion: str, said: str, three: Registry) -> None:
    """By promotions all of it; by who reads the champion only what that one has to read."""
    last, path = three.read_champion(), Path(three.address_of(name))
    path.write_text(content or path.read_text().replace("why not", "because"))
    with pytest.raises(ValueError, match=said):
        three.read_log()
    if of_champion:
        with pytest.raises(ValueError, match=of_champion):
            three.read_champion()
    else:
        assert three.read_champion() == last


@pytest.mark.parametrize("number", [4, 5, 300_000])
def test_a_stray_copy_of_an_entry_is_no_champion(number: int, three: Registry) -> None:
    """It is named at once, however large its number is."""
    content = json.loads(Path(three.entry_address(1)).read_text()) | {"number": number}
    Path(three.entry_address(number)).write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"{number:08}.json does not follow the entry before it.* delete a stray copy"):
        three.read_champion()
    with pytest.raises(UserError, match="does not follow" if number == 4 else "log/00000004.json is missing; restore"):
        three.read_log()


@pytest.mark.parametrize(
    "wrong",
    [{"action": "burn"}, {"version": 0}, {"manifest": "x"}, {"best": None}, {"number": True}, {"reason": ["why"]}],
)
def test_an_entry_of_another_form_is_damaged(wrong: dict[str, object], three: Registry) -> None:
    path = Path(three.entry_address(3))
    for content in (json.dumps(json.loads(path.read_text()) | wrong), "[" * 100_000, "[]", "null"):
        path.write_text(content)
        with pytest.raises(UserError, match=r"log/00000003.json is damaged; restore it"):
            three.read_champion()


def test_a_rollback_of_nothing_is_named(three: Registry) -> None:
    path = Path(three.entry_address(1))
    path.write_text(path.read_text().replace("promote", "rollback"))
    with pytest.raises(UserError, match="entry 1 of the log: rolls back, but no promotion is in force"):
        replay_promotions([three.read_entry(1)])


def test_a_right_that_is_missing_is_an_error(s3: tuple[S3Server, Proxy], bucket: str, monkeypatch) -> None:
    """It is not taken for a file that is not there."""
    registry = Registry(bucket, "model")
    entry = promoter.append(registry, None)
    with faulty_proxy(s3[0].endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        assert registry.read_champion() == entry
        proxy.denied = (f"{bucket.removeprefix('s3://')}/model/log/00000001.json",)
        with pytest.raises(UserError, match="model cannot be read: HTTP 403 AccessDenied; check"):
            registry.read_champion()
        proxy.denied, proxy.lists = (), False
        with pytest.raises(UserError, match="model cannot be listed: HTTP 403"):
            registry.read_champion()
