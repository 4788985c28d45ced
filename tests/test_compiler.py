"""The compiler is left out, and nothing else is different by that."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from flyte_ddp import compiler
from flyte_ddp.config import Hyperparameters
from flyte_ddp.json_lines import read_records
from flyte_ddp.optimisation import make_optimizer
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings

HP = Hyperparameters(
    model="user_models:dropout", num_ranks=1, batch_size=100, max_steps=5, log_interval=1, precision="fp32"
)
QUIET = Settings(progress="off", wandb_mode="disabled")


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_step_is_torchs_own(name: str) -> None:
    ours = nn.Linear(7, 3)
    theirs = copy.deepcopy(ours)
    hp = Hyperparameters(optimizer=name, weight_decay=0.01)
    mine, other = make_optimizer(ours.parameters(), hp), make_optimizer(theirs.parameters(), hp)
    for number in range(3):
        inputs = torch.full((5, 7), float(number))
        for model in (ours, theirs):
            model.zero_grad()
            model(inputs).square().sum().backward()
        compiler.step(mine)
        other.step()
    assert torch.equal(ours.weight, theirs.weight)
    assert mine.state_dict()["param_groups"] == other.state_dict()["param_groups"]


def test_the_methods_are_torchs_own_again() -> None:
    def left_out() -> list[bool]:
        return [vars(function).get(compiler.DISABLED) is function for function in compiler.methods()]

    compiler.leave_out()
    assert all(left_out())
    compiler.let_in_again()
    assert not any(left_out())


def test_ddp_is_answered_as_by_torch_itself() -> None:
    import torch._dynamo.utils

    assert torch._dynamo.utils.get_optimize_ddp_mode() == compiler.DDP_MODE


def test_a_stand_in_gives_what_else_is_asked_for() -> None:
    stand_in = compiler.StandIn("statistics", mean=len)
    assert stand_in.mean([1, 2]) == 2
    assert stand_in.median([1, 2, 9]) == 2


TORCHVISION = """
import sys
from flyte_ddp import compiler
compiler.import_torchvision()
import torchvision
assert not [name for name in sys.modules if name.startswith("torch._dynamo")]
supported = torchvision.ops.roi_align.__globals__["is_compile_supported"]
answers = [supported(device) for device in ("cpu", "cuda", "mps")]
import torch._dynamo
from torch._dynamo.utils import is_compile_supported
assert answers == [is_compile_supported(device) for device in ("cpu", "cuda", "mps")]
assert type(torch._dynamo) is type(sys)
compiler.import_torchvision()
"""


@pytest.mark.slow
def test_torchvision_gets_the_compilers_answer_when_it_asks() -> None:
    subprocess.run([sys.executable, "-c", TORCHVISION], check=True)


ANOTHER_TORCHVISION = """
import sys
from flyte_ddp import compiler
sys.path.insert(0, sys.argv[1])
compiler.import_torchvision()
from torchvision import trace_rules, disable
import torch._dynamo
assert trace_rules is torch._dynamo.trace_rules and disable is torch._dynamo.disable
"""


@pytest.mark.slow
def test_another_torchvision_may_want_more_of_it(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text(
        "from torch._dynamo.utils import is_compile_supported\n"
        "from torch._dynamo import disable\nimport torch._dynamo.trace_rules as trace_rules\n"
    )
    subprocess.run([sys.executable, "-c", ANOTHER_TORCHVISION, str(tmp_path)], check=True)


CODE = """
import sys
from pathlib import Path
from flyte_ddp.config import Hyperparameters
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings
hp, data, folder = sys.argv[1:]
run_training(Hyperparameters.from_json(hp), Path(data), Path(folder), Settings(progress="off", wandb_mode="disabled"))
"""
NOTED = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "torch._dynamo"):
            open(os.path.join(os.environ["NOTED"], f"{os.getpid()} {name}"), "w").close()
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "change"),
    [
        (1, {"model": "resnet18"}),
        (2, {"strategy": "shared_memory"}),
        (2, {"strategy": "ddp", "model": "user_models:of_torchvision"}),
        (3, {"strategy": "hooks"}),
    ],
)
def test_a_run_does_without_it(digits: Path, tmp_path: Path, ranks: int, change: dict[str, str]) -> None:
    """A second of a rank's start; processes note what they import of torch, which one does for all ranks."""
    (tmp_path / "sitecustomize.py").write_text(NOTED)
    (tmp_path / "noted").mkdir()
    hp = replace(HP, num_ranks=ranks, **change)
    command = [sys.executable, "-c", CODE, hp.to_json(), str(digits), str(tmp_path / "run")]
    changes = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parent}", "NOTED": str(tmp_path / "noted")}
    ended = subprocess.run(command, env={**os.environ, **changes}, capture_output=True, text=True, check=True)
    assert [path.name.split()[1] for path in (tmp_path / "noted").iterdir()] == ["torch"]
    assert ended.stderr == "", "none of torch's warnings about what is as it should be"


@pytest.mark.slow
def test_a_compiled_model_learns_the_same(
    digits: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run_training(HP, digits, tmp_path / "plain", QUIET)
    compiled = run_training(replace(HP, compile=True), digits, tmp_path / "compiled", QUIET)
    losses = [
        [record["loss"] for record in read_records(run.metrics) if record["kind"] == "train"]
        for run in (plain, compiled)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
