"""Read 2,000 files, damaged by a fixed seed: each is taken or refused by our error, in bounded time and memory."""

import base64
import copy
import hashlib
import io
import json
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kept_checkpoints
import numpy as np
import pytest
import torch
from report_page import matrix, records, write_run
from sidecars import make_sidecar

from flyte_ddp import arrays
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.models import saving
from flyte_ddp.core.models.inputs import InputSpec
from flyte_ddp.core.models.sidecar import Metrics, Sidecar
from flyte_ddp.core.runs import checkpoint
from flyte_ddp.datasets.prepared import open_prepared
from flyte_ddp.datasets.prepared_folder import DESCRIPTION
from flyte_ddp.datasets.prepared_set import write_prepared_set
from flyte_ddp.models import artifacts, zoo
from flyte_ddp.models.preprocessing import pack_preprocessing
from flyte_ddp.predict.new_rows import load_preprocessing
from flyte_ddp.predict.sample_columns import Reference
from flyte_ddp.report.report import render_report
from flyte_ddp.schedules.entries import read_schedules
from flyte_ddp.sweep.space import Sweep

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
SECONDS, BYTES = 10.0, 4 * 2**30  # of a case
DEEP = "a deep value"
NASTY: list[Any] = [None, True, 0, -1, 2, 0.5, 10**400, 2**70, 1e300, float("nan"), float("inf"), "", "x", "a\0b", "é"]
NASTY += [
    [],
    {},
    [[1, "a"]],
    {"a": {"b": None}},
    [None] * 3,
    2**31,
    "9" * 5000,
    DEEP,
    ["a", "a"],
    -(2**63),
    "nobody:make",
]
GREY = InputSpec(channels=1, height=28, width=28, mean=(0.25,), std=(0.5,))


def list_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a JSON value with each of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from list_places(value[key])


def change_json(good: Any, chance: random.Random) -> Any:
    if not chance.randrange(40):
        return chance.choice(NASTY)
    value = copy.deepcopy(good)
    for _ in range(chance.choice((1, 1, 2))):
        holder, key = chance.choice([*list_places(value)] or [({"": 0}, "")])
        action = chance.randrange(5)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            holder[f"{key}{chance.choice('x?. ')}"] = holder.pop(key)
        else:
            holder[key] = chance.choice(NASTY)
    return value


def dump(value: Any) -> bytes:
    return json.dumps(value).replace(f'"{DEEP}"', "[" * 20_000 + "]" * 20_000).encode()


