"""Run a packaged task as a pod does: the container's command, an empty folder, inputs and outputs in a blob store."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import packaged
from cli import ROOT
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.core.dynamic_job_pb2 import DynamicJobSpec
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.literals_pb2 import Literal, LiteralMap
from packaged import Package
from s3_server import S3Server
from zygote import MATPLOTLIB

BUCKET = "flyte"
DEADLINE = 120.0  # seconds, for a machine that is busy; a pod takes 3 to 10
WORKDIR = "/root"  # in the image; an empty folder replaces it here
# The image contains only the dependencies. Here site-packages also contains an installation of the repository. Through
# its entry point, flytekit would import a plugin before the sources exist.
WITHOUT_REPOSITORY = f"""
import importlib.metadata, sys
sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]
found = importlib.metadata.entry_points
def entry_points(**asked):
    return [one for one in found(**asked) if one.value != "flytekitplugins.ddp"] if asked else found()
importlib.metadata.entry_points = entry_points
"""


@dataclass(frozen=True)
class PodEnded:
    """The files that a pod left in the blob store, and the pod's output."""

    name: str
    exit_code: int
    log: str
    outputs: Mapping[str, Literal] | None
    subworkflow: DynamicJobSpec | None  # replaces outputs if the engine must continue
    error: ContainerError | None
    deck: str | None


@dataclass
class Cluster:
    """Starts pods for a package's tasks one after the other, each in a separate folder."""

    package: Package
    server: S3Server
    folder: Path
    pods: list[Path] = field(default_factory=list)

    def run(
        self,
        task: str,
        inputs: Mapping[str, Literal],
        *,
        environment: Mapping[str, str] | None = None,
        execution: str = "f1a2b3c4",
        attempt: int = 0,
        during: Callable[[subprocess.Popen[bytes], Path], None] = lambda *_: None,
    ) -> PodEnded:
        """Run a task in a pod for up to DEADLINE, then SIGKILL the process group. Return the pod's results.

        Args:
            task: The name of the task.
            inputs: The task's inputs, by name.
            environment: Variables that replace or extend the container's.
            execution: The name of the execution.
            attempt: The number of the attempt, from 0.
            during: Is called with the pod's process, and with the folder of all runs' checkpoints in the blob store.
        """
        name = f"pod{len(self.pods)}"
        pod, store = self.folder / name, self.server.folder / BUCKET / name
        self.pods.append(pod)
        workdir = pod / "root"
        workdir.mkdir(parents=True)
        (pod / "site").mkdir()
        (pod / "site/sitecustomize.py").write_text(WITHOUT_REPOSITORY)
        store.mkdir(parents=True)
        (store / "inputs.pb").write_bytes(LiteralMap(literals=inputs).SerializeToString())
        spec = self.package.tasks[task]
        attempted = {"FLYTE_INTERNAL_EXECUTION_ID": execution, "FLYTE_ATTEMPT_NUMBER": str(attempt)}
        with (pod / "log").open("wb") as output:
            process = subprocess.Popen(
                self.command(spec, name, workdir),
                cwd=workdir,
                env={**self.environment(spec, pod), **attempted, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            during(process, self.checkpoints)
            exit_code = process.wait(DEADLINE)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        left = {path.name: path.read_bytes() for path in (store / "meta").glob("*.*")}
        return PodEnded(
            name=name,
            exit_code=exit_code,
            log=(pod / "log").read_text(),
            outputs=LiteralMap.FromString(left["outputs.pb"]).literals if "outputs.pb" in left else None,
            subworkflow=DynamicJobSpec.FromString(left["futures.pb"]) if "futures.pb" in left else None,
            error=ErrorDocument.FromString(left["error.pb"]).error if "error.pb" in left else None,
            deck=left["deck.html"].decode() if "deck.html" in left else None,
        )

    @property
    def checkpoints(self) -> Path:
        """The folder of all runs' checkpoints in the blob store."""
        return self.server.folder / BUCKET / "data/flyte-ddp-checkpoints/flytesnacks/development"

    def command(self, spec: TaskSpec, name: str, workdir: Path) -> list[str]:
        """Return the container's command with the values that Flyte fills in."""
        store = f"s3://{BUCKET}/{name}"
        values = {
            "{{.input}}": f"{store}/inputs.pb",
            "{{.outputPrefix}}": f"{store}/meta",
            "{{.rawOutputDataPrefix}}": f"s3://{BUCKET}/data/xy/{name}-n1-0",
            "{{.checkpointOutputPrefix}}": f"s3://{BUCKET}/data/xy/{name}-n1-0/_flytecheckpoints",
            "{{.prevCheckpointPrefix}}": "",
            "{{ .remote_package_path }}": self.send_sources(),
            WORKDIR: str(workdir),
        }
        container = packaged.container(spec.template)
        command = [values.get(word, word) for word in (*container.command, *container.args)]
        assert not [word for word in command if "{{" in word]
        return command

    def send_sources(self) -> str:
        """Copy the package's sources into the blob store, as registration does. Return the sources' address."""
        assert self.package.sources is not None
        target = self.server.folder / BUCKET / self.package.sources.name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.package.sources, target)
        return f"s3://{BUCKET}/{target.name}"

    def environment(self, spec: TaskSpec, pod: Path) -> dict[str, str]:
        """Return the variables that Flyte, the image and the container's specification set."""
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
            "HOME": str(pod / "root"),
            "TMPDIR": str(pod),
            "PYTHONPATH": f"{pod / 'root'}:{pod / 'site'}",
            "PYTHONUNBUFFERED": "1",
            "MPLCONFIGDIR": str(MATPLOTLIB),
            "FLYTE_INTERNAL_EXECUTION_PROJECT": "flytesnacks",
            "FLYTE_INTERNAL_EXECUTION_DOMAIN": "development",
            "FLYTE_INTERNAL_TASK_NAME": spec.template.id.name,
            "FLYTE_DDP_RESTARTS": "0",  # as for all tests
            **self.server.flyte_environment(),
            **packaged.variables(spec.template),
        }

    def stored(self, uri: str) -> Path:
        """Return the path of the file at an address in the blob store."""
        prefix = f"s3://{BUCKET}/"
        assert uri.startswith(prefix), uri
        return self.server.folder / BUCKET / uri.removeprefix(prefix)


def unpacked(package: Package, folder: Path) -> Path:
    """Unpack the package's sources into a folder, and return the folder."""
    assert package.sources is not None
    packaged.unpack(package.sources, folder)
    return folder
