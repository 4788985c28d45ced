"""Bad input to ``pyflyte run``: one panel that names the value, the rule and the fix, and nothing like a result."""

import math
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from cli import OWN_MODEL, TINY, WORKFLOWS, Ended, pyflyte, train
from mounts import ALONE, need_mounts

RESULTS = ("model.pt", "model.json", "report.html", "predictions*")  # patterns of what looks like a result


def assert_refused(ended: Ended, runs: Path, *words: str) -> None:
    """One panel that says all of ``words``, an exit code, and nothing that looks like a result."""
    assert ended.exit_code != 0, ended.output
    assert "Traceback" not in ended.output
    assert ended.panel, ended.output
    for word in words:
        assert word in ended.panel
    assert len(ended.panel) < 700
    assert not [path for pattern in RESULTS for path in runs.rglob(pattern)]


def slow(*values: Any) -> Any:
    """A case that takes more than a second."""
    return pytest.param(*values, marks=pytest.mark.slow)


def also(*values: Any) -> Any:
    """One more case of a rule, that takes its two seconds in the full run only."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.exhaustive])


def without_pauses(folder: Path) -> dict[str, str]:
    """The environment of a process that asks a server again at once."""
    (folder / "sitecustomize.py").write_text(
        "import flyte_ddp.storage.retries as retries\nretries.FIRST_DELAY = 0.01\n"
    )
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dataset": "no_such_package.data:load"}, ("no_such_package", "install it")),
        also({"dataset": "mnist", "data_source": "no/such/mirror"}, ("'no/such/mirror'", "no such directory")),
        also(
            {"batch_size": 3, "num_ranks": 2, "accumulation_steps": 2},
            ("batch_size=3", "at least", "raise batch_size"),
        ),
        also({"dataset": "json:no_such_callable"}, ("json", "no_such_callable")),
        also({"dataset": "a:b:c"}, ("'a:b:c'", "package.module:callable")),
        also({"model": "no_such_package:Net"}, ("no_such_package", "install it")),
        also(
            {"init_from": "no/such/weights.pt"},
            ("no/such/weights.pt", "init_from='no/such/weights.pt': there is no such file"),
        ),
        also({"dataset": "mnist", "data_source": "ftp://host/mnist"}, ("'ftp://host/mnist'", "https://")),
        also({"backend": "nccl"}, ("backend='nccl'", "sees no GPU", "gloo")),
    ],
)
def test_bad_hyperparameters_that_a_task_finds(values: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "temporary/flyte-of-another-process").mkdir(parents=True)
    ended = train(values, home=tmp_path, TMPDIR=str(tmp_path / "temporary"))
    assert_refused(ended, tmp_path, *words)
    assert [path.name for path in (tmp_path / "temporary").iterdir()] == ["flyte-of-another-process"]


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        also("WANDB_PROJECT", "team/project", ("'team/project'", "none of / ", "WANDB_ENTITY")),
        also("WANDB_PROJECT", "vision#2", ("'vision#2'", "none of / ")),
        also("WANDB_PROJECT", "a" * 129, ("'aaaa", "at most 128 characters")),
        also("WANDB_BASE_URL", "wandb.example.com:8080", ("'wandb.example.com:8080'", "https://")),
    ],
)
def test_a_setting_of_wandbs_that_wandb_would_refuse(
    variable: str, value: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    ended = train(TINY, home=tmp_path, WANDB_MODE="offline", **{variable: value})
    assert_refused(ended, tmp_path, variable, *words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_setting_that_wandb_would_refuse_is_in_nobody_elses_way(tmp_path: Path) -> None:
    setting = {"WANDB_MODE": "offline", "WANDB_PROJECT": "team/project"}
    packed = pyflyte("run", "workflows/shards.py", "shards_wf", "--source", "digits", home=tmp_path, **setting)
    assert packed.exit_code == 0, packed.output
    package = ("--pkgs", "workflows", "package", "--image", "image:1", "--output", str(tmp_path / "package.tgz"))
    assert_refused(pyflyte(*package, home=tmp_path, **setting), tmp_path, "WANDB_PROJECT='team/project'")
    assert train(TINY, home=tmp_path, **{**setting, "WANDB_MODE": "disabled"}).exit_code == 0


@pytest.mark.slow
@pytest.mark.exhaustive
def test_more_ranks_than_the_pod_has_gpus(tmp_path: Path) -> None:
    ended = train({"num_ranks": 4}, home=tmp_path, FLYTE_DDP_GPUS="2")
    assert_refused(ended, tmp_path, "num_ranks=4", "2 GPU(s)", "set num_ranks to at most 2")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_bf16_where_there_is_none(tmp_path: Path) -> None:
    patch = "import flyte_ddp.hardware\nfrom flyte_ddp.cpu import Bf16\n"
    patch += "flyte_ddp.hardware.bf16_support = lambda device: Bf16.NONE\n"
    (tmp_path / "sitecustomize.py").write_text(patch)
    hp = {"precision": "bf16", "backend": "gloo"}
    ended = train(hp, home=tmp_path / "home", PYTHONPATH=str(tmp_path))
    assert_refused(ended, tmp_path, "precision='bf16'", "no bf16", "precision='fp32' or 'auto'")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_hyperparameters_that_are_no_json(tmp_path: Path) -> None:
    ended = pyflyte("run", WORKFLOWS, "training_wf", "--hp", "{'epochs': 3}", home=tmp_path)
    assert_refused(ended, tmp_path, "--hp", "valid json object")


FASHION = Path("/usr/share/datasets/fashion-mnist")
LABELS = "train-labels-idx1-ubyte.gz"


def altered(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.skipif(not FASHION.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        slow("altered", (LABELS, "damaged or altered", "copy it again")),
        also("truncated", (LABELS, "damaged or altered", "copy it again")),
        also("missing", (LABELS, "no such file", "must hold")),
        also("empty", (LABELS, "no such file", "must hold")),
    ],
)
def test_a_damaged_data_set(damage: str, words: tuple[str, ...], tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    for file in sorted(FASHION.iterdir()) if damage != "empty" else ():
        (mirror / file.name).symlink_to(file)
    labels = mirror / LABELS
    labels.unlink(missing_ok=True)
    if damage in ("truncated", "altered"):
        content = (FASHION / LABELS).read_bytes()
        labels.write_bytes(altered(content) if damage == "altered" else content[: len(content) // 2])
    ended = train({"dataset": "fashion_mnist", "data_source": str(mirror)}, home=tmp_path / "home")
    assert_refused(ended, tmp_path / "home", str(mirror), *words)
    assert not list(tmp_path.glob("home/runs/datasets/*/*"))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_mirror_that_is_not_reachable(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # taken, so that nobody else can listen there, and not listened on
        mirror = f"http://127.0.0.1:{closed.getsockname()[1]}/mnist"
        ended = train({"dataset": "mnist", "data_source": mirror}, home=tmp_path, **without_pauses(tmp_path))
    assert_refused(ended, tmp_path, mirror, "Connection refused", "check the address")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_model_whose_output_does_not_fit(tmp_path: Path) -> None:
    """It is the user's own, in the working directory, from which both ranks import it."""
    (tmp_path / "own_model.py").write_text(OWN_MODEL.replace("width, num_classes)", "width, num_classes + 1)"))
    hp = {"model": "own_model:linear", "num_ranks": 2, "batch_size": 64}
    ended = train(hp, home=tmp_path / "home", directory=tmp_path)
    assert_refused(ended, tmp_path, "'own_model:linear'", "(32, 11)", "(32, 10)", "num_classes")


