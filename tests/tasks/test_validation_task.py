"""The task before training: what it warns of, and what it refuses before a GPU is paid for."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.policy_check import check_policy
from flyte_ddp.release.promotion import promote_version
from flyte_ddp.release.registry import Registry
from flyte_ddp.task_bodies.validation import HELD_OUT
from flyte_ddp.validation.profile import DataProfile, SplitProfile
from tasks.validation import validate_dataset

EVEN = SplitProfile(1000, {"0": 500, "1": 500}, statistics={"colour modes": {"RGB": 1000}})
PROFILE = DataProfile(["cat", "dog"], EVEN, EVEN, 0, 0, [], {}, [], [])
GREY = replace(PROFILE, training=replace(EVEN, statistics={"colour modes": {"L": 1000}}))

OWN = """
from flyte_ddp.objectives import HIGHER, Classification

class Median(Classification):
    measures = {"median": HIGHER}

    def measure(self, columns):
        return {"median": float(columns["loss"].median())}

class Scored(Median):
    def scores(self, columns):
        return -columns["loss"]
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv("FLYTE_DDP_REGISTRY", f"file://{tmp_path}/registry")  # as in a pod, which takes no bare path
    return Registry(str(tmp_path / "registry"), "pets")


def make_champion(registry: Registry, profile: str) -> None:
    """Store a version that was trained on data of this profile, and promote it."""
    files = {"model.pt": b"weights", "model.json": b"{}", "data_profile.json": profile.encode()}
    promote_version(registry, registry.write_version(files).name, "to begin", by="me")


def validate(
    tmp_path: Path,
    test_dataset: str = "image_folder:tests",
    dataset: str = "image_folder:pets",
    slices: str = "",
    max_shift: float = 1.0,
) -> list[str]:
    """Run the task's function and return its warnings."""
    hp = Hyperparameters(dataset=dataset, test_dataset=test_dataset)
    policy = Policy(slices=slices, max_shift=max_shift)
    found = validate_dataset.task_function(FlyteDirectory(str(tmp_path)), PROFILE, hp, "pets", policy)
    assert found.data.path == str(tmp_path)
    return list(found.warnings)


def test_a_test_set_of_its_own_is_recommended(registry: Registry, tmp_path: Path) -> None:
    assert validate(tmp_path, test_dataset="") == [HELD_OUT]
    assert validate(tmp_path) == []
    assert not registry.read_log()


@pytest.mark.parametrize(
    ("profile", "warning"),
    [
        (GREY.to_json(), "training split: colour modes differ from the champion's in 100% of samples"),
        ('{"classes": []}', "the data are not compared with the champion's: data_profile.json of version "),
    ],
)
def test_other_data_than_the_champions(registry: Registry, tmp_path: Path, profile: str, warning: str) -> None:
    make_champion(registry, profile)
    [found] = validate(tmp_path)
    assert found.startswith(warning)


def test_a_change_is_printed_whatever_shows_progress_and_a_policy_may_forbid_it(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLYTE_DDP_PROGRESS", "off")
    grown = {"colour modes": {"RGB": 960, "L": 40}}
    make_champion(registry, replace(PROFILE, training=replace(EVEN, statistics=grown)).to_json())
    assert validate(tmp_path) == [], "4 % is too little to tell"
    assert capsys.readouterr().err == ""
    with pytest.raises(
        UserError, match=r"max_shift=0\.03: training split: colour modes differ .*raise max_shift in --p"
    ):
        validate(tmp_path, max_shift=0.03)
    assert "warning: training split: colour modes differ from the champion's in 4%" in capsys.readouterr().err


def test_a_gap_in_the_log_is_refused_before_training(registry: Registry, tmp_path: Path) -> None:
    make_champion(registry, PROFILE.to_json())
    Path(registry.address_of("log", "00000001.json")).rename(registry.address_of("log", "00000002.json"))
    with pytest.raises(UserError, match=r"pets/log/00000001.json is missing"):
        validate(tmp_path)


def test_slices_of_data_with_own_ids_have_these_ids(registry: Registry, tmp_path: Path) -> None:
    assert not registry.read_log()
    slices = tmp_path / "slices.csv"
    slices.write_text("id,slice\nfirst,hard\n")
    with pytest.raises(UserError, match="id 'first' in line 2 is not in the test split"):
        validate(tmp_path, "", "fashion_mnist", str(slices))
    np.save(tmp_path / "test_ids.npy", np.array(["first", "second"]))
    assert validate(tmp_path, "", "fashion_mnist", str(slices)) == []
    slices.write_text("id,slice\n0,hard\n")
    with pytest.raises(UserError, match="id '0' in line 2 is not in the test split"):
        validate(tmp_path, "", "fashion_mnist", str(slices))


@pytest.mark.parametrize(
    ("objective", "samples", "refused"),
    [
        ("own_median:Median", 20_001, True),
        ("own_median:Median", 20_000, False),
        ("own_median:Scored", 20_001, False),
        ("regression by rmse", 20_001, False),
        ("regression by mae", 20_001, True),
    ],
)
def test_more_samples_than_can_be_left_out_one_at_a_time_are_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str, samples: int, refused: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("own_median.py").write_text(OWN)
    profile = replace(PROFILE, test=replace(EVEN, samples=samples), target_shape=[3])
    name, _, measure = objective.partition(" by ")
    hp = Hyperparameters(dataset="fashion_mnist", objective=name, **({"select_by": measure} if measure else {}))
    said = "20,001 samples are more than 20,000 to leave out one at a time"
    with pytest.raises(UserError, match=said) if refused else nullcontext():
        check_policy(Policy(), hp, profile)
