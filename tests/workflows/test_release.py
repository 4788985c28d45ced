"""What a user gets from ``pyflyte run workflows/release.py``, and what a cluster would be given."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import packaged
import pytest
from cli import ROOT, Ended, pyflyte
from packaged import Package

pytestmark = pytest.mark.slow
RELEASE = str(ROOT / "workflows/release.py")
HP = {"num_ranks": 1, "epochs": 3}


def released(ended: Ended) -> dict[str, str]:
    assert ended.exit_code == 0, ended.output
    line = ended.output[ended.output.rindex("Released(") :]
    return {name: found for name, _, found in re.findall(r"""(version|champion|outcome)=(['"])(.*?)\2""", line)}


def test_promoted_and_back(tmp_path: Path) -> None:
    """A first champion, a better one, and the way back."""

    def run(workflow: str, *arguments: str) -> Ended:
        return pyflyte("run", RELEASE, workflow, "--model_name", "digits", *arguments, home=tmp_path)

    first = released(run("release_wf", "--hp", json.dumps(HP), "--policy", '{"export": "off"}'))
    assert first["champion"] == first["version"]
    assert first["outcome"].startswith("promoted: there is no champion yet")
    better = run("release_wf", "--hp", json.dumps({**HP, "epochs": 10}), "--policy", '{"export": "off"}')
    second = released(better)
    gain = r"promoted: \+\d+\.\d+ points: \d+ samples gained and \d+ lost of 297 \(p = .*"
    assert re.fullmatch(gain, second["outcome"])
    [page] = re.findall(r"written to (\S+verdicts\S+)", better.output)
    assert "Only the challenger is right" in (ROOT / page / "verdict.html").read_text()
    back = released(run("rollback_wf", "--reason", "a test"))
    assert back["champion"] == first["version"]
    promoted = run("promote_wf", "--version", second["version"][:12], "--reason", "x")
    assert released(promoted)["champion"] == second["version"]
    judged = run("evaluate_wf", "--version", first["version"][:12].upper(), "--dataset", "digits")
    assert judged.exit_code == 0, judged.output
    assert "the champion is kept: " in judged.output
    version = tmp_path / "runs/registry/digits/versions" / second["version"]
    assert {path.name for path in version.iterdir()} == {
        *(
            "model.pt",
            "model.json",
            "verdict.json",
            "verdict.html",
            "data_profile.json",
            "reference.npz",
            "samples.npz",
            "manifest.json",
        )
    }
    log = tmp_path / "runs/registry/digits/log"
    actions = [json.loads(entry.read_text())["action"] for entry in sorted(log.iterdir())]
    assert actions == ["promote", "promote", "rollback", "promote"]


@pytest.mark.parametrize(
    ("workflow", "arguments", "said"),
    [
        ("release_wf", (), "model name '': must be letters, digits"),
        ("rollback_wf", ("--model_name", "../x", "--reason", "y"), "model name '../x': must be letters, digits"),
        ("promote_wf", ("--model_name", "x", "--version", "1", "--reason", "y"), "has no models; release a model"),
        ("rollback_wf", ("--model_name", "x", "--reason", "y"), "has no models; release a model"),
        (
            "evaluate_wf",
            ("--model_name", "x", "--version", "1", "--dataset", "digits"),
            "has no models; release a model",
        ),
        ("release_wf", ("--model_name", "x", "--policy", '{"alpha": 2}'), "alpha=2.0: must be below 0.5"),
    ],
)
def test_mistakes_are_refused(
    refusal: Callable[..., str], workflow: str, arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    assert said in refusal("release", workflow, *arguments)
    assert not (tmp_path / "runs").exists() or not [*(tmp_path / "runs").glob("*/model.pt")], "before any training"
    assert not (tmp_path / "runs/registry").exists()


def test_pods_of_releases_know_the_registry_and_are_never_cached(default: Package) -> None:
    for name in ("judge_model", "carry_out_verdict", "promote_version", "roll_back_champion"):
        template = default.tasks[f"tasks.release.{name}"].template
        assert not template.metadata.discoverable
        assert packaged.variables(template)["FLYTE_DDP_REGISTRY"] == "s3://bucket/models"
    plan = default.launch_plans["nightly_release"].spec
    assert plan.entity_metadata.schedule.kickoff_time_input_arg == "kickoff_time"
