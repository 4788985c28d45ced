"""Run a task of Flyte 2 as a pod does: the command ``a0``, with inputs and outputs in folders in place of a blob store.

The address of the control plane is dead, which is enough for tasks that call no other tasks.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli import ROOT
from flyte._internal.runtime.convert import convert_from_native_to_inputs
from flyte.models import SerializationContext
from flyteidl2.core.execution_pb2 import ContainerError, ErrorDocument
from flyteidl2.task.common_pb2 import Outputs
from zygote import MATPLOTLIB

DEADLINE = 300.0  # seconds, for a machine that is busy; a pod takes 3 to 10
DEAD = "dns:///127.0.0.1:9"  # the port of the protocol discard, where nothing listens


@dataclass(frozen=True)
class PodEnded:
    """The files that a pod left in its output folder, and the pod's output."""

    exit_code: int
    log: str
    outputs: dict[str, Any] | None
    error: ContainerError | None
    report: str | None


@dataclass
class Pods:
    """Starts pods one after the other, each in a separate folder. ``store`` stands for the blob store.

    ``sources`` is the folder of the deployed sources, in which pods start.
    """

    folder: Path
    sources: Path = ROOT

    @property
    def checkpoints(self) -> Path:
        """The folder of all runs' checkpoints in the blob store."""
        return self.folder / "store/checkpoints"

    def run(
        self,
        task: Any,
        inputs: Mapping[str, Any],
        *,
        attempt: int = 0,
        execution: str = "r1",
        wrapper: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        during: Callable[[subprocess.Popen[bytes]], None] = lambda _: None,
    ) -> PodEnded:
        """Run a task in a pod for up to DEADLINE, then SIGKILL the process group. Return the pod's results.

        Args:
            task: The task.
            inputs: The task's inputs as values of Python, by name.
            attempt: The number of the attempt, from 0.
            execution: The name of the run.
            wrapper: A command that starts the pod's command.
            environment: Variables that replace or extend the container's.
            during: Is called with the pod's process.
        """
        pod = self.make_folder(task, inputs)
        with (pod / "log").open("wb") as output:
            process = subprocess.Popen(
                [*wrapper, *make_command(task, pod, execution, self.sources)],
                cwd=self.sources,
                env={**self.make_environment(task, pod, execution, attempt), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            during(process)
            exit_code = process.wait(DEADLINE)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        return read_pod(pod, exit_code, (pod / "log").read_text())

    def make_folder(self, task: Any, inputs: Mapping[str, Any]) -> Path:
        """Make the folder of another pod, with the task's inputs, and return the folder."""
        from flyte2.inputs import to_input

        pod = self.folder / f"pod{len([*self.folder.glob('pod*')])}"
        for name in ("home", "outputs"):
            (pod / name).mkdir(parents=True)
        values = {name: to_input(value) for name, value in inputs.items()}
        written = asyncio.run(convert_from_native_to_inputs(task.native_interface, **values))
        (pod / "inputs.pb").write_bytes(written.proto_inputs.SerializeToString())
        return pod

    def make_environment(self, task: Any, pod: Path, execution: str, attempt: int) -> dict[str, str]:
        """Return the variables that Flyte's backend, the image and the container's specification set."""
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
            "HOME": str(pod / "home"),
            "TMPDIR": str(pod),
            "PYTHONUNBUFFERED": "1",
            "MPLCONFIGDIR": str(MATPLOTLIB),
            "FLYTE_INTERNAL_EXECUTION_PROJECT": "flytesnacks",
            "FLYTE_INTERNAL_EXECUTION_DOMAIN": "development",
            "FLYTE_INTERNAL_EXECUTION_ID": execution,
            "FLYTE_ATTEMPT_NUMBER": str(attempt),
            "_U_ORG_NAME": "org",
            "_U_RUN_BASE": str(pod / "base"),
            "_U_EP_OVERRIDE": DEAD,
            "_U_INSECURE": "true",
            "FLYTE_DISABLE_SENTRY": "true",
            "FLYTE_DDP_RESTARTS": "0",  # as for all tests
            **(task.env_vars or {}),
            "FLYTE_DDP_CHECKPOINTS": str(self.checkpoints),
        }


def read_pod(pod: Path, exit_code: int, log: str) -> PodEnded:
    """Read the files that a pod left in its output folder."""
    left = {path.name: path.read_bytes() for path in (pod / "outputs").glob("*.*")}
    return PodEnded(
        exit_code,
        log,
        outputs=read_outputs(left["outputs.pb"]) if "outputs.pb" in left else None,
        error=ErrorDocument.FromString(left["error.pb"]).error if "error.pb" in left else None,
        report=left["report.html"].decode() if "report.html" in left else None,
    )


def make_command(task: Any, pod: Path, execution: str, sources: Path) -> list[str]:
    """Return the container's arguments with the values that Flyte fills in. The start time of runs is fixed."""
    context = SerializationContext(
        version="v1", project="flytesnacks", domain="development", org="org", root_dir=sources,
        input_path=str(pod / "inputs.pb"), output_path=str(pod / "outputs"),
    )  # fmt: skip
    values = {
        "{{.rawOutputDataPrefix}}": str(pod / "store/raw"),
        "{{.checkpointOutputPrefix}}": str(pod / "store/flytecheckpoints"),
        "{{.prevCheckpointPrefix}}": "",
        "{{.runName}}": execution,
        "{{.actionName}}": "a1",
        "{{.runStartTime}}": "2026-11-28T01:05:00Z",
    }
    command = [values.get(word, word) for word in task.container_args(context)]
    assert not [word for word in command if "{{" in word]
    return command


def read_outputs(content: bytes) -> dict[str, Any]:
    """Return the literals of an output file, by name."""
    return {literal.name: literal.value for literal in Outputs.FromString(content).literals}
