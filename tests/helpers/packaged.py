"""Make packages of serialized tasks, workflows and launch plans by ``pyflyte package``, and read them."""

import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import pytest
from cli import ROOT, Ended, pyflyte
from flyteidl.admin.launch_plan_pb2 import LaunchPlan
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.admin.workflow_pb2 import WorkflowSpec
from flyteidl.core.literals_pb2 import KeyValuePair, Literal
from flyteidl.core.tasks_pb2 import Container, Resources, TaskTemplate
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from flyte_ddp.core.files import hold_lock

# Requirements of Kubernetes' PodSecurity level "restricted" for a pod, and for each container.
RESTRICTED_POD = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
RESTRICTED_CONTAINER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
RESOURCES = {"cpu": "CPU", "memory": "MEMORY", "gpu": "GPU", "ephemeral-storage": "EPHEMERAL_STORAGE"}


@dataclass
class Package:
    """The tasks, workflows and launch plans for a Flyte cluster, by name.

    ``sources`` is the archive that pods unpack, if any. ``output`` is the command's output.
    """

    tasks: dict[str, TaskSpec] = field(default_factory=dict)
    workflows: dict[str, WorkflowSpec] = field(default_factory=dict)
    launch_plans: dict[str, LaunchPlan] = field(default_factory=dict)
    sources: Path | None = None
    output: str = ""


def make(
    folder: Path, *options: str, directory: Path = ROOT, pkgs: str = "workflows", **environment: str
) -> tuple[Ended, Package]:
    """Run ``pyflyte package`` with this environment. Return output and package, which is empty after a failure."""
    archive = folder / "package.tgz"
    arguments = ("--pkgs", pkgs, "package", "--image", "flyte-ddp:test", "--output", str(archive), *options)
    ended = pyflyte(*arguments, home=folder / "home", directory=directory, **environment)
    return ended, read(archive, folder / "package") if archive.exists() else Package()


def make_shared(factory: pytest.TempPathFactory, name: str, make_in: Callable[[Path], Ended]) -> Package:
    """Make a package once for all workers of the suite. ``make_in`` gets a folder for the package."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"package-{name}"
    with hold_lock(folder, "lock"):
        if not (folder / "output").exists():
            ended = make_in(folder)
            assert ended.exit_code == 0, ended.output
            (folder / "output").write_text(ended.output)
    package = read(folder / "package.tgz", factory.mktemp("package"))
    package.output = (folder / "output").read_text()
    return package


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar file. Debian's Python 3.11.2 has no filters, and Python 3.12 warns without a filter."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "--extract", "--file", archive], cwd=folder, check=True)


def read(archive: Path, folder: Path) -> Package:
    """Unpack a package into ``folder``, and return the package. The last digit of a file's name is the kind."""
    package = Package()
    unpack(archive, folder)
    for path in folder.iterdir():
        content = path.read_bytes()
        if path.name.endswith("_1.pb"):
            task = TaskSpec.FromString(content)
            package.tasks[task.template.id.name] = task
        elif path.name.endswith("_2.pb"):
            workflow = WorkflowSpec.FromString(content)
            package.workflows[workflow.template.id.name] = workflow
        elif path.name.endswith("_3.pb"):
            plan = LaunchPlan.FromString(content)
            package.launch_plans[plan.id.name] = plan
        else:
            package.sources = path
    return package


def container(template: TaskTemplate) -> Container:
    """Return the only container of a task's pod, as Flyte's message for a container."""
    if template.HasField("container"):  # the task has no pod template
        return template.container
    [found] = MessageToDict(template.k8s_pod.pod_spec)["containers"]
    resources = {  # sorted: a map of protobuf keeps no order
        kind: [Resources.ResourceEntry(name=RESOURCES[name], value=value) for name, value in sorted(given.items())]
        for kind, given in found["resources"].items()
    }
    variables = [KeyValuePair(key=each["name"], value=each.get("value", "")) for each in found["env"]]
    return Container(image=found["image"], args=found["args"], env=variables, resources=Resources(**resources))


def variables(template: TaskTemplate) -> dict[str, str]:
    """Return the environment variables of a task's pod."""
    return {pair.key: pair.value for pair in container(template).env}


def names(archive: Path) -> set[str]:
    """Return the names of the files in an archive."""
    with tarfile.open(archive) as tar:
        return {member.name for member in tar if member.isfile()}


def hyperparameters(literal: Literal) -> Mapping[str, Any]:
    """Return the fields of the hyperparameters or of the policy in a literal."""
    assert literal.scalar.binary.tag == "msgpack"
    content: Mapping[str, Any] = msgpack.unpackb(literal.scalar.binary.value)
    return content


def form_fields(schema: Struct) -> dict[str, Any]:
    """Return the fields of a form as the console shows them, in the order of the merged list."""
    assert schema["title"]
    assert "properties" not in schema, "an object has no order in Flyte"
    return {name: field for part in schema["allOf"] for name, field in part["properties"].items()}


def project_files() -> list[str]:
    """Return the names of the project's files: those that git tracks, and new sources."""
    tracked = listed_by_git("--cached")
    sources = ("config", "flyte_ddp", "flytekitplugins", "tasks", "workflows")
    new = listed_by_git("--others", "--exclude-standard", "--", *sources)
    return [name for name in (*tracked, *new) if (ROOT / name).is_file()]


def listed_by_git(*options: str) -> list[str]:
    """Return the names that ``git ls-files`` prints."""
    ended = subprocess.run(["git", "ls-files", "-z", *options], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in ended.stdout.split("\0") if name]


def copy_project(folder: Path) -> None:
    """Copy the project's files into a folder."""
    for name in project_files():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
