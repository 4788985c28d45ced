"""Bad input to ``pyflyte run``: one panel that names the value, the rule and the fix, and nothing like a result."""

import re
from pathlib import Path
from typing import Any

import pytest
from cli import OWN_MODEL, TINY, Ended, pyflyte, train
from mounts import ALONE, need_mounts

from flyte_ddp.errors import UserError
from flyte_ddp.settings import check_wandb_settings, read_settings

RESULTS = ("model.pt", "model.json", "report.html", "predictions*")  # patterns of what looks like a result
FASHION = Path("/usr/share/datasets/fashion-mnist")
LABELS = "train-labels-idx1-ubyte.gz"


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
        also({"dataset": "mnist", "data_source": "ftp://host/mnist"}, ("'ftp://host/mnist'", "https://")),
        also({"dataset": "mnist", "data_source": "http://127.0.0.1:9/x"}, ("Connection refused", "check the address")),
        also({"dataset": "json:no_such_callable"}, ("json", "no_such_callable")),
        also({"dataset": "a:b:c"}, ("'a:b:c'", "package.module:callable")),
        also({"model": "no_such_package:Net"}, ("no_such_package", "install it")),
        also({"init_from": "no/such/weights.pt"}, ("init_from='no/such/weights.pt': there is no such file",)),
        also({"batch_size": 3, "num_ranks": 2, "accumulation_steps": 2}, ("batch_size=3", "raise batch_size")),
        also({"dataset": "shards:nowhere.json"}, ("nowhere.json: cannot be read",)),
        also({"dataset": "shards:"}, ("dataset='shards:': must name an address",)),
        also({"dataset": "shards:s3://"}, ("must name a bucket after s3://",)),
        also({"dataset": "image_folder:https://127.0.0.1:9/images"}, ("cannot be listed",)),
        also({"dataset": "digits", "augment": "resized_crop"}, ("choose none, crop or crop_flip",)),
        also({"backend": "nccl"}, ("backend='nccl'", "sees no GPU", "gloo")),
        also(
            {"learning_rate": 1000, "schedule": "constant", "epochs": 20, "num_ranks": 2}, ("the loss is", "(now 1000)")
        ),
    ],
)
def test_bad_hyperparameters_that_a_task_finds(values: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "temporary/flyte-of-another-process").mkdir(parents=True)
    ended = train(values, home=tmp_path, TMPDIR=str(tmp_path / "temporary"), **without_pauses(tmp_path))
    assert_refused(ended, tmp_path, *words)
    assert [path.name for path in (tmp_path / "temporary").iterdir()] == ["flyte-of-another-process"]


@pytest.mark.parametrize(
    ("variable", "value", "rule"),
    [
        ("WANDB_PROJECT", "vision#2", "none of / "),
        ("WANDB_PROJECT", "a" * 129, "must have at most 128 characters"),
        ("WANDB_BASE_URL", "wandb.example.com:8080", "must be an address such as https://wandb.example.com"),
    ],
)
def test_a_setting_that_wandb_would_refuse(
    variable: str, value: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=f"^{variable}='{value}': .*{rule}"):
        check_wandb_settings(read_settings())


@pytest.mark.slow
def test_a_setting_that_wandb_would_refuse_is_in_nobody_elses_way(tmp_path: Path) -> None:
    setting = {"WANDB_MODE": "offline", "WANDB_PROJECT": "team/project"}
    packed = pyflyte("run", "workflows/shards.py", "shards_wf", "--source", "digits", home=tmp_path, **setting)
    assert packed.exit_code == 0, packed.output
    package = ("--pkgs", "workflows", "package", "--image", "image:1", "--output", str(tmp_path / "package.tgz"))
    for ended in (pyflyte(*package, home=tmp_path, **setting), train(TINY, home=tmp_path, **setting)):
        assert_refused(ended, tmp_path, "WANDB_PROJECT='team/project'", "none of / ", "WANDB_ENTITY")
    assert train(TINY, home=tmp_path, **{**setting, "WANDB_MODE": "disabled"}).exit_code == 0


@pytest.mark.slow
@pytest.mark.exhaustive
def test_hardware_that_does_not_fit(tmp_path: Path) -> None:
    ended = train({"num_ranks": 4}, home=tmp_path, FLYTE_DDP_GPUS="2")
    assert_refused(ended, tmp_path, "num_ranks=4", "2 GPU(s)", "set num_ranks to at most 2")
    (tmp_path / "sitecustomize.py").write_text(
        "import flyte_ddp.hardware\nfrom flyte_ddp.hardware import Bf16\n"
        "flyte_ddp.hardware.bf16_support = lambda device: Bf16.NONE\n"
    )
    ended = train({"precision": "bf16", "backend": "gloo"}, home=tmp_path, PYTHONPATH=str(tmp_path))
    assert_refused(ended, tmp_path, "precision='bf16'", "no bf16", "precision='fp32' or 'auto'")


