"""What of a folder is sent to workers on other hosts."""

from __future__ import annotations

import pickle
import zlib
from pathlib import Path

import pytest

from flyte_ddp.config import Hyperparameters
from flyte_ddp.launch.remote.sources import packed


def test_secrets_stay_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Modules are sent whatever their names are, and a line says how much that is."""
    sent = ["model.py", "secrets.py", "credentials/__init__.py", "data/words.json", "tokenizer.json", "keys.txt"]
    kept = [".env", "prod.env", "secrets.yaml", "wandb-secret.txt", "credentials", "gcp_credentials.json", "token"]
    kept += ["x.pem", "tls/server.key", "id_ed25519", "passwords.txt", "secrets/wandb", ".netrc", "in/kubeconfig.yaml"]
    for name in (*sent, *kept):
        path = tmp_path / (name if name != "credentials" else "etc/credentials")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("content")
    found = pickle.loads(zlib.decompress(packed(Hyperparameters(), tmp_path)))
    assert sorted(name for _, name, _ in found) == sorted(sent)
    said = f"6 files of {tmp_path} (42 bytes) are sent to the workers; left out, as their names are those of secrets: "
    first = "etc/credentials, gcp_credentials.json, id_ed25519, in/kubeconfig.yaml, passwords.txt"
    assert capsys.readouterr().err == f"{said}{first} and 7 more\n"


def test_data_with_names_for_secrets_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that reads them would not find them, and nobody know why."""
    for name in ("token.json", "special_token.txt", "model.py"):
        (tmp_path / name).write_text("content")
    packed(Hyperparameters(), tmp_path)
    assert capsys.readouterr().err.endswith(" are those of secrets: special_token.txt, token.json\n")


def test_where_all_is_sent_no_file_is_said_to_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text("content")
    packed(Hyperparameters(), tmp_path)
    assert capsys.readouterr().err == f"1 files of {tmp_path} (7 bytes) are sent to the workers\n"
