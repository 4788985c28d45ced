"""What Flyte 2 would do to users without the guards: fields that vanish, and mistakes that are tried again."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import pytest
from flyte2_cli import run_task

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import MachineError, RankError, RankLostError, StoppedError, UnreachableError, UserError
from flyte_ddp.sweep.halving import TrialResult

Modules = dict[str, ModuleType]


@pytest.fixture
def translate(flyte2: Modules) -> Callable[[BaseException], BaseException]:
    """Return the exception that the decorator of tasks makes of an exception in a task's body."""
    from flyteplugins.ddp.platform import translate_errors

    def translate_error(error: BaseException) -> BaseException:
        with pytest.raises(BaseException) as raised, translate_errors():  # noqa: PT011
            raise error
        return raised.value

    return translate_error


def is_retried(error: BaseException) -> bool:
    """Return whether Flyte 2 makes another attempt, as its own conversion for pods says."""
    from flyte._internal.runtime.convert import convert_from_native_to_error
    from flyte.errors import CustomError

    known = hasattr(error, "code")
    return convert_from_native_to_error(error if known else CustomError.from_exception(error)).recoverable


MISTAKES = [
    UserError("epochs=0: must be at least 1"),
    click.UsageError("a rule"),
    ValueError("a value"),
    KeyError("a key"),
    RankError("rank 1: LookupError: that", recoverable=False),
]
FAILURES = [
    MachineError("no memory"),
    RankError("rank 1: torch.OutOfMemoryError", recoverable=True),
    RankLostError("rank 1 was killed by SIGKILL", recoverable=True),
    StoppedError("SIGTERM", step=3),
    UnreachableError("s3://bucket does not answer"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("FLYTE_DDP_PROFILE", "x", "unknown FLYTE_DDP_PROFILE 'x': choose one of gpu, gpu-a100, local, sandbox"),
        ("FLYTE_DDP_HOURS", "x", "FLYTE_DDP_HOURS='x': must be a number of at least 0"),
    ],
)
def test_a_wrong_setting_ends_the_command_with_the_sentence_alone(
    variable: str, value: str, said: str, tmp_path: Path
) -> None:
    """The SDK writes two prefixes before errors of an import."""
    ended = run_task("training", "training", tmp_path, {variable: value})
    assert ended.exit_code == 1
    assert f"Error: {said}" in ended.output
    assert "Error invoking command" not in ended.output


def list_server_errors() -> list[tuple[BaseException, bool]]:
    """Return errors of the SDK's clients of servers, and whether a retry may succeed."""
    from connectrpc.code import Code
    from connectrpc.errors import ConnectError
    from obstore import exceptions

    refused, forbidden = exceptions.GenericError("connection refused"), exceptions.PermissionDeniedError("403")
    return [
        (refused, True),
        (ConnectError(Code.UNAVAILABLE, "refused"), True),
        (ExceptionGroup("downloads", [refused, ConnectionResetError()]), True),
        (ExceptionGroup("downloads", [refused, forbidden]), False),
        (forbidden, False),
        (ConnectError(Code.PERMISSION_DENIED, "no"), False),
        (FileNotFoundError("s3://bucket/x"), False),
        (PermissionError("no"), False),
    ]


@pytest.mark.parametrize(("error", "retried"), list_server_errors(), ids=repr)
def test_an_outage_of_the_blob_store_is_retried(
    flyte2: Modules, translate: Callable[..., BaseException], error: Exception, retried: bool, monkeypatch
) -> None:
    """The SDK raises the errors of its clients of servers, which have no common type."""
    from flyte.io import File

    def fail(self: Any) -> Any:
        raise error

    monkeypatch.setattr(File, "download_sync", fail)
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "r1")
    monkeypatch.delenv("FLYTE_DDP_CODE", raising=False)
    with pytest.raises(type(error)) as raised:
        flyte2["training"].download(File(path="s3://bucket/x"))
    assert is_retried(translate(raised.value)) is retried


