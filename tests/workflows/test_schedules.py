"""config/schedules.yaml: what an entry becomes, and how a wrong one is refused."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cli import ROOT

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.release.policy import Policy
from flyte_ddp.schedules.entries import Schedule, read_schedules
from workflows.schedules import describe_plan, describe_why_skipped


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
    assert inline.read_inputs() == {"hp": Hyperparameters(epochs=3, learning_rate=0.1)}
    fast = json.loads((ROOT / "config/fast.json").read_text())
    assert (preset.read_inputs(), preset.cron) == ({"hp": Hyperparameters(**fast)}, "")
    best = {"hp": Hyperparameters(), "model_name": "digits", "policy": Policy(rule="not_worse")}
    assert release.read_inputs() == best
    window = WindowSource(images="in/%H", hours_back=1)
    assert watch.read_inputs() == {"model_name": "digits", "window": window}
    (tmp_path / "empty.yaml").write_text("# none\n")
    assert read_schedules(tmp_path / "empty.yaml") == []


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ("{name: a}", "schedules.yaml: must be a list of entries such as {name: weekly, "),
        ("- {name: a b, workflow: training_wf}", ", a b: name='a b': must have only letters, digits and '_'"),
        ("- &x {name: a, workflow: training_wf}\n- *x", ", a: duplicate name;"),
        ("a: &x [*x]", "schedules.yaml: aliases (*NAME) expand to more than 100,000 parts"),
        (
            "".join(f"k{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 1}]\n" for n in range(9)),
            "schedules.yaml: aliases (*NAME) expand to more than 100,000 parts; write their values",
        ),
        ("[" * 20_000, "schedules.yaml: nested more than 64 levels deep"),
        (f"- {'9' * 5000}", "schedules.yaml: a value cannot be read (Exceeds the limit"),
        (
            '- {name: a, workflow: training_wf, hyperparameters: "a\\0b"}',
            ", a: hyperparameters='a\\x00b': must not contain the character NUL",
        ),
        (
            "- {name: a, workflow: training_wf, hyperparameters: {1: 2, a: 3}}",
            "a: hyperparameters={1: 2, 'a': 3}: the keys",
        ),
        (
            "- {name: a, name: b, workflow: training_wf}",
            "yaml: duplicate key 'name', line 1, column 13; remove one",
        ),
        (
            "- {name: a, workflow: training_wf, cron: */5 * * * *}",
            "line 1, column 43; correct it (put a cron in quotes)",
        ),
        ("- {name: a", "yaml: is not valid YAML: expected ',' or '}', but got '<stream end>', line 1, column 11;"),
        *(
            (f"- {{name: a, workflow: {rest}}}", f", a: {said}")
            for rest, said in {
                "train_wf": "unknown workflow 'train_wf': did you mean 'training_wf'? choose one of",
                "training_wf, crom: x": "unknown key 'crom': did you mean",
                "training_wf, model_name: x": "model_name is not an input of training_wf; remove",
                "monitor_wf, model_name: x": "images='', dataset='', table='': give exactly one",
                "monitor_wf, model_name: x, policy: {alpha: 0.1}": "policy is not an input of monitor_wf; remove",
                "release_wf, model_name: x, policy: {alpha: 2}": "alpha=2.0: must be below 0.5",
                "sweep_wf": 'space="": must name a hyperparameter; for example',
                "training_wf, sweep: {trials: 3}": "sweep is not an input of training_wf; remove",
                "sweep_wf, sweep: {space: {momentum: [0.9, 1]}}": "space, momentum: momentum=1.0: must be below 1",
                "training_wf, hyperparameters: {epoch: 3}": "unknown hyperparameter 'epoch': did you",
                "training_wf, hyperparameters: config/fats.json": "hyperparameters='config/fats.json': No such file or "
                "directory; must be an object, or a file of",
                "training_wf, hyperparameters: /etc/hosts": "hyperparameters='/etc/hosts': is not in the repository",
                "training_wf, hyperparameters: [epochs]": "hyperparameters=['epochs']: must be an object, or text",
                "training_wf, cron: 3": "cron=3: must be text",
                **{
                    f"monitor_wf, model_name: x, window: {{table: 's3://b/{address}'}}": f"table='s3://b/{address}': "
                    f"'{sign}' is not a field of strftime such as %Y, %m, %d and %H; write a percent sign of the "
                    for address, sign in {
                        "100%": "%",
                        "my%20data/%Y": "%20",
                        "%%%c3%a9": "%c3",
                        "%%%%%-d": "%-d",
                    }.items()
                },
            }.items()
        ),
    ],
)
def test_a_wrong_entry_is_refused_by_its_name(tmp_path: Path, entries: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        read(tmp_path, entries)


def test_an_address_has_fields_of_the_time_and_percent_signs(tmp_path: Path) -> None:
    entry = "- {name: a, workflow: monitor_wf, model_name: x, window: {table: 's3://b/my%%20data/%Y%m%d/%%%j'}}"
    [watch] = read(tmp_path, entry)
    filled = watch.read_inputs()["window"].fill_in_time(datetime(2026, 11, 28, tzinfo=UTC))
    assert filled.table == "s3://b/my%20data/20261128/%332"


def test_keys_may_be_merged_and_given_anew(tmp_path: Path) -> None:
    text = """
    - &first {name: a, workflow: training_wf, cron: "0 3 * * *"}
    - &second {<<: *first, name: b, hyperparameters: {epochs: 3}}
    - {<<: *second, name: c, cron: "0 4 * * *"}
    """
    assert [(each.name, each.cron, each.hyperparameters) for each in read(tmp_path, text)] == [
        ("a", "0 3 * * *", ""),
        ("b", "0 3 * * *", '{"epochs": 3}'),
        ("c", "0 4 * * *", '{"epochs": 3}'),
    ]


def test_a_description_has_the_content_of_files(tmp_path: Path) -> None:
    text = "- {name: a, workflow: sweep_wf, hyperparameters: config/smoke.json, sweep: {space: {epochs: [1e0, 2]}}}"
    [entry] = read(tmp_path, text)
    shown = json.loads(describe_plan(entry))
    assert shown["hyperparameters"] == {"epochs": 1, "max_steps": 8, "num_ranks": 2, "backend": "gloo"}
    assert json.loads(shown["sweep"]["space"]) == {"epochs": ["1e0", 2]}
    assert {**shown, "hyperparameters": "", "sweep": ""} == {
        "name": "a",
        "workflow": "sweep_wf",
        "hyperparameters": "",
        "sweep": "",
    }


def test_plans_that_cannot_be_made_are_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLYTE_DDP_REGISTRY", raising=False)
    [release] = read(tmp_path, "- {name: a, workflow: release_wf, model_name: x}")
    assert describe_plan(release) == "is skipped: FLYTE_DDP_REGISTRY is not set"
    assert describe_why_skipped("training_wf") == describe_why_skipped("ray_training_wf") == ""
    assert describe_why_skipped("monitor_wf") == describe_why_skipped("release_wf") == "FLYTE_DDP_REGISTRY is not set"
    monkeypatch.setenv("FLYTE_DDP_REGISTRY", "s3://bucket/models")
    assert describe_why_skipped("monitor_wf") == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert describe_why_skipped("ray_training_wf").startswith(
        "flytekitplugins.ray is not installed: it comes with the extra"
    )


@pytest.mark.parametrize(
    "cron", [*("0 3 * *", "60 * * * *", "* * * * 7", "0 0 L * *", "@daily", "0 0 30 2 *", "0 22-4 * * *")]
)
def test_a_cron_that_flyte_would_not_take(tmp_path: Path, cron: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"a: cron={cron!r}: must be five fields, in UTC: minute, hour, ")):
        read(tmp_path, f"- {{name: a, workflow: training_wf, cron: {json.dumps(cron)}}}")
