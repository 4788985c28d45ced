"""What check_inputs refuses before a pod with GPUs starts, for each workflow by what its ranks will get."""

from pathlib import Path
from typing import Any

import pytest

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The task's function in the surroundings of a pod."""
    from tasks.preparation import check_inputs

    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "f1")
    monkeypatch.setenv("FLYTE_DDP_POD_FOLDER", str(tmp_path))

    def called(engine: str, profile: str, nodes: str, **hp: Any) -> object:
        from flyte_ddp.pods.profiles import PROFILES

        monkeypatch.setenv("FLYTE_DDP_PROFILE", profile)
        monkeypatch.setenv("FLYTE_DDP_GPUS", str(PROFILES[profile].gpus))
        monkeypatch.setenv("FLYTE_DDP_NODES", nodes)
        return check_inputs.task_function(hp=Hyperparameters(**hp), engine=engine)

    return called


@pytest.mark.parametrize(
    ("engine", "nodes", "hp"),
    [
        ("", "4", {"num_ranks": 2}),
        ("elastic", "4", {"num_ranks": 8}),
        ("ray", "2:4", {"num_ranks": 8}),
        ("dask", "4", {"num_ranks": 8}),
        ("dask", "4", {"num_ranks": 8, "backend": "gloo"}),
        ("ray", "2:4", {"num_ranks": 32, "backend": "gloo"}),
        ("ray", "4", {"batch_size": 8}),
        ("ray", "4", {"batch_size": 4, "num_ranks": 4}),
    ],
)
def test_ranks_that_the_pods_will_have_gpus_for(check: Any, engine: str, nodes: str, hp: dict[str, Any]) -> None:
    assert check(engine, "gpu", nodes, **hp).run_version


@pytest.mark.parametrize(
    ("engine", "nodes", "hp", "words"),
    [
        ("", "4", {"num_ranks": 8}, r"num_ranks=8: .*requests 2 GPU\(s\) .* set num_ranks to at most 2, or 0"),
        ("elastic", "4", {"num_ranks": 9}, r"num_ranks=9: .*request 8 GPU\(s\) .* set num_ranks to at most 8, or 0"),
        ("ray", "2:4", {"num_ranks": 9}, r"num_ranks=9: .*request 8 GPU\(s\)"),
        ("dask", "4", {"num_ranks": 9}, r"num_ranks=9: .*request 8 GPU\(s\)"),
        (
            "ray",
            "2:4",
            {"num_ranks": 33, "backend": "gloo"},
            r"num_ranks=33: .*request capacity for 32 rank\(s\)",
        ),
        ("dask", "4", {"num_ranks": 9, "backend": "gloo"}, r"num_ranks=9: .*request capacity for 8 rank\(s\)"),
        ("ray", "4", {"batch_size": 7}, r"batch_size=7: must be at least ranks x accumulation_steps = 8 x 1"),
        ("", "1", {"batch_size": 7, "accumulation_steps": 4}, r"batch_size=7: must be at least .* = 2 x 4"),
        ("elastic", "4", {"num_ranks": 2}, r"num_ranks=2: .*request 8 worker\(s\) .* set num_ranks to 8, or 0"),
        ("elastic", "2:4", {"num_ranks": 4}, r"num_ranks=4: .*request 8 worker\(s\)"),
        ("elastic", "4", {"batch_size": 7, "backend": "gloo"}, r"batch_size=7: must be at least .* = 8 x 1"),
        ("", "1", {"strategy": "shared_memory"}, r"strategy='shared_memory': needs CPU ranks"),
    ],
)
def test_hyperparameters_that_they_cannot_serve(
    check: Any, engine: str, nodes: str, hp: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        check(engine, "gpu", nodes, **hp)


def test_without_gpus(check: Any) -> None:
    assert check("", "local", "1", num_ranks=16).run_version
    with pytest.raises(UserError, match=r"backend='nccl': .*request no GPU"):
        check("ray", "local", "4", backend="nccl")
    with pytest.raises(UserError, match=r"batch_size=7: must be at least .* = 8 x 1"):
        check("elastic", "local", "4", batch_size=7)
