"""What a user gets from ``pyflyte run workflows/monitor.py``, and what a cluster would be given."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import packaged
import pytest
from cli import ROOT, Ended, pyflyte
from packaged import Package
from PIL import Image
from s3_server import S3Server, s3_server

from flyte_ddp.datasets import open_arrays

pytestmark = pytest.mark.slow
RELEASE, MONITOR = (str(ROOT / f"workflows/{name}.py") for name in ("release", "monitor"))
IMAGES = "s3://in/%d/%H"


def write_inverted(digits: Path, folder: Path, chosen: slice) -> None:
    folder.mkdir(parents=True)
    for number, pixels in enumerate(open_arrays(digits).test_inputs[chosen]):
        Image.fromarray(255 - np.array(pixels)[..., 0]).save(folder / f"{number}.png")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


def test_a_second_window_that_has_moved_is_an_alarm(tmp_path: Path, digits: Path, server: S3Server) -> None:
    def run(file: str, workflow: str, *arguments: str) -> Ended:
        environment = server.aws_environment()
        return pyflyte("run", file, workflow, "--model_name", "digits", *arguments, home=tmp_path, **environment)

    def monitor(hour: int = 0, **window: object) -> Ended:
        """As a schedule does, five minutes after the hour, of the hour that is over."""
        started = f"2026-11-28T{hour + 1:02}:05:00"
        given = {"hours_back": 1, **window}
        return run(MONITOR, "monitor_wf", "--kickoff_time", started, "--window", json.dumps(given))

    hp, policy = json.dumps({"num_ranks": 1, "epochs": 5}), '{"export": "off"}'
    released = run(RELEASE, "release_wf", "--hp", hp, "--policy", policy)
    assert released.exit_code == 0, released.output
    for number in range(3):
        write_inverted(digits, server.folder / f"in/28/{number:02}", slice(number * 99, (number + 1) * 99))
    same = monitor(dataset="digits")
    assert same.exit_code == 0, same.output
    assert "window 1, no alarm: no column has moved; written to " in same.output
    first = monitor(0, images=IMAGES)
    assert first.exit_code == 0, first.output
    assert "window 2, no alarm yet (an alarm needs 2 of 3 windows): " in first.output
    *_, last = first.output.strip().splitlines()
    assert last.startswith("Monitored(found=<window 2, no alarm yet")
    assert len(last) < 400, "not all columns"
    second = monitor(1, images=IMAGES)
    assert second.exit_code == 1
    assert "s3://in/28/01: alarm: " in second.panel
    assert "brightness" in second.panel
    quiet = monitor(2, images=IMAGES, fail_on_alarm=False)
    assert quiet.exit_code == 0, quiet.output
    assert "window 4, alarm: " in quiet.output
    again = monitor(1, images=IMAGES)
    assert again.exit_code == 1, "the same window is the same alarm"
    nothing = monitor(3, images=IMAGES)
    assert nothing.exit_code == 1
    assert "s3://in/28/03: does not exist; check the address" in nothing.panel
    windows = sorted((tmp_path / "runs/registry/digits/monitor/00000001").glob("*.json"))
    assert [path.name for path in windows] == [f"0000000{number}.json" for number in (1, 2, 3, 4)]
    assert [json.loads(path.read_text())["alarm"] for path in windows] == [False, False, True, True]
    pages = sorted((tmp_path / "runs").glob("windows-*"))
    assert len(pages) == 5
    assert {path.name for path in pages[0].iterdir()} == {"window.html", "window.csv", "reference.csv"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model_name", "../x", "--window", '{"dataset": "digits"}'), "model name '../x': must be letters, digits"),
        (("--model_name", "x"), "images='', dataset='', table='': give exactly one of the three"),
        (
            ("--model_name", "x", "--window", '{"dataset": "digits"}'),
            "has no models; release a model",
        ),
        (("--model_name", "x", "--window", '{"image": "y"}'), "unknown window setting 'image': did you mean 'images'?"),
        (
            ("--model_name", "x", "--window", '{"hours_back": 1000000000}'),
            "hours_back=1000000000: must be at most 87600",
        ),
    ],
)
def test_mistakes_are_refused(refusal: Callable[..., str], arguments: tuple[str, ...], said: str) -> None:
    assert said in refusal("monitor", "monitor_wf", *arguments)


def test_pods_know_the_registry_and_are_never_cached(default: Package) -> None:
    for name in ("watch_champion", "raise_alarm"):
        template = default.tasks[f"tasks.monitor.{name}"].template
        assert not template.metadata.discoverable
        assert packaged.variables(template)["FLYTE_DDP_REGISTRY"] == "s3://bucket/models"
