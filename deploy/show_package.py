"""Print the launch plans and pods of a package for a cluster: python deploy/show_package.py PACKAGE.tgz.

Reads the package only, without network.
"""

import sys
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack
from flyteidl.admin.launch_plan_pb2 import LaunchPlan
from flyteidl.admin.task_pb2 import TaskSpec
from google.protobuf.json_format import MessageToDict

# The names of each resource: Kubernetes' and those of Dask's plugin.
RESOURCES = (
    ("cpu", "CPU"),
    ("memory", "MEMORY"),
    ("gpu", "nvidia.com/gpu", "GPU"),
    ("ephemeral-storage", "EPHEMERAL_STORAGE"),
)


def print_package(archive: str) -> None:
    """Print a table of a package's launch plans, and a table of the pods of its tasks."""
    plans, tasks = list[LaunchPlan](), list[tuple[str, TaskSpec]]()
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None and member.name.endswith("_1.pb"):  # the last digit of a file's name is its kind
                task = TaskSpec.FromString(file.read())
                tasks.append((task.template.id.name.rpartition(".")[2], task))
            elif file is not None and member.name.endswith("_3.pb"):
                plans.append(LaunchPlan.FromString(file.read()))
    plans.sort(key=lambda plan: str(plan.id.name))
    # Flyte makes a launch plan for each workflow, with the workflow's name and the defaults of its inputs.
    defaults = {plan.id.name: default_inputs(plan) for plan in plans if plan.id.name == plan.spec.workflow_id.name}
    rows = [plan_row(plan, defaults[plan.spec.workflow_id.name]) for plan in plans if plan.id.name not in defaults]
    print("Launch plans (each workflow has one more, of its own name, without a schedule):")
    print_table([("name", "workflow", "schedule", "data set", "model", "epochs", "besides"), *rows])
    print("\nPods of each task (requests to limits, where these differ):")
    pods = [row for name, task in sorted(tasks, key=lambda each: each[0]) for row in pod_rows(name, task)]
    print_table([("task", "pods", "cpu", "memory", "gpu", "disk"), *pods])


def plan_row(plan: LaunchPlan, defaults: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a launch plan's row; its last cell has the other inputs that differ from the workflow's defaults."""
    schedule = plan.spec.entity_metadata.schedule
    when = f"{schedule.cron_schedule.schedule} (UTC)" if schedule.HasField("cron_schedule") else "none"
    inputs = default_inputs(plan)
    columns = [str(inputs.pop(name)) for name in ("dataset", "model", "epochs")]
    besides = ", ".join(f"{name}={value}" for name, value in inputs.items() if value != defaults.get(name))
    return plan.id.name, plan.spec.workflow_id.name.rpartition(".")[2], when, *columns, besides or "-"


def default_inputs(plan: LaunchPlan) -> dict[str, Any]:
    """Return a launch plan's default inputs by name: fields of hyperparameters and of policies, and texts."""
    found: dict[str, Any] = {}
    for name, parameter in sorted(plan.spec.default_inputs.parameters.items()):
        scalar = parameter.default.scalar
        if scalar.HasField("binary"):
            found |= msgpack.unpackb(scalar.binary.value)
        elif scalar.primitive.HasField("string_value"):
            found[name] = scalar.primitive.string_value
    return found


def pod_rows(name: str, task: TaskSpec) -> Iterator[tuple[str, ...]]:
    """Yield a row for a task's own pod, and rows for the pods that Elastic, Dask or Ray set up for it."""
    custom = MessageToDict(task.template.custom)  # numbers in an engine's specification are doubles
    elastic = custom.get("elasticConfig", {"minReplicas": 1, "maxReplicas": 1})
    number = format_range(int(elastic["minReplicas"]), int(elastic["maxReplicas"]))
    yield name, number, *container_cells(MessageToDict(task.template.k8s_pod.pod_spec))
    for part in ("scheduler", "workers") if "workers" in custom else ():  # Dask's
        given = custom[part]["resources"]
        found = ({each["name"]: each["value"] for each in given[kind]} for kind in ("requests", "limits"))
        yield f"  {part}", str(int(custom[part].get("numberOfWorkers", 1))), *resource_cells(*found)
    if "rayCluster" in custom:
        [nodes] = custom["rayCluster"]["workerGroupSpec"]
        for part, group in (("head", custom["rayCluster"]["headGroupSpec"]), ("nodes", nodes)):
            yield f"  {part}", str(int(group.get("replicas", 1))), *container_cells(group["k8sPod"]["podSpec"])


def container_cells(pod: Mapping[str, Any]) -> Iterator[str]:
    [container] = pod["containers"]
    return resource_cells(container["resources"]["requests"], container["resources"]["limits"])


def resource_cells(requests: Mapping[str, str], limits: Mapping[str, str]) -> Iterator[str]:
    for names in RESOURCES:
        least, most = (next((given[name] for name in names if name in given), "-") for given in (requests, limits))
        yield format_range(least, most)


def format_range(least: object, most: object) -> str:
    return f"{least}" if least == most else f"{least} to {most}"


def print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    print_package(sys.argv[1])