@pytest.mark.parametrize(
    ("error", "cause", "recorded"),
    [
        ("OOMError", None, True),
        ("RuntimeSystemError", None, True),
        ("RuntimeSystemError", OSError("no route"), False),
        ("ActionAbortedError", None, False),
    ],
)
def test_a_sweep_goes_on_without_a_trial_whose_attempts_have_failed(
    flyte2: Modules, error: str, cause: Exception | None, recorded: bool, monkeypatch
) -> None:
    """A person aborts a trial to end the sweep. Errors with a cause are of the sweep's own pod."""
    import flyte.errors

    kind = getattr(flyte.errors, error)
    raised = kind("why") if error == "ActionAbortedError" else kind("CODE", "why")
    raised.__cause__ = cause

    async def fail(*_: Any) -> Any:
        raise raised

    sweep, trial = flyte2["sweep"], TrialResult(0, Hyperparameters(), "run", 1)
    monkeypatch.setattr(sweep, "run_trial", fail)
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "r1")
    if recorded:
        assert asyncio.run(sweep.run_trial_or_record_failure(trial, None)).failed == "why"
    else:
        with pytest.raises(kind):
            asyncio.run(sweep.run_trial_or_record_failure(trial, None))


def test_all_attempts_upload_prepared_data_to_the_same_address(flyte2: Modules, tmp_path: Path, monkeypatch) -> None:
    """The SDK names an awaited task by its inputs, and chooses another address at each upload."""
    from flyte.io import Dir

    upload, asked = flyte2["training"].output_folder, []
    monkeypatch.setattr(Dir, "from_local_sync", lambda path, remote_destination: asked.append(remote_destination))
    monkeypatch.setattr("flyte.ctx", lambda: SimpleNamespace(run_base_dir="s3://bucket/run"))
    upload(tmp_path, "datasets/digits-1")
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "r1")
    upload(tmp_path, "datasets/digits-1")
    upload(tmp_path)
    assert asked == [None, "s3://bucket/run/datasets/digits-1", None]


def test_a_trial_that_fails_leaves_the_other_trials_to_their_end(flyte2: Modules) -> None:
    """Otherwise the end of the event loop would cancel the other trials, and the SDK would abort their pods."""
    ended = []

    async def fail() -> Any:
        raise LookupError("this pod's error")

    async def take_longer() -> Any:
        for _ in range(5):
            await asyncio.sleep(0)
        ended.append("other")

    with pytest.raises(LookupError):
        asyncio.run(flyte2["sweep"].wait_for_all([fail(), take_longer()]))
    assert ended == ["other"]


@pytest.mark.parametrize("error", MISTAKES, ids=repr)
def test_a_mistake_is_tried_once(translate: Callable[..., BaseException], error: Exception, monkeypatch) -> None:
    """Without the guard, Flyte 2 retries."""
    assert is_retried(error)
    for in_pod in (False, True):
        if in_pod:
            monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "r1")
        translated = translate(error)
        assert not is_retried(translated)
        assert str(error).strip("'") in str(translated)


RAISES = """
from pathlib import Path
from torch import nn

class Broken(nn.Linear):
    def forward(self, images):
        with (Path(__file__).parent / "tries").open("a") as file:
            file.write("x")
        raise ArithmeticError("own words")

def model(num_classes, input_shape):
    return Broken(64, num_classes)
"""


@pytest.mark.slow
def test_a_users_exception_in_a_rank_is_one_panel_and_is_tried_once(tmp_path: Path) -> None:
    """Although the task of training has 100 retries."""
    (tmp_path / "mine.py").write_text(RAISES)
    hp = {"model": "mine:model", "num_ranks": 1}
    ended = run_task("training", "training", tmp_path, {"PYTHONPATH": str(tmp_path)}, hp=hp)
    assert ended.exit_code == 1
    [file] = (tmp_path / "runs").rglob("traceback.txt")
    said = f"rank 0: ArithmeticError: own words the full error is in {file}"
    assert ended.panel.endswith(f"Execution failed: {said}"), ended.output
    assert 'raise ArithmeticError("own words")' in file.read_text()
    assert ended.output.count("ArithmeticError") == 1, ended.output
    assert (tmp_path / "tries").read_text() == "x"


