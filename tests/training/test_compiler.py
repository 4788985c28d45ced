"""torch's compiler: ranks do not import it without need, and what it compiles learns the same."""

import inspect
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from cli import HELPERS
from torch import nn
from training_runs import Train, losses

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.training.optimisation import create_optimizers
from flyte_ddp.core.training.plan import OptimizerSettings

HP = Hyperparameters(
    model="user_models:dropout", num_ranks=1, batch_size=100, max_steps=5, log_interval=1, precision="fp32"
)


@pytest.mark.parametrize(("name", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adam", 0.9), ("adamw", 0.9)])
def test_a_step_is_torchs_own(name: str, momentum: float) -> None:
    """Also for gradients that come later than others, as where layers are left out at random."""
    ours = [nn.Parameter(torch.randn(5)) for _ in range(3)]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    hp = Hyperparameters(optimizer=name, momentum=momentum, nesterov=momentum > 0, weight_decay=0.01)
    optimizer = create_optimizers(nn.ParameterList(ours), OptimizerSettings.from_hyperparameters(hp), hp)[0]
    kind = type(optimizer).__base__
    assert kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    options = {key: value for key, value in optimizer.defaults.items() if key in inspect.signature(kind).parameters}
    reference = kind(theirs, **{**options, "fused": False})
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for step in range(4):
        for place in range(step % 2, 3):
            ours[place].grad = torch.randn(5)
            theirs[place].grad = ours[place].grad.clone()
        for one in (optimizer, reference):
            one.step()
            one.zero_grad(set_to_none=True)
    torch.testing.assert_close(ours, theirs)
    assert len(steps) == 4, "hooks are called"


CODE = """
import sys
from pathlib import Path
from flyte_ddp.config import Hyperparameters
from flyte_ddp.run import run_training
from flyte_ddp.core.settings import Settings
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
def test_ranks_do_not_import_it(digits: Path, tmp_path: Path) -> None:
    """A second of a rank's start; processes note what they import of torch, which one does for all ranks."""
    (tmp_path / "sitecustomize.py").write_text(NOTED)
    (tmp_path / "noted").mkdir()
    hp = replace(HP, num_ranks=2, strategy="shared_memory", optimizer="adamw")
    command = [sys.executable, "-c", CODE, hp.to_json(), str(digits), str(tmp_path / "run")]
    changes = {"PYTHONPATH": f"{tmp_path}:{HELPERS}", "NOTED": str(tmp_path / "noted")}
    ended = subprocess.run(command, env={**os.environ, **changes}, capture_output=True, text=True, check=True)
    noted = [path.name.split()[1] for path in (tmp_path / "noted").iterdir()]
    assert noted == ["torch"]
    assert ended.stderr == "", "none of torch's warnings about what is as it should be"


@pytest.mark.slow
@pytest.mark.usefixtures("user_models")
def test_a_compiled_model_learns_the_same(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the part of the compiler that is not torch's generator of C++, which takes many seconds."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    runs = train(HP, "plain"), train(replace(HP, compile=True), "compiled")
    expected, found = map(losses, runs)
    assert found == pytest.approx(expected, rel=1e-5)