def change_bytes(good: bytes, chance: random.Random) -> bytes:
    changed = bytearray(good)
    at, length = chance.randrange(len(good)), chance.choice((1, 4, 40))
    action = chance.randrange(4)
    if action == 0:
        del changed[at:]
    elif action == 1:
        changed[at : at + length] = chance.randbytes(length)
    elif action == 2:
        changed[at:at] = chance.randbytes(length)
    else:
        for _ in range(length):
            changed[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
    return bytes(changed)


class OutOfTime(BaseException):
    """Is caught by no reader."""


@contextmanager
def bounds() -> Iterator[None]:
    """Raise OutOfTime after 10 s, and let the process have no more than 4 GiB above what it has."""

    def end(*_: object) -> None:
        raise OutOfTime

    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, end)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, before[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


@dataclass
class Target:
    """Makes a damaged file and reads the file, by ``case(chance)``, and how the reader refuses."""

    case: Callable[[random.Random], object]
    refused: type[Exception] = UserError


def checkpoint_header(folder: Path) -> Target:
    path = kept_checkpoints.write(folder / "a.ckpt", 3, b"metrics\n")
    with path.open("rb") as file:
        header, _ = checkpoint.read_head(file, with_metrics=False)

    def case(chance: random.Random) -> None:
        kept_checkpoints.write_head(path, dump(change_json(header, chance)) + b"\nmetrics\n")
        found = checkpoint.read_checkpoint(path)
        assert found is not None
        found.describe_resumption()
        checkpoint.find_newest_checkpoint(folder)

    return Target(case, checkpoint.UnreadableError)


def report(folder: Path) -> Target:
    run = write_run(folder / "run", records(), matrix(4))
    lines = records()
    with np.load(run / "predictions.npz") as stored:
        predictions = dict(stored)
    good = (run / "predictions.npz").read_bytes()
    sidecar = make_sidecar(metrics=Metrics(kept_epoch=2), versions={"torch": "2"}).to_json_value()

    def case(chance: random.Random) -> None:
        changed, described, content = lines, sidecar, good
        which = chance.randrange(4)
        if which == 0:
            whole = change_json(lines, chance)
            changed = whole if isinstance(whole, list) else [whole]
        elif which == 1:
            described = change_json(sidecar, chance)
        elif which == 2:
            content = change_bytes(good, chance)
        else:
            sections = dump(change_json(json.loads(str(predictions["sections"])), chance)).decode()
            content = pack({**predictions, "sections": np.array(sections)})
        (run / "metrics.jsonl").write_bytes(b"".join(dump(line) + b"\n" for line in changed))
        (run / "model.json").write_bytes(dump(described))
        (run / "predictions.npz").write_bytes(content)
        render_report(run)

    return Target(case)


def pack(named: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **named)
    return file.getvalue()


def prepared_data(folder: Path) -> Target:
    numbers = np.arange(40, dtype=np.float32).reshape(10, 4)
    made = arrays((numbers, np.arange(10) % 2), (numbers[:4], np.arange(4) % 2), name="numbers")
    write_prepared_set(made, folder, {"data_source": ""})
    open_prepared(folder)  # which writes verified.json
    good = {path: path.read_bytes() for path in folder.iterdir()}
    described = folder / DESCRIPTION

    def case(chance: random.Random) -> None:
        for path, content in good.items():
            path.write_bytes(content)
        path = chance.choice([*good])
        if path.suffix == ".json":
            path.write_bytes(dump(change_json(json.loads(good[path]), chance)))
        else:
            changed = change_bytes(good[path][:128], chance) + good[path][128:]
            path.write_bytes(changed)
            content = json.loads(good[described])
            content["files"][path.name] = hashlib.sha256(changed).hexdigest()
            described.write_text(json.dumps(content))
        open_prepared(folder)

    return Target(case)


def reference(folder: Path) -> Target:
    path = folder / "reference.npz"
    columns = {"age": np.arange(9.0), "city": np.array(["a", "b", "c"] * 3)}
    Reference(columns, {"loss": torch.arange(9.0)}).write_file(path)
    good = path.read_bytes()

    def case(chance: random.Random) -> None:
        content = change_bytes(good, chance)
        if chance.randrange(3) == 0:
            with np.load(io.BytesIO(good)) as stored:
                named = dict(stored)
            named[chance.choice([*named])] = np.array(chance.choice([1, "a", [], [[1, 2]], 1j, ["x"] * 9]))
            content = pack(named)
        Reference.from_bytes(content)

    return Target(case)


def saved_model(folder: Path) -> tuple[Path, Path, dict[str, Any]]:
    made = zoo.build_model("small_cnn", 10, GREY)
    described = make_sidecar(
        GREY,
        classes=[f"class {k}" for k in range(10)],
        hyperparameters=Hyperparameters().to_dict(),
        metrics=Metrics(test={"accuracy": 0.5}),
        options={"model": {}},
        versions={"torch": "2"},
    )
    model, sidecar = saving.save_model(folder, made.state_dict(), described)
    return model, sidecar, json.loads(sidecar.read_bytes())


def model_json(folder: Path) -> Target:
    model, sidecar, good = saved_model(folder)

    def case(chance: random.Random) -> None:
        sidecar.write_bytes(dump(change_json(good, chance)))
        artifacts.load_model(model, sidecar)

    return Target(case)


def model_pt(folder: Path) -> Target:
    model, sidecar, good = saved_model(folder)
    weights = model.read_bytes()

    def case(chance: random.Random) -> None:
        content = change_bytes(weights, chance)
        model.write_bytes(content)
        sidecar.write_bytes(dump({**good, "digests": {"weights": hashlib.sha256(content).hexdigest()}}))
        artifacts.load_model(model, sidecar)

    return Target(case)


def preprocessing(folder: Path) -> Target:
    packed = pack_preprocessing({"mean": 1.0}, prepare_rows, {"": ["a"]}).to_json_value()
    content = base64.b64decode(packed["pickle"])

    def case(chance: random.Random) -> None:
        changed = change_json(packed, chance)
        if chance.randrange(3) == 0:
            damaged = change_bytes(content, chance)
            again = {"pickle": base64.b64encode(damaged).decode(), "sha256": hashlib.sha256(damaged).hexdigest()}
            changed = {**packed, **again}
        elif chance.randrange(3) == 0:
            changed = {
                **packed,
                "prepare": chance.choice(["os:getcwd", "json:dumps", f"{__name__}:SECONDS", "a:b", "x"]),
            }
        value = json.loads(dump(changed)) if DEEP not in str(changed) else []
        sidecar = Sidecar.from_json_value({**make_sidecar().to_json_value(), "preprocessing": value}, "model.json")
        load_preprocessing(sidecar).read(folder)

    return Target(case)


def prepare_rows(_: Any, __: Any) -> Any:
    return np.ones((2, 1), np.float32), None


def sweep_space(_: Path) -> Target:
    space = {
        "learning_rate": {"from": 0.01, "to": 1, "log": True},
        "batch_size": {"from": 32, "to": 128, "step": 32},
        "momentum": [0.5, 0.9],
        "options.model.width": {"from": 1.0, "to": 2.5},
    }

    def case(chance: random.Random) -> None:
        changed = change_json(space, chance)
        sweep = Sweep(space=dump(changed).decode() if chance.randrange(2) else changed, trials=3)
        sweep.count_combinations()

    return Target(case)


YAML = """
- name: weekly
  workflow: training_wf
  cron: "30 4 * * 0"
  hyperparameters: &hp {epochs: 3, learning_rate: 1e-1}
- {name: quick, workflow: training_wf, hyperparameters: config/fast.json}
- {name: again, workflow: training_wf, hyperparameters: *hp}
- {name: best, workflow: release_wf, model_name: digits, policy: {rule: not_worse}}
"""
BOMB = "".join(f"k{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else '1'}]\n" for n in range(9))
HARMFUL = [
    BOMB,
    "- &a [*a]\n",
    "[" * 20_000,
    "- {name: " * 900,
    '- {name: a, workflow: training_wf, hyperparameters: "a\\0b"}',
]
HARMFUL += [
    "- {1: 2, a: 3}",
    "- {name: a, workflow: training_wf, hyperparameters: {1: 2, a: 3}}",
    "- !!int x",
    "? [a]\n: b",
]
HARMFUL += ["- {name: a, workflow: training_wf, hyperparameters: {epochs: .nan}}", "- 2026-13-45", f"- {'9' * 5000}"]


def schedules(folder: Path) -> Target:
    path, given = folder / "schedules.yaml", iter(HARMFUL)

    def case(chance: random.Random) -> None:
        text = next(given, None) or change_bytes(YAML.encode(), chance).decode(errors="replace")
        path.write_text(text)
        read_schedules.__wrapped__(path)

    return Target(case)


def hyperparameters(_: Path) -> Target:
    good = Hyperparameters(options='{"model": {"width": 2}}').to_dict()

    def case(chance: random.Random) -> None:
        changed = change_json(good, chance)
        if chance.randrange(2):
            Hyperparameters.from_json(dump(changed).decode())
        else:
            Hyperparameters.from_dict(changed)

    return Target(case)


TARGETS = (checkpoint_header, report, prepared_data, reference, model_json, model_pt, preprocessing)
TARGETS += (sweep_space, schedules, hyperparameters)


@pytest.mark.filterwarnings("ignore")  # of NumPy for values out of range, and of torch for old formats
@pytest.mark.parametrize("target", TARGETS)
def test_damaged_files_are_refused_by_our_errors(target: Callable[[Path], Target], tmp_path: Path) -> None:
    made, wrong, refused = target(tmp_path), list[str](), 0
    for number in range(200):
        try:
            with bounds():
                made.case(random.Random(f"56 {target.__name__} {number}"))
        except made.refused:
            refused += 1
        except (Exception, OutOfTime) as error:
            wrong.append(f"case {number}: {type(error).__name__}: {str(error)[:200]}")
    assert not wrong, "\n".join(wrong)
    assert 20 < refused < 200
