"""What users' own code hands in while it trains, and the copy of it elsewhere."""

import json
import threading
from pathlib import Path

import pytest
from processes import wait_until
from s3_server import s3_server

from flyte_ddp import storage
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core import results
from flyte_ddp.core.errors import StoppedError, UserError
from flyte_ddp.core.settings import Settings
from flyte_ddp.run import run_training
from flyte_ddp.storage import result_store, transfer
from flyte_ddp.storage.result_store import mirror_results

HP = Hyperparameters(model="user_models:handing_in", epochs=2, max_steps=4, batch_size=100, num_ranks=1)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    with results.redirect_results(results.ResultWriter(tmp_path / "run").write, rank=3):
        results.submit("maps/epoch-1.png", b"png")
        results.event(loss=0.5)
    return tmp_path / "run/results"


def test_files_and_events_are_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a run nothing happens. Half a line of a writer that was killed spoils no event, nor does NaN."""
    assert (kept / "maps/epoch-1.png").read_bytes() == b"png"
    (record,) = [json.loads(line) for line in (kept / "events.jsonl").read_text().splitlines()]
    assert record.pop("time") > 1_700_000_000
    assert record == {"rank": 3, "loss": 0.5}
    with (kept / "events.jsonl").open("a") as file:
        file.write('{"rank": 0, "lo')
    results.ResultWriter(kept.parent).write(results.Event({"rank": 1, "loss": float("nan")}))
    *_, half, last = (kept / "events.jsonl").read_text().splitlines()
    assert half == '{"rank": 0, "lo'
    assert json.loads(last)["loss"] is None
    (kept / "elsewhere").mkdir()
    monkeypatch.chdir(kept / "elsewhere")
    results.submit("a", b"")
    results.event(a=1)
    assert [*Path.cwd().iterdir()] == []


@pytest.mark.parametrize("name", [*("", "/etc/passwd", "a/../../b", "a/.b", "a\\b", "events.jsonl", "./events.jsonl")])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    """In the rank, and where it is kept: the two need not be the same host."""
    write = results.ResultWriter(tmp_path).write_file
    for hand_in in (results.submit, lambda *piece: write(results.ResultPiece(*piece))):
        with pytest.raises(UserError, match="must be a path below results/ such as"):
            hand_in(name, b"")
    assert [*tmp_path.iterdir()] == []


def test_what_is_no_file_and_no_event(kept: Path, tmp_path: Path) -> None:
    (kept / "out").symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"leads out of .*; remove the link"):
        results.ResultWriter(kept.parent).write_file(results.ResultPiece("out/a", b""))
    assert not (tmp_path / "a").exists()
    with pytest.raises(UserError, match=r"event \['value'\]: .* not JSON serializable; give numbers, text"):
        results.event(value=object())
    with pytest.raises(UserError, match="result 'a': content is of type int; must be bytes"):
        results.submit("a", 5)


@pytest.mark.slow
def test_a_copy_is_made_while_training_on_s3(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "served/bucket").mkdir(parents=True)
    copy = tmp_path / "served/bucket/all/run"
    with s3_server(tmp_path / "served") as server:
        for name, value in server.flyte_environment().items():
            monkeypatch.setenv(name, value)
        with mirror_results(kept.parent, "s3://bucket/all/", kept.parent.name, resuming=False):
            wait_until((copy / "maps/epoch-1.png").exists)  # what was there before
            (kept / "last").write_bytes(b"2")
        assert (copy / "last").read_bytes() == b"2"
        assert (copy / "events.jsonl").read_bytes() == (kept / "events.jsonl").read_bytes()
        assert {path.name for path in copy.iterdir()} == {"maps", "events.jsonl", "last"}


@pytest.mark.parametrize("address", ["s3://bucket/all", "/dev/null/all", "the run's own folder"])
def test_a_place_that_takes_nothing_is_refused(digits: Path, tmp_path, monkeypatch, address: str) -> None:
    address = str(tmp_path) if "own" in address else address
    nobody = {"ENDPOINT_URL": "http://127.0.0.1:9", "MAX_ATTEMPTS": "1", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
    for setting, value in nobody.items():
        monkeypatch.setenv(f"AWS_{setting}", value)
    monkeypatch.setattr(transfer, "FIRST_DELAY", 0.01)
    settings = Settings(progress="off", wandb_mode="disabled", results_copy=address)
    with pytest.raises(UserError, match=r"cannot be written to .*; correct the address") as caught:
        run_training(HP, digits, tmp_path / "run", settings)
    assert str(caught.value).startswith(f"FLYTE_DDP_RESULTS='{address}': ")


def test_one_file_that_cannot_be_copied_keeps_no_other_back(kept: Path, tmp_path, capsys) -> None:
    copies = tmp_path / "copies"
    with mirror_results(kept.parent, str(copies), kept.parent.name, resuming=False):
        (copies / "run/later").mkdir()
        (kept / "later").write_bytes(b"1")
        (kept / "zz").write_bytes(b"2")
    said = capsys.readouterr().err
    assert f"results are not copied to {copies}/run: later (UnavailableError" in said
    assert f"not all results were copied to {copies}/run; all are in {kept}" in said
    assert (copies / "run/zz").read_bytes() == b"2"


@pytest.mark.parametrize("readable", [True, False])
def test_a_run_that_resumes_in_another_pod_keeps_its_events(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], readable: bool
) -> None:
    """Its run folder begins empty there. A place that may only be written to, as S3 can be, ends no run."""
    with mirror_results(kept.parent, str(tmp_path / "copies"), kept.parent.name, resuming=False):
        pass
    before = (kept / "events.jsonl").read_text() if readable else ""

    def refuse(address: str) -> bytes:
        raise storage.ForbiddenError("HTTP 403 AccessDenied")

    if not readable:
        monkeypatch.setattr(storage, "read_file", refuse)
    other = tmp_path / "other/run"
    other.mkdir(parents=True)
    with mirror_results(other, str(tmp_path / "copies"), other.name, resuming=True):
        results.ResultWriter(other).write(results.Event({"rank": 0, "time": 1.0}))
    for folder in (other / "results", tmp_path / "copies/run"):
        assert (folder / "events.jsonl").read_text() == before + '{"time": 1.0, "rank": 0}\n'
    said = f"results: {tmp_path}/copies/run/events.jsonl of earlier attempts cannot be read (HTTP"
    assert (said in capsys.readouterr().err) == (not readable)


def test_a_slow_store_does_not_hold_up_a_pod_that_is_told_to_stop(kept: Path, tmp_path, monkeypatch, capsys) -> None:
    never = threading.Event()
    monkeypatch.setattr(result_store.Mirror, "copy_changed_files", lambda *_: never.wait())
    monkeypatch.setattr(result_store, "STOPPED_SECONDS", 0.1)
    with (
        pytest.raises(StoppedError),
        mirror_results(kept.parent, str(tmp_path / "copies"), kept.parent.name, resuming=False),
    ):
        raise StoppedError("SIGTERM", 3)
    assert "not all results were copied" in capsys.readouterr().err
    never.set()
