"""Lists what a package would make a cluster do: python deploy/show_package.py PACKAGE.tgz.

It is read from the package itself, which is what a cluster is given; nothing is contacted.
"""

import sys
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack
from flyteidl.admin.launch_plan_pb2 import LaunchPlan
from flyteidl.admin.task_pb2 import TaskSpec
from google.protobuf.json_format import MessageToDict

COLUMNS = ("CPU", "MEMORY", "GPU", "EPHEMERAL_STORAGE")
KUBERNETES = {
    "cpu": "CPU",
    "memory": "MEMORY",
    "gpu": "GPU",
    "nvidia.com/gpu": "GPU",
    "ephemeral-storage": "EPHEMERAL_STORAGE",
}


def main(archive: str) -> None:
    """Prints the tables."""
    plans, tasks = read(archive)
    # Flyte makes a plan of the workflow's own name for each workflow, with the defaults of its inputs.
    defaults = {plan.id.name: inputs_of(plan) for plan in plans if plan.id.name == plan.spec.workflow_id.name}
    rows = [plan_row(plan, defaults[plan.spec.workflow_id.name]) for plan in plans if plan.id.name not in defaults]
    print("Launch plans (each workflow has one more, of its own name, without a schedule):")
    columns = ("name", "workflow", "schedule", "data set", "model", "epochs", "besides")
    print(*table([columns, *rows]), sep="\n")
    print("\nPods of each task (requests to limits, where these differ):")
    rows = [row for task in sorted(tasks, key=short_name) for row in pods(task)]
    print(*table([("task", "pods", "cpu", "memory", "gpu", "disk"), *rows]), sep="\n")


def read(archive: str) -> tuple[list[LaunchPlan], list[TaskSpec]]:
    """Launch plans and tasks of a package, in which the digit that a file's name ends with is its kind."""
    plans, tasks = [], []
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None and member.name.endswith("_1.pb"):
                tasks.append(TaskSpec.FromString(file.read()))
            elif file is not None and member.name.endswith("_3.pb"):
                plans.append(LaunchPlan.FromString(file.read()))
    return sorted(plans, key=lambda plan: str(plan.id.name)), tasks


def plan_row(plan: LaunchPlan, defaults: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a launch plan's row, which ends with those of its other inputs that are not the workflow's defaults."""
    schedule = plan.spec.entity_metadata.schedule
    when = f"{schedule.cron_schedule.schedule} (UTC)" if schedule.HasField("cron_schedule") else "none"
    inputs = inputs_of(plan)
    columns = {name: str(inputs.pop(name)) for name in ("dataset", "model", "epochs")}
    besides = ", ".join(f"{name}={value}" for name, value in inputs.items() if value != defaults.get(name))
    return plan.id.name, plan.spec.workflow_id.name.rpartition(".")[2], when, *columns.values(), besides or "-"


def inputs_of(plan: LaunchPlan) -> dict[str, Any]:
    """Return the defaults of a launch plan by their names: each hyperparameter, each field of a policy, and texts."""
    found: dict[str, Any] = {}
    for name, parameter in sorted(plan.spec.default_inputs.parameters.items()):
        scalar = parameter.default.scalar
        if scalar.HasField("binary"):
            found |= msgpack.unpackb(scalar.binary.value)
        elif scalar.primitive.HasField("string_value"):
            found[name] = scalar.primitive.string_value
    return found


def pods(task: TaskSpec) -> Iterator[tuple[str, ...]]:
    """A task's rows: of its own pod, and of those that an engine sets up for it."""
    template = task.template
    custom = MessageToDict(template.custom)
    [primary] = MessageToDict(template.k8s_pod.pod_spec)["containers"]
    several = custom.get("elasticConfig", {"minReplicas": 1, "maxReplicas": 1})
    number = spanned(several["minReplicas"], several["maxReplicas"])
    yield short_name(task), number, *ranges(*by_name(primary["resources"]))
    for part in ("scheduler", "workers") if "workers" in custom else ():  # Dask's
        given = custom[part]["resources"]
        found = ({each["name"]: each["value"] for each in given[kind]} for kind in ("requests", "limits"))
        yield f"  {part}", str(int(custom[part].get("numberOfWorkers", 1))), *ranges(*found)
    if "rayCluster" in custom:
        [nodes] = custom["rayCluster"]["workerGroupSpec"]
        for part, group in (("head", custom["rayCluster"]["headGroupSpec"]), ("nodes", nodes)):
            [container] = group["k8sPod"]["podSpec"]["containers"]
            yield f"  {part}", str(int(group.get("replicas", 1))), *ranges(*by_name(container["resources"]))


def short_name(task: TaskSpec) -> str:
    """Without its module."""
    return str(task.template.id.name).rpartition(".")[2]


def spanned(least: float, most: float) -> str:
    """A range of whole numbers, which are doubles in an engine's specification."""
    return f"{int(least)}" if least == most else f"{int(least)} to {int(most)}"


def by_name(resources: Mapping[str, Mapping[str, str]]) -> Iterator[dict[str, str]]:
    """Yield a container's requests and its limits, each by the names of COLUMNS."""
    for kind in ("requests", "limits"):
        yield {KUBERNETES[key]: value for key, value in resources[kind].items()}


def ranges(requests: Mapping[str, str], limits: Mapping[str, str]) -> Iterator[str]:
    """One text for each column."""
    for name in COLUMNS:
        least, most = requests.get(name, "-"), limits.get(name, "-")
        yield least if least == most else f"{least} to {most}"


def table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Aligned lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


if __name__ == "__main__":
    main(sys.argv[1])
