"""Settings from the environment: what each may be, where it is documented, and which pods are given it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli import ROOT

from flyte_ddp import settings
from flyte_ddp.errors import UserError
from flyte_ddp.pods import environment
from tasks import pods

ROW = re.compile(r"^\| ((?:`[A-Z_]+`(?:, )?)+) \|.*\| (yes|no)\b[^|]*\|$", re.MULTILINE)
DOCUMENTED = {
    name: row[2] == "yes"
    for row in ROW.finditer((ROOT / "docs/environment.md").read_text())
    for name in re.findall("[A-Z_]+", row[1])
}
VALUES = {
    "FLYTE_DDP_CACHE_BYTES": "7",
    "FLYTE_DDP_RESULTS": "s3://bucket/x",
    "WANDB_BASE_URL": "https://wandb.example.com",
}


def test_every_setting_is_documented() -> None:
    source = Path(settings.__file__).read_text()
    read = set(re.findall(r'"((?:FLYTE_DDP|WANDB)_[A-Z_]+)"', source)) - {settings.REQUESTED_GPUS}
    assert read <= DOCUMENTED.keys()
    assert len(DOCUMENTED) == 20


@pytest.mark.parametrize("name", DOCUMENTED)
def test_pods_are_given_what_the_document_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = VALUES.get(name, "some value")
    monkeypatch.setenv(name, value)
    given = [pods.training_pod(), pods.prediction_pod(), pods.promoting_pod(), pods.light_pod()]
    carried = [options["environment"].get(name) == value for options in given]
    assert any(carried) is DOCUMENTED[name]
    assert carried[0] or name == environment.REGISTRY_VARIABLE or not DOCUMENTED[name], (
        "training pods have all settings"
    )
    assert not any(value in options["environment"].values() for options in given) or DOCUMENTED[name]


def test_a_folder_of_this_machine_is_no_setting_for_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_DDP_RESULTS", "/a/folder")
    assert "FLYTE_DDP_RESULTS" not in environment.training_environment()


def test_a_pods_specification_has_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "https://me:hidden@wandb.example.com")
    with pytest.raises(UserError, match=r"^WANDB_BASE_URL='https://\*\*\*@wandb.example.com': has a user name or a"):
        environment.training_environment()


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("FLYTE_DDP_LOADER_THREADS", "loader_threads"),
        ("FLYTE_DDP_WANDB_TABLE_ROWS", "wandb_table_rows"),
        ("FLYTE_DDP_CACHE_BYTES", "cache_bytes"),
    ],
)
def test_what_is_counted_is_a_whole_number(name: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a thread is not none, which would mean all cores."""
    for text, value in {"3": 3, "1e3": 1000, "2.0": 2}.items():
        monkeypatch.setenv(name, text)
        assert getattr(settings.from_environment(), field) == value
    for text in ("0.5", "1.5", "-1", "x", "inf", "nan"):
        monkeypatch.setenv(name, text)
        with pytest.raises(UserError, match=rf"^{name}='{text}': must be a"):
            settings.from_environment()
