"""What users' own code hands in while it trains, and the copy of it elsewhere."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from s3_server import s3_server
from user_models import wait_for

from flyte_ddp import result_store, results
from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings

QUIET = Settings(progress="off", wandb_mode="disabled")
HP = Hyperparameters(model="user_models:handing_in", epochs=2, max_steps=4, batch_size=100, num_ranks=1)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A run folder's results, with one of them."""
    (tmp_path / "run").mkdir()
    with results.delivered_by(partial(results.keep, tmp_path / "run"), rank=3):
        results.submit("maps/epoch-1.png", b"png")
        results.event(loss=0.5)
    return tmp_path / "run/results"


def test_files_and_events_are_kept(kept: Path) -> None:
    assert (kept / "maps/epoch-1.png").read_bytes() == b"png"
    (record,) = [json.loads(line) for line in (kept / "events.jsonl").read_text().splitlines()]
    assert record.pop("time") > 1_700_000_000
    assert record == {"rank": 3, "loss": 0.5}


def test_outside_a_run_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results.submit("a", b"")
    results.event(a=1)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "..", "../model.pt", "a/../../b", "a/", ".hidden", "a/.b", "a\\b", "a\nb", "events.jsonl"],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    """In the rank, and where it is kept: the two need not be the same host."""
    for hand_in in (results.submit, partial(results.keep, tmp_path, "result")):
        with pytest.raises(UserError, match="must be a path below results/ such as"):
            hand_in(name=name, content=b"")
    assert [*tmp_path.iterdir()] == []


def test_links_that_lead_elsewhere_are_refused(kept: Path, tmp_path: Path) -> None:
    (kept / "out").symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"leads out of .*; remove the link"):
        results.keep(kept.parent, "result", name="out/a", content=b"")
    assert not (tmp_path / "a").exists()


def test_an_event_must_be_json(tmp_path: Path) -> None:
    with (
        results.delivered_by(partial(results.keep, tmp_path), rank=0),
        pytest.raises(UserError, match=r"event \['value'\]: .* not JSON serializable; give numbers, text"),
    ):
        results.event(value=object())


def test_a_run_that_begins_anew_has_none_of_the_run_before(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    stale = tmp_path / "run/results/stale"
    stale.parent.mkdir(parents=True)
    stale.touch()
    run_training(HP, digits, tmp_path / "run", QUIET)
    assert not stale.exists()
    assert sorted(path.name for path in stale.parent.iterdir()) == ["events.jsonl", "forward-1.txt", "forward-2.txt"]


def test_a_copy_in_a_folder_is_made_while_training(kept: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copies/run"
    with result_store.copied(kept.parent, str(tmp_path / "copies")):
        assert (copy / "maps/epoch-1.png").read_bytes() == b"png", "what was there before"
        (kept / "later").write_bytes(b"1")
        wait_for(copy / "later")
        (kept / "last").write_bytes(b"2")
    assert (copy / "last").read_bytes() == b"2"
    assert {path.name for path in copy.iterdir()} == {"maps", "events.jsonl", "later", "last"}


@pytest.mark.parametrize("flytes_own", [False, True])
def test_a_copy_on_s3(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flytes_own: bool) -> None:
    (tmp_path / "served/bucket").mkdir(parents=True)
    with s3_server(tmp_path / "served") as server:
        for name, value in (server.flyte_environment() if flytes_own else server.aws_environment()).items():
            monkeypatch.setenv(name, value)
        with result_store.copied(kept.parent, "s3://bucket/all/"):
            (kept / "later").write_bytes(b"1")
        copy = tmp_path / "served/bucket/all/run"
        assert (copy / "later").read_bytes() == b"1"
        assert (copy / "events.jsonl").read_bytes() == (kept / "events.jsonl").read_bytes()


@pytest.mark.parametrize(
    "address", [pytest.param("s3://bucket/all", marks=pytest.mark.slow), "/dev/null/all", "nothing-like-it://a"]
)
def test_a_place_that_takes_nothing_is_refused(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    nobody = {"ENDPOINT_URL": "http://127.0.0.1:9", "MAX_ATTEMPTS": "1", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
    for setting, value in nobody.items():
        monkeypatch.setenv(f"AWS_{setting}", value)
    settings = Settings(progress="off", wandb_mode="disabled", results=address)
    with pytest.raises(UserError, match=r"cannot be written to .*; correct it, or give access") as caught:
        run_training(HP, digits, tmp_path / "run", settings)
    assert str(caught.value).startswith(f"FLYTE_DDP_RESULTS='{address}': ")


def test_a_copy_that_is_not_whole_is_told(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copies = tmp_path / "copies"
    with result_store.copied(kept.parent, str(copies)):
        (copies / "run/later").mkdir()
        (kept / "later").write_bytes(b"1")
    assert f"results are in {kept}, but not all in {copies}/run (IsADirectoryError" in capsys.readouterr().err
