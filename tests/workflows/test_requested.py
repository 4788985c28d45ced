"""What check_inputs refuses before a pod with GPUs starts, for each workflow by what its ranks will get."""

from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.machine import resources
from flyte_ddp.pods.paths import read_registry_address
from flyte_ddp.pods.profiles import PROFILES
from flytekitplugins.ddp.flyte import translate_errors_for_flyte
from tasks.preparation import check_inputs


@pytest.mark.parametrize(
    ("profile", "engine", "nodes", "hp", "refusal"),
    [
        ("gpu", "", "4", {"num_ranks": 2}, ""),
        ("gpu", "", "4", {"num_ranks": 8}, r"num_ranks=8: .*requests 2 GPU\(s\) .* set num_ranks to at most 2, or 0"),
        ("gpu", "", "1", {"strategy": "shared_memory"}, r"strategy='shared_memory': requires CPU ranks"),
        ("gpu", "elastic", "4", {"num_ranks": 8}, ""),
        ("gpu", "elastic", "4", {"num_ranks": 9}, r"=9: .*request 8 GPU\(s\) .* set num_ranks to at most 8, or 0"),
        ("gpu", "elastic", "4", {"num_ranks": 2}, r"=2: .*request 8 .*worker\(s\).* set num_ranks to 8, or 0"),
        ("gpu", "ray", "2:4", {"num_ranks": 8}, ""),
        ("gpu", "ray", "2:4", {"num_ranks": 9}, r"num_ranks=9: .*request 8 GPU\(s\)"),
        ("gpu", "ray", "2:4", {"num_ranks": 33, "backend": "gloo"}, r"=33: .*request capacity for 32 rank\(s\)"),
        ("gpu", "ray", "4", {"batch_size": 7}, r"batch_size=7: must be at least ranks x accumulation_steps = 8 x 1"),
        ("gpu", "dask", "4", {"num_ranks": 9, "backend": "gloo"}, r"=9: .*request capacity for 8 rank\(s\)"),
        ("local", "", "1", {"num_ranks": 16}, ""),
        ("local", "ray", "4", {"backend": "nccl"}, r"backend='nccl': .*request no GPU"),
    ],
)
def test_what_the_pods_of_training_cannot_serve_is_refused(
    profile: str, engine: str, nodes: str, hp: dict[str, Any], refusal: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By the task's function in the surroundings of a pod."""
    for name, value in {
        "FLYTE_INTERNAL_EXECUTION_ID": "f1",
        "FLYTE_DDP_PROFILE": profile,
        "FLYTE_DDP_GPUS": str(PROFILES[profile].gpus),
        "FLYTE_DDP_NODES": nodes,
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=refusal) if refusal else nullcontext():
        assert check_inputs.task_function(hp=Hyperparameters(**hp), engine=engine).run_version


def test_a_pod_that_does_not_see_its_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_DDP_GPUS", "2")
    monkeypatch.setattr(resources, "count_gpus", lambda: 0)
    with pytest.raises(UserError, match=r"0 GPU\(s\) visible but 2 requested"):
        resources.detect_world(resources.Request())


def test_a_retry_of_one_tick_is_the_same_run_and_each_clone_has_its_own(tmp_path, monkeypatch) -> None:
    def version(clone: str, day: int) -> str:
        monkeypatch.setenv("FLYTE_DDP_RUNS", str(tmp_path / clone))
        return check_inputs(hp=Hyperparameters(), kickoff_time=datetime(2030, 1, day, 3, tzinfo=UTC)).run_version

    first, retry, next_night = (version("runs", day).partition("@")[0] for day in (2, 2, 3))
    assert first == retry != next_night
    assert version("runs", 2) != version("of another clone", 2), "which may have the same home, and so the same cache"


def test_a_pod_with_another_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "f1")
    monkeypatch.setenv("FLYTE_DDP_CODE", "other")
    with pytest.raises(UserError, match="this pod runs library sources"), translate_errors_for_flyte():
        pass


def test_a_pod_without_a_registry_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "f1")
    with pytest.raises(UserError, match="FLYTE_DDP_REGISTRY='': must be an address that all pods can reach"):
        read_registry_address()
