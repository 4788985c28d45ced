"""A user's cluster as the checks see it: FlyteRemote, and kubectl where there is one."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flyteidl.core.catalog_pb2 import CatalogCacheStatus
from flytekit import LaunchPlan
from flytekit.configuration import Config, Image, ImageConfig, SerializationSettings
from flytekit.models.core.execution import WorkflowExecutionPhase
from flytekit.models.literals import Binary, Literal, Scalar
from flytekit.remote import FlyteRemote
from flytekit.remote.executions import FlyteNodeExecution, FlyteWorkflowExecution
from google.protobuf.struct_pb2 import Struct

from flyte_ddp.config import Hyperparameters
from flyte_ddp.release.policy import Policy

ROOT = Path(__file__).parents[2]
PYFLYTE = Path(sys.executable).with_name("pyflyte")
DEADLINE = 300.0  # seconds, for one execution
POLL_SECONDS = 0.5
HINTS: dict[str, Any] = {"hp": Hyperparameters, "policy": Policy}


@dataclass
class Cluster:
    """Everything is registered under one version; what is launched is remembered, and aborted in the end."""

    config: Path
    image: str
    profile: str
    project: str
    domain: str
    version: str
    folder: Path
    launched: list[str] = field(default_factory=list)
    activated: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        configuration = Config.auto(str(self.config))
        self.remote = FlyteRemote(configuration, default_project=self.project, default_domain=self.domain)
        self.sources = self.folder / "project"
        made = {str(ROOT): {".venv", ".git", "runs", "build"}}  # elsewhere in it these may be names of sources
        anywhere = shutil.ignore_patterns("__pycache__", ".*_cache")
        shutil.copytree(
            ROOT, self.sources, ignore=lambda folder, names: made.get(folder, set()) | anywhere(folder, names)
        )
        self.namespace = f"{self.project}-{self.domain}"
        found = self.kubectl("get", "namespace", self.namespace, check=False) if shutil.which("kubectl") else None
        self.has_kubectl = found is not None and found.returncode == 0

    def environment(self, **more: str) -> dict[str, str]:
        """Of commands: a home and a profile of this run's own."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        return {**os.environ, "HOME": str(home), "FLYTE_DDP_PROFILE": self.profile, "WANDB_MODE": "offline", **more}

    def pyflyte(self, *arguments: str, **environment: str) -> str:
        """Runs a command in the copy of the sources; returns what it said."""
        command = [str(PYFLYTE), "--config", str(self.config), *arguments]
        kept = {"KUBECONFIG": os.environ.get("KUBECONFIG", str(Path.home() / ".kube/config"))}
        ended = subprocess.run(
            command,
            cwd=self.sources,
            env=self.environment(**kept, **environment),
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    def register(self, version: str = "", what: str = "workflows", **environment: str) -> str:
        """Registers all, or a file of it, from the copy of the sources; nothing becomes active."""
        where = ("--project", self.project, "--domain", self.domain, "--version", version or self.version)
        return self.pyflyte("register", *where, "--image", self.image, "--copy", "all", what, **environment)

    def launch(self, plan: str, inputs: dict[str, Any], version: str = "", **options: Any) -> str:
        """Starts a launch plan; returns the execution's name."""
        found = self.remote.fetch_launch_plan(name=plan, version=version or self.version)
        execution = self.remote.execute(found, inputs=inputs, type_hints=HINTS, **options)
        return self.remembered(execution.id.name)

    def run_remote(self, hp: dict[str, Any], **environment: str) -> str:
        """Starts a training by ``pyflyte run --remote``, with the sources as they are now."""
        where = ("--project", self.project, "--domain", self.domain, "--image", self.image)
        command = ("run", "--remote", *where, "workflows/training.py", "training_wf", "--hp", json.dumps(hp))
        return self.remembered(self.pyflyte(*command, **environment).partition("/executions/")[2].split()[0])

    def remembered(self, name: str) -> str:
        """Notes an execution, to be aborted if it is still there in the end."""
        self.launched.append(name)
        return name

    def train(self, **hp: Any) -> str:
        """Starts a training with these hyperparameters."""
        return self.launch("training_on_demand", {"hp": Hyperparameters(**hp)})

    def look(self, name: str) -> FlyteWorkflowExecution:
        """An execution as it is now, with its nodes."""
        execution = self.remote.fetch_execution(name=name)
        return self.remote.sync_execution(execution, sync_nodes=True)

    def ended(self, name: str) -> FlyteWorkflowExecution:
        """An execution when it is over."""
        self.until(lambda: self.remote.fetch_execution(name=name).is_done, f"the end of {name}")
        return self.look(name)

    def succeeded(self, name: str) -> FlyteWorkflowExecution:
        """An execution that went well."""
        execution = self.ended(name)
        phase = WorkflowExecutionPhase.enum_to_string(execution.closure.phase)
        assert phase == "SUCCEEDED", f"{name}: {phase}: {execution.error.message if execution.error else ''}"
        return execution

    def failure(self, name: str) -> str:
        """The message of an execution that has failed."""
        execution = self.ended(name)
        assert execution.error is not None, f"{name} has not failed"
        return str(execution.error.message)

    def node(self, execution: FlyteWorkflowExecution, task: str) -> FlyteNodeExecution:
        """The node of a task, by the end of its name."""
        for found in execution.node_executions.values():
            tasks = found.task_executions
            if any(each.id.task_id.name.endswith(f".{task}") for each in tasks):
                return found
            if found.closure.task_node_metadata is not None and not tasks and task in str(found.metadata.spec_node_id):
                return found
        last = max(name for name in execution.node_executions if name.startswith("n"))
        return execution.node_executions[last]

    def is_hit(self, execution: FlyteWorkflowExecution) -> bool:
        """Whether training was answered from the cache."""
        metadata = self.node(execution, "train_model").closure.task_node_metadata
        return metadata is not None and metadata.cache_status == CatalogCacheStatus.Value("CACHE_HIT")

    def deck(self, name: str, node: str) -> str:
        """The page of a node, as the console gets it; empty without one, or as long as its pod has not begun."""
        for found in self.look(name).node_executions.values():
            if found.id.node_id == node and found.closure.deck_uri:
                with suppress(urllib.error.HTTPError):
                    return self.content(found.closure.deck_uri).decode()
        return ""

    def content(self, address: str) -> bytes:
        """A file in the blob store, by an address that Flyte signs."""
        signed = self.remote.client.get_download_signed_url(address).signed_url
        with urllib.request.urlopen(signed, timeout=60) as answer:
            return bytes(answer.read())

    def until(self, condition: Callable[[], object], what: str, limit: float = DEADLINE) -> Any:
        """What the condition returns, as soon as that is true."""
        deadline = time.monotonic() + limit
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what} did not come within {limit:g} s"
            time.sleep(POLL_SECONDS)
        return found

    def kubectl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs kubectl in the project's namespace; once more where a busy cluster does not answer."""
        command = ["kubectl", "--namespace", getattr(self, "namespace", "default"), *arguments]
        with suppress(subprocess.TimeoutExpired):
            return subprocess.run(command, capture_output=True, text=True, timeout=30, check=check)
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=check)

    def pods(self, name: str, node: str = "") -> list[dict[str, Any]]:
        """The pods of an execution, or of one of its nodes."""
        labels = f"execution-id={name}" + (f",node-id={node}" if node else "")
        found: dict[str, Any] = json.loads(self.kubectl("get", "pods", "-l", labels, "-o", "json").stdout)
        return list(found["items"])

    def training_pod(self, name: str, words: str, lost: str = "") -> str:
        """The name of the execution's training pod, another one than was lost, once its log has these words."""

        def found() -> str:
            for pod in self.pods(name):
                own = str(pod["metadata"]["name"])
                if own != lost and pod["metadata"]["labels"]["task-name"].endswith("train-model"):
                    log = self.kubectl("logs", own, check=False).stdout
                    if words in log:
                        return own
            return ""

        return str(self.until(found, f"{words!r} in the log of {name}"))

    def said(self, name: str, words: str) -> None:
        """Returns once a pod of the execution has said this."""
        everywhere = ("logs", "-l", f"execution-id={name}", "--tail=-1")
        self.until(lambda: words in self.kubectl(*everywhere, check=False).stdout, f"{words!r} in the logs of {name}")

    def schedule(self, plan: LaunchPlan) -> None:
        """Registers and activates a launch plan of this run's own."""
        images = ImageConfig(Image.look_up_image_info("default", self.image))
        settings = SerializationSettings(images, self.project, self.domain, self.version)
        self.remote.register_launch_plan(plan, self.version, serialization_settings=settings)
        identifier = self.remote.fetch_launch_plan(name=plan.name, version=self.version).id
        self.remote.client.update_launch_plan(identifier, 1)
        self.activated.append((plan.name, self.version))

    def clean_up(self) -> None:
        """Deactivates its launch plans, and aborts what still runs."""
        for name, version in self.activated:
            identifier = self.remote.fetch_launch_plan(name=name, version=version).id
            self.remote.client.update_launch_plan(identifier, 0)
        for name in self.launched:
            execution = self.remote.fetch_execution(name=name)
            if not execution.is_done:
                self.remote.terminate(execution, "the checks are over")


def as_struct(hp: dict[str, Any]) -> Literal:
    """As the console sends hyperparameters: numbers are doubles, and what is left out is not there."""
    values = Struct()
    values.update(hp)
    return Literal(scalar=Scalar(generic=values))


def as_msgpack(hp: dict[str, Any]) -> Literal:
    """As flytekit does."""
    import msgpack

    return Literal(scalar=Scalar(binary=Binary(value=msgpack.packb(hp), tag="msgpack")))