@pytest.mark.parametrize("error", FAILURES, ids=repr)
def test_a_failure_of_the_machine_is_retried_in_pods_only(
    translate: Callable[..., BaseException], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_retried(translate(error))
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "r1")
    assert is_retried(translate(error))


def test_errors_of_awaited_tasks_are_final_and_those_of_flyte_pass(translate: Callable[..., BaseException]) -> None:
    import flyte.errors

    awaited = translate(flyte.errors.RuntimeUserError("UserError", "of the task"))
    assert not is_retried(awaited)
    assert str(awaited) == "of the task"
    system = flyte.errors.RuntimeSystemError("X", "of Flyte")
    assert translate(system) is system


def send(kind: Any, values: dict[str, Any]) -> Any:
    """Return what a pod reads of an input that a task or a trigger sends."""
    from flyte.types import TypeEngine

    async def convert() -> Any:
        literal = await TypeEngine.to_literal(kind(**values), kind, TypeEngine.to_literal_type(kind))
        return await TypeEngine.to_python_value(literal, kind)

    return asyncio.run(convert())


def send_form(kind: Any, values: dict[str, Any]) -> Any:
    """Return what a pod reads of a form of the console, whose numbers are floats."""
    from flyte.types import TypeEngine
    from flyteidl2.core.literals_pb2 import Literal

    literal = Literal()
    literal.scalar.generic.update(values)
    return asyncio.run(TypeEngine.to_python_value(literal, kind))


@pytest.mark.parametrize(
    ("model", "values", "said"),
    [
        ("HyperparametersInput", {"epoch": 3}, "unknown hyperparameter 'epoch': did you mean 'epochs'?"),
        ("HyperparametersInput", {"epochs": 0}, "epochs=0: must be at least 1"),
        ("PolicyInput", {"alpha": 2}, "alpha=2.0: must be below 0.5"),
        ("PolicyInput", {"alfa": 0.1}, "'alfa'"),
        ("SweepInput", {"trial": 3}, "'trial'"),
        ("WindowInput", {"image": "y"}, "unknown window setting 'image': did you mean 'images'?"),
    ],
)
def test_no_field_is_dropped_between_the_console_and_the_pod(
    flyte2: Modules, model: str, values: dict[str, Any], said: str
) -> None:
    """Both wire forms keep unknown fields, which the check then refuses."""
    kind = getattr(flyte2["inputs"], model)
    for received in (send(kind, values), send_form(kind, values)):
        with pytest.raises(UserError) as refused:
            received.check()
        assert said in refused.value.message


def test_a_whole_number_that_the_console_sends_as_a_float_is_the_same(flyte2: Modules) -> None:
    kind = flyte2["inputs"].HyperparametersInput
    assert kind(epochs=2.0).check() == kind(epochs=2).check() == send_form(kind, {"epochs": 2}).check()
    assert kind.model_validate_json('{"epochs": 2.0}').check() == kind(epochs=2).check()


def test_the_local_cache_is_read(flyte2: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flyte 2 never reads the local cache of the behaviour "override", which its documents name for a version."""
    make = flyte2["pods"].cache_by_content
    cache = make(("data",), "1")
    assert (cache.behavior, cache.version_override, cache.serialize) == ("auto", "1", True)
    monkeypatch.setenv("FLYTE_DDP_FROM_SCRATCH", "yes")
    assert not make().is_enabled()


def test_telemetry_is_off_in_every_environment_unless_it_is_asked_for(flyte2: Modules, monkeypatch) -> None:
    import flyte

    environments = [each for each in vars(flyte2["pods"]).values() if isinstance(each, flyte.TaskEnvironment)]
    assert len(environments) == 5
    assert {each.env_vars["FLYTE_DISABLE_SENTRY"] for each in environments} == {"true"}
    monkeypatch.setenv("FLYTE_DISABLE_SENTRY", "false")
    assert flyte2["pods"].make_environment("x", flyte2["pods"].PROFILE, {}).env_vars["FLYTE_DISABLE_SENTRY"] == "false"