@pytest.mark.cold
@pytest.mark.parametrize("name", [slow("select"), also("math")])
def test_a_module_of_the_users_that_hides_pythons(name: str, tmp_path: Path) -> None:
    """Interpreters of ranks look for modules in the working directory first."""
    (tmp_path / f"{name}.py").write_text("def best(models): return max(models)")
    ended = train({**TINY, "num_ranks": 2}, home=tmp_path / "home", directory=tmp_path)
    assert f"{name}.py hides Python's own module '{name}', which may be the cause: rename it" in ended.panel


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loss_that_is_not_finite(num_ranks: int, tmp_path: Path) -> None:
    hp = {"learning_rate": 1000, "schedule": "constant", "epochs": 20, "num_ranks": num_ranks}
    ended = train(hp, home=tmp_path)
    assert_refused(ended, tmp_path, "the loss is", "must be finite", "lower learning_rate (now 1000)")
    found = re.search(r"loss is (\S+) at epoch (\d+), step (\d+)", ended.panel)
    assert found
    assert not math.isfinite(float(found[1]))


@pytest.mark.slow
def test_a_file_in_place_of_the_runs_folder(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.write_text("not a folder")
    ended = train(TINY, home=tmp_path)
    assert_refused(ended, tmp_path, str(runs), "FLYTE_DDP_RUNS")
    assert runs.read_text() == "not a folder"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_elastic_where_the_machines_name_has_no_address(tmp_path: Path) -> None:
    need_mounts(tmp_path)
    (tmp_path / "no servers").touch()
    here = (
        f'hostname nowhere && ip link set lo up && mount --bind "{tmp_path}/no servers" /etc/resolv.conf && exec "$@"'
    )
    wrapper = (*ALONE, "--uts", "--net", "sh", "-c", here, "sh")
    ended = train(TINY, "elastic_training_wf", "workflows/elastic_training.py", home=tmp_path, wrapper=wrapper)
    assert_refused(
        ended, tmp_path, "host name 'nowhere' has no address", "add a line '127.0.0.1 nowhere' to /etc/hosts"
    )


def on_a_disk(options: str, folder: Path, after: str = ":") -> tuple[str, ...]:
    """A command that starts another one with ``folder`` on a file system of its own."""
    script = f'mount -t tmpfs -o {options} tmpfs "{folder}" && "$@"; code=$?; {after}; exit $code'
    return (*ALONE, "sh", "-c", script, "sh")


@pytest.mark.parametrize(
    ("size", "words"),
    [
        pytest.param("60k", "disk is full", marks=pytest.mark.slow, id="at the data"),
        pytest.param("210k", "No space left", marks=[pytest.mark.slow, pytest.mark.exhaustive], id="at the model"),
        pytest.param("300k", "No space left", marks=[pytest.mark.slow, pytest.mark.exhaustive], id="at the report"),
    ],
)
def test_a_full_disk(size: str, words: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    need_mounts(runs)
    # What is left on that disk can be seen from inside only.
    wrapper = on_a_disk(f"size={size}", runs, after=f'echo "LEFT:"; find "{runs}" -type f')
    ended = train(TINY, home=tmp_path, wrapper=wrapper)
    assert_refused(ended, tmp_path, str(runs), words, "free some space")
    left = {path.rpartition("/")[2] for path in ended.output.partition("LEFT:")[2].split()}
    assert not [name for name in left if re.search(r"model\.|report|predictions|tmp", name)], left


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_read_only_runs_folder(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    need_mounts(runs)
    ended = train(TINY, home=tmp_path, wrapper=on_a_disk("ro", runs))
    assert_refused(ended, tmp_path, str(runs), "Read-only file system", "FLYTE_DDP_RUNS")


@pytest.mark.parametrize(
    ("options", "words"), [slow("ro", ("could not be created",)), also("size=4k", ("database or disk is full",))]
)
def test_a_home_that_takes_no_cache(options: str, words: tuple[str, ...], tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    need_mounts(home)
    ended = train(TINY, home=home, runs=tmp_path / "runs", wrapper=on_a_disk(options, home))
    assert_refused(ended, tmp_path, str(home / ".flyte/local-cache"), "FLYTE_LOCAL_CACHE_ENABLED=false", *words)
