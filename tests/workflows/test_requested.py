"""What check_inputs refuses before a pod with GPUs starts, for each workflow by what its ranks will get."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.pods.profiles import PROFILES
from tasks.preparation import check_inputs


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The task's function in the surroundings of a pod."""

    def call(engine: str, nodes: str, hp: dict[str, Any], profile: str = "gpu") -> Any:
        for name, value in {
            "FLYTE_INTERNAL_EXECUTION_ID": "f1",
            "FLYTE_DDP_POD_FOLDER": str(tmp_path),
            "FLYTE_DDP_PROFILE": profile,
            "FLYTE_DDP_GPUS": str(PROFILES[profile].gpus),
            "FLYTE_DDP_NODES": nodes,
        }.items():
            monkeypatch.setenv(name, value)
        return check_inputs.task_function(hp=Hyperparameters(**hp), engine=engine)

    return call


@pytest.mark.parametrize(
    ("engine", "nodes", "hp"),
    [
        ("", "4", {"num_ranks": 2}),
        ("elastic", "4", {"num_ranks": 8}),
        ("ray", "2:4", {"num_ranks": 8}),
        ("ray", "2:4", {"num_ranks": 32, "backend": "gloo"}),
        ("ray", "4", {"batch_size": 8}),
        ("ray", "4", {"batch_size": 4, "num_ranks": 4}),
        ("dask", "4", {"num_ranks": 8}),
        ("dask", "4", {"num_ranks": 8, "backend": "gloo"}),
    ],
)
def test_ranks_that_the_pods_will_have_gpus_for(
    check: Callable[..., Any], engine: str, nodes: str, hp: dict[str, Any]
) -> None:
    assert check(engine, nodes, hp).run_version


@pytest.mark.parametrize(
    ("engine", "nodes", "hp", "words"),
    [
        ("", "4", {"num_ranks": 8}, r"num_ranks=8: .*requests 2 GPU\(s\) .* set num_ranks to at most 2, or 0"),
        ("", "1", {"batch_size": 7, "accumulation_steps": 4}, r"batch_size=7: must be at least .* = 2 x 4"),
        ("", "1", {"strategy": "shared_memory"}, r"strategy='shared_memory': needs CPU ranks"),
        ("elastic", "4", {"num_ranks": 9}, r"num_ranks=9: .*request 8 GPU\(s\) .* set num_ranks to at most 8, or 0"),
        ("elastic", "4", {"num_ranks": 2}, r"num_ranks=2: .*request 8 worker\(s\) .* set num_ranks to 8, or 0"),
        ("elastic", "2:4", {"num_ranks": 4}, r"num_ranks=4: .*request 8 worker\(s\)"),
        ("elastic", "4", {"batch_size": 7, "backend": "gloo"}, r"batch_size=7: must be at least .* = 8 x 1"),
        ("ray", "2:4", {"num_ranks": 9}, r"num_ranks=9: .*request 8 GPU\(s\)"),
        ("ray", "2:4", {"num_ranks": 33, "backend": "gloo"}, r"num_ranks=33: .*request capacity for 32 rank\(s\)"),
        ("ray", "4", {"batch_size": 7}, r"batch_size=7: must be at least ranks x accumulation_steps = 8 x 1"),
        ("dask", "4", {"num_ranks": 9}, r"num_ranks=9: .*request 8 GPU\(s\)"),
        ("dask", "4", {"num_ranks": 9, "backend": "gloo"}, r"num_ranks=9: .*request capacity for 8 rank\(s\)"),
    ],
)
def test_hyperparameters_that_they_cannot_serve(
    check: Callable[..., Any], engine: str, nodes: str, hp: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        check(engine, nodes, hp)


def test_without_gpus(check: Callable[..., Any]) -> None:
    assert check("", "1", {"num_ranks": 16}, "local").run_version
    with pytest.raises(UserError, match=r"backend='nccl': .*request no GPU"):
        check("ray", "4", {"backend": "nccl"}, "local")
    with pytest.raises(UserError, match=r"batch_size=7: must be at least .* = 8 x 1"):
        check("elastic", "4", {"batch_size": 7}, "local")