@pytest.mark.skipif(not FASHION.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        slow("altered", (LABELS, "damaged or altered", "copy it again")),
        also("truncated", (LABELS, "damaged or altered", "copy it again")),
        also("missing", (LABELS, "no such file", "must hold")),
    ],
)
def test_a_damaged_data_set(damage: str, words: tuple[str, ...], tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    for file in FASHION.iterdir():
        (mirror / file.name).symlink_to(file)
    (mirror / LABELS).unlink()
    content = (FASHION / LABELS).read_bytes()
    middle = len(content) // 2
    if damage != "missing":
        rest = bytes([content[middle] ^ 1]) + content[middle + 1 :] if damage == "altered" else b""
        (mirror / LABELS).write_bytes(content[:middle] + rest)
    ended = train({"dataset": "fashion_mnist", "data_source": str(mirror)}, home=tmp_path / "home")
    assert_refused(ended, tmp_path / "home", str(mirror), *words)
    assert not list(tmp_path.glob("home/runs/datasets/*/*"))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_model_whose_output_does_not_fit(tmp_path: Path) -> None:
    """It is the user's own, in the working directory, from which both ranks import it."""
    (tmp_path / "own_model.py").write_text(OWN_MODEL.replace("width, num_classes)", "width, num_classes + 1)"))
    hp = {"model": "own_model:linear", "num_ranks": 2, "batch_size": 64}
    ended = train(hp, home=tmp_path / "home", directory=tmp_path)
    assert_refused(ended, tmp_path, "'own_model:linear'", "(32, 11)", "(32, 10)", "num_classes")


@pytest.mark.slow
@pytest.mark.cold
def test_a_module_of_the_users_that_hides_pythons(tmp_path: Path) -> None:
    """Interpreters of ranks look for modules in the working directory first."""
    (tmp_path / "select.py").write_text("def best(models): return max(models)")
    ended = train({**TINY, "num_ranks": 2}, home=tmp_path / "home", directory=tmp_path)
    assert "select.py hides Python's own module 'select', which may be the cause: rename it" in ended.panel


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
    mount = f'mount --bind "{tmp_path}/no servers" /etc/resolv.conf'
    here = f'hostname nowhere && ip link set lo up && {mount} && exec "$@"'
    wrapper = (*ALONE, "--uts", "--net", "sh", "-c", here, "sh")
    ended = train(TINY, "elastic_training_wf", "workflows/elastic_training.py", home=tmp_path, wrapper=wrapper)
    line = "add a line '127.0.0.1 nowhere' to /etc/hosts"
    assert_refused(ended, tmp_path, "host name 'nowhere' has no address", line)


def train_on_disk(options: str, disk: Path, folder: Path, after: str = ":") -> Ended:
    """Train with ``disk`` on a file system of its own."""
    disk.mkdir(parents=True)
    need_mounts(disk)
    script = f'mount -t tmpfs -o {options} tmpfs "{disk}" && "$@"; code=$?; {after}; exit $code'
    return train(TINY, home=folder / "home", runs=folder / "runs", wrapper=(*ALONE, "sh", "-c", script, "sh"))


@pytest.mark.parametrize(
    ("size", "words"),
    [slow("60k", "disk is full"), also("210k", "No space left"), also("300k", "No space left")],
    ids=["at the data", "at the model", "at the report"],
)
def test_a_full_disk(size: str, words: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    # What is left on that disk can be seen from inside only.
    ended = train_on_disk(f"size={size}", runs, tmp_path, after=f'echo "LEFT:"; find "{runs}" -type f')
    assert_refused(ended, tmp_path, str(runs), words, "free some space")
    left = {path.rpartition("/")[2] for path in ended.output.partition("LEFT:")[2].split()}
    assert not [name for name in left if re.search(r"model\.|report|predictions|tmp", name)], left


@pytest.mark.parametrize(
    ("options", "folder", "words"),
    [
        slow("ro", "home", ("could not be created", ".flyte/local-cache", "FLYTE_LOCAL_CACHE_ENABLED=false")),
        also("size=4k", "home", ("database or disk is full", "FLYTE_LOCAL_CACHE_ENABLED=false")),
        also("ro", "runs", ("Read-only file system", "FLYTE_DDP_RUNS")),
    ],
)
def test_a_folder_that_cannot_be_written_to(options: str, folder: str, words: tuple[str, ...], tmp_path: Path) -> None:
    ended = train_on_disk(options, tmp_path / folder, tmp_path)
    assert_refused(ended, tmp_path, str(tmp_path / folder), *words)
