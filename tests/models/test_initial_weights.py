"""Weights to start from: what a file may hold, what is left out of it, and what is said of one that does not fit."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from file_server import FileServer
from mounts import file_size_limit
from torch import nn
from torchvision.models import resnet18

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.models import saving
from flyte_ddp.core.models.sidecar import read_sidecar
from flyte_ddp.core.progress import Progress
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.models.initial_weights import (
    FILE_ADVICE,
    fetch_initial_weights,
    hash_initial_weights,
    load_initial_weights,
)
from flyte_ddp.plans import identity
from flyte_ddp.run import run_training
from flyte_ddp.storage import transfer


class Named(nn.Module):
    """With names as models have them."""

    def __init__(self, classes: int = 3, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
        self.fc = nn.Linear(4, classes)


class Turned(Named):
    """With the sign of a weight turned since its first version."""

    _version = 2

    def _load_from_state_dict(
        self, state_dict: dict[str, torch.Tensor], prefix: str, local_metadata: dict[str, int], *rest: list[str]
    ) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}fc.weight"] = -state_dict[f"{prefix}fc.weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)  # type: ignore[arg-type]


class Lit(nn.Module):
    """As Lightning has a model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.net = inner


def loaded(
    into: nn.Module, content: Any, folder: Path, model: str = "small_cnn", init_skip: str = ""
) -> dict[str, torch.Tensor]:
    path = folder / "weights.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    load_initial_weights(into, path, name=model, init_from=str(path), init_skip=init_skip)
    return into.state_dict()


def fetching(address: str, folder: Path) -> AbstractContextManager[Path | None]:
    return fetch_initial_weights(address, "small_cnn", folder, Progress("off"), mirror="")


def state(**options: int) -> dict[str, torch.Tensor]:
    return Named(**options).state_dict()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)


def prefixed(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": value for name, value in tensors.items()}


def without_counts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if "num_batches" not in name}


HELD: dict[str, Callable[[], Any]] = {
    "a state_dict": lambda: state(seed=1),
    "compiled DDP's": lambda: prefixed("module._orig_mod.", state(seed=1)),
    "a checkpoint of Lightning's": lambda: {"epoch": 3, "state_dict": Lit(Named(seed=1)).state_dict()},
    "one in the other": lambda: {"model": {"state_dict": state(seed=1)}},
    "without BatchNorm's counter": lambda: without_counts(state(seed=1)),
}


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_weights_are_found(held: Callable[[], Any], tmp_path: Path) -> None:
    assert_equal(loaded(Named(), held(), tmp_path), state(seed=1))


def test_weights_are_found_under_other_names(tmp_path: Path) -> None:
    """A model's own names may have the prefix, and what only the file has is left out."""
    named = prefixed("net.", state(seed=1))
    assert_equal(loaded(Lit(Named()), named, tmp_path), named)
    content = {"state_dict": named | {"criterion.weight": torch.ones(3)}}
    assert_equal(loaded(Named(), content, tmp_path, init_skip="criterion"), state(seed=1))


@pytest.mark.parametrize("version", [1, 2])
def test_modules_get_the_versions_that_the_file_has(version: int, tmp_path: Path) -> None:
    model = Turned(seed=1)
    model._version = version
    found = loaded(Turned(), {"epoch": 1, "state_dict": Lit(Lit(model)).state_dict()}, tmp_path)
    sign = 1 if version == 2 else -1
    assert torch.equal(found["fc.weight"], sign * model.fc.weight)


