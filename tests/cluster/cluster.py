"""Access to a user's cluster for the checks, by FlyteRemote, pyflyte and, if it is there, kubectl."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
from flyteidl.core.catalog_pb2 import CatalogCacheStatus
from flytekit import LaunchPlan
from flytekit.configuration import Config, Image, ImageConfig, SerializationSettings
from flytekit.models.core.execution import WorkflowExecutionPhase
from flytekit.models.literals import Binary, Literal, Scalar
from flytekit.remote import FlyteRemote
from flytekit.remote.executions import FlyteWorkflowExecution
from google.protobuf.struct_pb2 import Struct

from flyte_ddp import storage
from flyte_ddp.config import Hyperparameters
from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.release.policy import Policy
from flyte_ddp.sweep.space import Sweep

ROOT = Path(__file__).parents[2]
PYFLYTE = Path(sys.executable).with_name("pyflyte")
DEADLINE = 300.0  # seconds, for one execution
POLL_SECONDS = 0.5
HINTS: dict[str, Any] = {"hp": Hyperparameters, "policy": Policy, "sweep": Sweep, "window": WindowSource}
PRINT_SAVED_STEP = """
import sys
from flyte_ddp.pods import checkpoint_store, platforms, retries

project, domain, execution = platforms.read_execution_names()
files = checkpoint_store.list_run_files(f"{retries.read_checkpoints_address(sys.argv[1])}/{project}/{domain}")
saved = [file.step for file in files if (file.kind, file.execution) == (checkpoint_store.SAVED, execution)]
print(max(saved, default=0))
"""


class Cluster:
    """A Flyte cluster, a copy of the working tree, and the executions and launch plans that :meth:`clean_up` ends."""

    def __init__(self, option: Callable[[str], str], folder: Path) -> None:
        """Copy the working tree into ``folder``; ``option`` returns the value of an option of the command line."""
        self.folder, self.config = folder, Path(option("--flyte-config")).resolve()
        self.image, self.profile = option("--image"), option("--profile")
        self.project, self.domain = option("--project"), option("--domain")
        self.version = f"cluster-test-{int(time.time())}"
        self.launched: list[str] = []
        self.activated: list[tuple[str, str]] = []
        configuration = Config.auto(str(self.config))
        self.remote = FlyteRemote(configuration, default_project=self.project, default_domain=self.domain)
        self.sources = self.folder / "project"
        made = {str(ROOT): {".venv", ".git", "runs", "build"}}  # below ROOT sources may have these names
        anywhere = shutil.ignore_patterns("__pycache__", ".*_cache")
        shutil.copytree(
            ROOT, self.sources, ignore=lambda folder, names: made.get(folder, set()) | anywhere(folder, names)
        )
        self.namespace = f"{self.project}-{self.domain}"
        found = self.kubectl("get", "namespace", self.namespace, check=False) if shutil.which("kubectl") else None
        self.has_kubectl = found is not None and found.returncode == 0

    def pyflyte(self, *arguments: str, **environment: str) -> str:
        """Run pyflyte in the copy of the sources, with a home folder of this run's own, and return its output.

        Raises AssertionError with the output if pyflyte fails, TimeoutExpired if it takes over DEADLINE.
        """
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        own = {"HOME": str(home), "FLYTE_DDP_PROFILE": self.profile, "WANDB_MODE": "offline"}
        own["KUBECONFIG"] = os.environ.get("KUBECONFIG", str(Path.home() / ".kube/config"))
        command = [str(PYFLYTE), "--config", str(self.config), *arguments]
        variables = {**os.environ, **own, **environment}
        ended = subprocess.run(
            command, cwd=self.sources, env=variables, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    def register(self, version: str = "", what: str = "workflows", **environment: str) -> str:
        """Register all workflows, or those of one file, from the copy of the sources; activate nothing."""
        where = ("--project", self.project, "--domain", self.domain, "--version", version or self.version)
        return self.pyflyte("register", *where, "--image", self.image, "--copy", "all", what, **environment)

    def launch(self, plan: str, inputs: dict[str, Any], version: str = "", **options: Any) -> str:
        """Start an execution of a launch plan; return the execution's name."""
        found = self.remote.fetch_launch_plan(name=plan, version=version or self.version)
        execution = self.remote.execute(found, inputs=inputs, type_hints=HINTS, **options)
        return self.remember_execution(execution.id.name)

    def run_remote(self, hp: dict[str, Any], **environment: str) -> str:
        """Start a training by ``pyflyte run --remote`` with the present sources; return the execution's name."""
        return self.run_file_remote("workflows/training.py", "training_wf", "--hp", json.dumps(hp), **environment)

    def run_file_remote(self, *what: str, **environment: str) -> str:
        """Start a file's task or workflow by ``pyflyte run --remote``; return the execution's name.

        ``what`` is what follows on the command line: further options, the file, the name in it, and inputs.
        """
        where = ("--project", self.project, "--domain", self.domain, "--image", self.image)
        started = self.pyflyte("run", "--remote", *where, *what, **environment)
        return self.remember_execution(started.partition("/executions/")[2].split()[0])

    def remember_execution(self, name: str) -> str:
        """Add an execution to those that :meth:`clean_up` aborts; return its name."""
        self.launched.append(name)
        return name

    def launch_training(self, **hp: Any) -> str:
        """Start a training with these hyperparameters; return the execution's name."""
        return self.launch("training_on_demand", {"hp": Hyperparameters(**hp)})

    def fetch_execution_with_nodes(self, name: str) -> FlyteWorkflowExecution:
        """Return the present state of an execution, with its nodes."""
        execution = self.remote.fetch_execution(name=name)
        return self.remote.sync_execution(execution, sync_nodes=True)

    def wait_for_end(self, name: str) -> FlyteWorkflowExecution:
        """Wait up to DEADLINE until an execution has ended; return it with its nodes."""
        self.wait_until(lambda: self.remote.fetch_execution(name=name).is_done, f"the end of {name}")
        return self.fetch_execution_with_nodes(name)

    def wait_for_success(self, name: str) -> FlyteWorkflowExecution:
        """Wait up to DEADLINE until an execution has ended, check that it succeeded, and return it with its nodes."""
        execution = self.wait_for_end(name)
        phase = WorkflowExecutionPhase.enum_to_string(execution.closure.phase)
        assert phase == "SUCCEEDED", f"{name}: {phase}: {execution.error.message if execution.error else ''}"
        return execution

    def wait_for_error(self, name: str) -> str:
        """Wait up to DEADLINE until an execution has ended, check that it failed, and return its error's message."""
        execution = self.wait_for_end(name)
        assert execution.error is not None, f"{name} has not failed"
        return str(execution.error.message)

    def is_from_cache(self, execution: FlyteWorkflowExecution) -> bool:
        """Return whether the result came from the cache: that of train_model, or without that task of the last node."""
        node = execution.node_executions[max(name for name in execution.node_executions if name.startswith("n"))]
        for found in execution.node_executions.values():
            tasks, metadata = found.task_executions, found.closure.task_node_metadata
            cached = metadata is not None and not tasks and "train_model" in str(found.metadata.spec_node_id)
            if cached or any(each.id.task_id.name.endswith(".train_model") for each in tasks):
                node = found
                break
        metadata = node.closure.task_node_metadata
        return metadata is not None and metadata.cache_status == CatalogCacheStatus.Value("CACHE_HIT")

    def read_deck(self, name: str, node: str) -> str:
        """Return the HTML of a node's deck; "" if there is none, or its pod has not begun."""
        for found in self.fetch_execution_with_nodes(name).node_executions.values():
            if found.id.node_id == node and found.closure.deck_uri:
                with suppress(storage.UnavailableError):
                    return self.read_blob(found.closure.deck_uri).decode()
        return ""

    def read_blob(self, address: str) -> bytes:
        """Return the content of a file in the blob store, from an address that Flyte signs."""
        return storage.read_file(self.remote.client.get_download_signed_url(address).signed_url)

    def wait_until(self, condition: Callable[[], object], what: str, limit: float = DEADLINE) -> Any:
        """Call ``condition`` until its result is true; return the result. AssertionError after ``limit`` seconds."""
        deadline = time.monotonic() + limit
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what} did not come within {limit:g} s"
            time.sleep(POLL_SECONDS)
        return found

    def kubectl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run kubectl in the project's namespace and return its result; CalledProcessError if it fails with ``check``.

        If it takes over 30 s, as on a busy cluster, runs it once more, for up to 60 s.
        """
        command = ["kubectl", "--namespace", getattr(self, "namespace", "default"), *arguments]
        with suppress(subprocess.TimeoutExpired):
            return subprocess.run(command, capture_output=True, text=True, timeout=30, check=check)
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=check)

    def list_pods(self, name: str) -> list[dict[str, Any]]:
        """Return the pods of an execution as kubectl's objects."""
        found = json.loads(self.kubectl("get", "pods", "-l", f"execution-id={name}", "-o", "json").stdout)
        return list(found["items"])

    def wait_for_training_log(self, name: str, words: str, lost: str = "") -> str:
        """Wait until a training pod of the execution, other than ``lost``, has logged ``words``; return its name."""

        def found() -> str:
            for pod in self.list_pods(name):
                own = str(pod["metadata"]["name"])
                if own != lost and pod["metadata"]["labels"]["task-name"].endswith("train-model"):
                    log = self.kubectl("logs", own, check=False).stdout
                    if words in log:
                        return own
            return ""

        return str(self.wait_until(found, f"{words!r} in the log of {name}"))

    def wait_for_checkpoint(self, name: str) -> tuple[str, int]:
        """Wait until the blob store has a checkpoint of an execution; return its pod's name and the checkpoint's step.

        The pod lists the blob store, as it has the credentials for that. Fails at once if the execution has ended.
        """

        def found() -> tuple[str, int] | None:
            execution = self.remote.fetch_execution(name=name)
            assert not execution.is_done, f"{name} has ended: {execution.error.message if execution.error else ''}"
            for pod in self.list_pods(name):
                own, arguments = str(pod["metadata"]["name"]), pod["spec"]["containers"][0]["args"]
                outputs = arguments[arguments.index("--raw-output-data-prefix") + 1]
                command = ("exec", own, "--", "python", "-c", PRINT_SAVED_STEP, outputs)
                if step := int(self.kubectl(*command, check=False).stdout or 0):
                    return own, step
            return None

        pod, step = self.wait_until(found, f"a checkpoint of {name}")
        return str(pod), int(step)

    def activate_launch_plan(self, plan: LaunchPlan) -> None:
        """Register a launch plan, and make it active until :meth:`clean_up`."""
        images = ImageConfig(Image.look_up_image_info("default", self.image))
        settings = SerializationSettings(images, self.project, self.domain, self.version)
        self.remote.register_launch_plan(plan, self.version, serialization_settings=settings)
        identifier = self.remote.fetch_launch_plan(name=plan.name, version=self.version).id
        self.remote.client.update_launch_plan(identifier, 1)
        self.activated.append((plan.name, self.version))

    def clean_up(self) -> None:
        """Deactivate this run's launch plans, and abort its executions that still run."""
        for name, version in self.activated:
            identifier = self.remote.fetch_launch_plan(name=name, version=version).id
            self.remote.client.update_launch_plan(identifier, 0)
        for name in self.launched:
            self.abort(name)

    def abort(self, name: str) -> None:
        """Abort an execution if it still runs and is not being aborted."""
        execution = self.remote.fetch_execution(name=name)
        if not execution.is_done and execution.closure.phase != WorkflowExecutionPhase.ABORTING:
            self.remote.terminate(execution, "a check has ended")


def encode_as_console(hp: dict[str, Any]) -> Literal:
    """Return hyperparameters as the console sends them: all numbers are doubles."""
    values = Struct()
    values.update(hp)
    return Literal(scalar=Scalar(generic=values))


def encode_as_flytekit(hp: dict[str, Any]) -> Literal:
    """Return hyperparameters as flytekit sends them: in msgpack."""
    return Literal(scalar=Scalar(binary=Binary(value=msgpack.packb(hp), tag="msgpack")))
