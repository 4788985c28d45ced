"""config/schedules.yaml: what an entry becomes, and how a wrong one is refused."""

import json
import re
from pathlib import Path

import pytest
from cli import ROOT

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.release.policy import Policy
from workflows.schedules import Schedule, read_schedules


def read(folder: Path, text: str) -> list[Schedule]:
    (folder / "schedules.yaml").write_text(text)
    return read_schedules(folder / "schedules.yaml")


def test_an_entry_has_all_that_a_plan_needs(tmp_path: Path) -> None:
    inline, preset, release, watch = read(
        tmp_path,
        """
        - name: weekly
          workflow: elastic_training_wf
          cron: "30 4 * * 0"
          hyperparameters: {epochs: 3, learning_rate: 1e-1}
        - {name: quick, workflow: training_wf, hyperparameters: config/fast.json}
        - {name: best, workflow: release_wf, cron: "0 0 1 JAN MON-FRI", model_name: digits, policy: {rule: not_worse}}
        - {name: watch, workflow: monitor_wf, model_name: digits, window: {images: in/%H, hours_back: 1}}
        """,
    )
    assert (inline.name, inline.workflow, inline.cron) == ("weekly", "elastic_training_wf", "30 4 * * 0")
    assert inline.inputs() == {"hp": Hyperparameters(epochs=3, learning_rate=0.1)}
    fast = json.loads((ROOT / "config/fast.json").read_text())
    assert (preset.inputs(), preset.cron) == ({"hp": Hyperparameters(**fast)}, "")
    best = {"hp": Hyperparameters(), "model_name": "digits", "policy": Policy(rule="not_worse")}
    assert release.inputs() == best
    window = WindowSource(images="in/%H", hours_back=1)
    assert watch.inputs() == {"model_name": "digits", "window": window}
    (tmp_path / "empty.yaml").write_text("# none\n")
    assert read_schedules(tmp_path / "empty.yaml") == []


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ("{name: a}", "schedules.yaml: must be a list of entries such as {name: weekly, "),
        ("- {name: a b, workflow: training_wf}", ", a b: name='a b': must be letters, digits and '_' only"),
        ("- &x {name: a, workflow: training_wf}\n- *x", ", a: an entry before has this name, too"),
        ("- {name: a", "yaml: is not valid YAML: expected ',' or '}', but got '<stream end>', line 1, column 11;"),
        *(
            (f"- {{name: a, workflow: {rest}}}", f", a: {said}")
            for rest, said in {
                "train_wf": "unknown workflow 'train_wf': did you mean 'training_wf'? choose one of",
                "training_wf, crom: x": "unknown key 'crom': did you mean",
                "training_wf, model_name: x": "model_name is not for training_wf: leave it out",
                "monitor_wf, model_name: x": "images='', dataset='', table='': give exactly one",
                "monitor_wf, model_name: x, policy: {alpha: 0.1}": "policy is not for monitor_wf: leave it out",
                "release_wf, model_name: x, policy: {alpha: 2}": "alpha=2.0: must be below 0.5",
                "sweep_wf": 'space="": names nothing to vary; for example',
                "training_wf, sweep: {trials: 3}": "sweep is not for training_wf: leave it out",
                "sweep_wf, sweep: {space: {momentum: [0.9, 1]}}": "space, momentum: momentum=1.0: must be below 1",
                "training_wf, hyperparameters: {epoch: 3}": "unknown hyperparameter 'epoch': did you",
                "training_wf, hyperparameters: config/fats.json": "hyperparameters='config/fats.json': No such file or "
                "directory; must be an object, or a file of",
                "training_wf, hyperparameters: /etc/hosts": "hyperparameters='/etc/hosts': is not in the repository",
            }.items()
        ),
    ],
)
def test_a_wrong_entry_is_refused_by_its_name(tmp_path: Path, entries: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        read(tmp_path, entries)


@pytest.mark.parametrize(
    "cron", [*("0 3 * *", "60 * * * *", "* * * * 7", "0 0 L * *", "@daily", "0 0 30 2 *", "0 22-4 * * *")]
)
def test_a_cron_that_flyte_would_not_take(tmp_path: Path, cron: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"a: cron={cron!r}: must be five fields, in UTC: minute, hour, ")):
        read(tmp_path, f"- {{name: a, workflow: training_wf, cron: {json.dumps(cron)}}}")