@pytest.mark.parametrize("skip", [" fc.weight , fc.bias", "fc,body.1"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_the_head_is_left_out(skip: str, prefix: str, tmp_path: Path) -> None:
    found = loaded(Named(), prefixed(prefix, state(classes=7, seed=1)), tmp_path, init_skip=skip)
    for name, value in state(seed=1).items():
        seeded = name.startswith(("fc", "body.1") if "body" in skip else "fc")
        assert torch.equal(found[name], state()[name] if seeded else value)


class Own:
    """Something that only code can make."""


@pytest.mark.parametrize("content", [state(classes=7), resnet18().state_dict()])
def test_what_does_not_fit_is_said_in_a_sentence(content: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not fit the model 'small_cnn': .* init_skip$") as caught:
        loaded(Named(), content, tmp_path)
    assert "\n" not in caught.value.message


def test_a_part_that_the_model_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^init_skip='head': the model has no part 'head'; its parts are body, fc, "):
        loaded(Named(), state(), tmp_path, init_skip="head")


NO_NAMES = f"contains no named tensors; {FILE_ADVICE}"
DAMAGED = f"is damaged, or .* could run code .*; {FILE_ADVICE}"
NO_WEIGHTS = [
    ({"state_dict": state(), "hyper_parameters": Own()}, DAMAGED),
    ({"state_dict": {"a": 1}}, NO_NAMES),
    (torch.ones(3), NO_NAMES),
    *((content, DAMAGED) for content in (b"", b"hello", b"PK\x03\x04", b"\x80\x02]q\x00")),
]


@pytest.mark.parametrize(("content", "words"), NO_WEIGHTS)
def test_what_holds_no_weights(content: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^init_from='{tmp_path}/weights\.pt': {words}$"):
        loaded(Named(), content, tmp_path)


def test_a_file_that_is_not_there_is_called_by_its_name(tmp_path: Path, server: FileServer) -> None:
    for missing in (str(tmp_path / "no.pt"), f"file://{tmp_path}/no.pt", str(tmp_path)):
        hp = Hyperparameters(init_from=missing)
        what = "is a folder" if missing == str(tmp_path) else "does not exist"
        with pytest.raises(UserError, match=rf"^init_from='{missing}': {what}; give a file"):
            identity.run_name(hp, "data")
        with pytest.raises(UserError, match=rf"^init_from='{missing}': {what}"), fetching(missing, tmp_path):
            pass
    missing = f"{server.url}/no.pt"
    with pytest.raises(UserError, match=rf"^init_from='{missing}': cannot be read: HTTP 404 .* server is up$"):
        identity.run_name(Hyperparameters(init_from=missing), "data")
    with pytest.raises(UserError, match=f"'{missing}': cannot be fetched: HTTP 404"), fetching(missing, tmp_path):
        pass


def test_weights_behind_addresses(tmp_path: Path, server: FileServer) -> None:
    torch.save(state(seed=1), tmp_path / "weights.pt")
    server.files["weights.pt"] = (tmp_path / "weights.pt").read_bytes()
    for address in (f"file://{tmp_path}/weights.pt", f"{server.url}/weights.pt"):
        into, hp = Named(), Hyperparameters(init_from=address)
        assert identity.run_name(hp, "data") != identity.run_name(Hyperparameters(), "data")
        with fetching(address, tmp_path) as path:
            assert path is not None
            load_initial_weights(into, path, name="Named", init_from=address, init_skip="")
        assert torch.equal(into.fc.weight, state(seed=1)["fc.weight"])


def test_a_download_of_weights_is_tried_again(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "FIRST_DELAY", 0.0)
    server.files["weights.pt"], server.faults["weights.pt"] = b"the weights", [503, "truncate"]
    with fetching(f"{server.url}/weights.pt", tmp_path) as path:
        assert path is not None
        assert path.read_bytes() == b"the weights"


def test_a_disk_that_fills_up_while_weights_are_fetched(tmp_path: Path, server: FileServer) -> None:
    server.files["weights.pt"] = bytes(200_000)
    said = pytest.raises(UserError, match=f"cannot write {tmp_path}/.*: File too large; free some space")
    with file_size_limit(100_000), said, fetching(f"{server.url}/weights.pt", tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_too_long() -> None:
    with pytest.raises(UserError, match=r"^init_from='n+': cannot be read: File name too long"):
        hash_initial_weights("n" * 300, None)


def test_a_part_is_only_skipped_where_there_are_weights() -> None:
    with pytest.raises(UserError, match="init_skip='fc': requires init_from, which is empty"):
        Hyperparameters(init_skip="fc")


def test_a_run_says_what_did_not_start_from_the_file(digits: Path, tmp_path: Path, capfd) -> None:
    base = Hyperparameters(num_ranks=1, max_steps=1, learning_rate=1e-9, weight_decay=0.0)
    settings = Settings(progress="lines", wandb_mode="disabled")
    first = run_training(replace(base, seed=3), digits, tmp_path / "first", settings)
    before = torch.load(first.model, weights_only=True)
    head = list(before)[-2:]
    part = head[0].removesuffix(".weight")
    hp = replace(base, init_from=str(first.model), init_skip=part)
    result = run_training(hp, digits, tmp_path / "second", settings)
    said = f"Started with random weights and not from init_from: {', '.join(head)}."
    assert said in capfd.readouterr().err
    start, *_, end = read_records(result.metrics)
    assert start["init_skipped"] == head
    assert said in end["notes"]
    assert said in result.report.read_text()
    sidecars = [json.loads(run.sidecar.read_text()) for run in (first, result)]
    assert ["init_from" in each["digests"] for each in sidecars] == [False, True]
    takes = read_sidecar(first.sidecar).input
    assert takes == saving.make_input_spec(takes).to_sidecar_input()
    assert sidecars[0]["input"]["mode"] == "L"
    after = torch.load(result.model, weights_only=True)
    for name, value in before.items():
        if "running" not in name and "num_batches" not in name:
            assert torch.allclose(after[name], value, atol=1e-6) == (name not in head)
