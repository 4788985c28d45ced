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

COLUMNS = ("CPU", "MEMORY", "GPU", "EPHEMERAL_STORAGE")
KUBERNETES = {
    "cpu": "CPU",
    "memory": "MEMORY",
    "gpu": "GPU",
    "nvidia.com/gpu": "GPU",
    "ephemeral-storage": "EPHEMERAL_STORAGE",
}


def main(archive: str) -> None:
    """Print a table of a package's launch plans, and a table of the pods of its tasks."""
    plans, tasks = read_package(archive)
    # Flyte makes a launch plan for each workflow, with the workflow's name and the defaults of its inputs.
    defaults = {plan.id.name: default_inputs(plan) for plan in plans if plan.id.name == plan.spec.workflow_id.name}
    rows = [plan_row(plan, defaults[plan.spec.workflow_id.name]) for plan in plans if plan.id.name not in defaults]
    print("Launch plans (each workflow has one more, of its own name, without a schedule):")
    columns = ("name", "workflow", "schedule", "data set", "model", "epochs", "besides")
    print(*align_columns([columns, *rows]), sep="\n")
    print("\nPods of each task (requests to limits, where these differ):")
    rows = [row for task in sorted(tasks, key=short_name) for row in pod_rows(task)]
    print(*align_columns([("task", "pods", "cpu", "memory", "gpu", "disk"), *rows]), sep="\n")


def read_package(archive: str) -> tuple[list[LaunchPlan], list[TaskSpec]]:
    """Return launch plans, sorted by name, and tasks of a package; the last digit of a file's name is its kind."""
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
    """Return a launch plan's row; its last cell has the other inputs that differ from the workflow's defaults."""
    schedule = plan.spec.entity_metadata.schedule
    when = f"{schedule.cron_schedule.schedule} (UTC)" if schedule.HasField("cron_schedule") else "none"
    inputs = default_inputs(plan)
    columns = {name: str(inputs.pop(name)) for name in ("dataset", "model", "epochs")}
    besides = ", ".join(f"{name}={value}" for name, value in inputs.items() if value != defaults.get(name))
    return plan.id.name, plan.spec.workflow_id.name.rpartition(".")[2], when, *columns.values(), besides or "-"


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


def pod_rows(task: TaskSpec) -> Iterator[tuple[str, ...]]:
    """Yield a row for a task's own pod, and rows for the pods that Elastic, Dask or Ray set up for it."""
    template = task.template
    custom = MessageToDict(template.custom)
    [primary] = MessageToDict(template.k8s_pod.pod_spec)["containers"]
    elastic = custom.get("elasticConfig", {"minReplicas": 1, "maxReplicas": 1})
    # Numbers are doubles in an engine's specification.
    number = format_range(int(elastic["minReplicas"]), int(elastic["maxReplicas"]))
    yield short_name(task), number, *resource_cells(*rename_resources(primary["resources"]))
    for part in ("scheduler", "workers") if "workers" in custom else ():  # Dask's
        given = custom[part]["resources"]
        found = ({each["name"]: each["value"] for each in given[kind]} for kind in ("requests", "limits"))
        yield f"  {part}", str(int(custom[part].get("numberOfWorkers", 1))), *resource_cells(*found)
    if "rayCluster" in custom:
        [nodes] = custom["rayCluster"]["workerGroupSpec"]
        for part, group in (("head", custom["rayCluster"]["headGroupSpec"]), ("nodes", nodes)):
            [container] = group["k8sPod"]["podSpec"]["containers"]
            yield (
                f"  {part}",
                str(int(group.get("replicas", 1))),
                *resource_cells(*rename_resources(container["resources"])),
            )


def short_name(task: TaskSpec) -> str:
    """Return a task's name without its module."""
    return str(task.template.id.name).rpartition(".")[2]


def format_range(least: object, most: object) -> str:
    """Return "2 to 4", or "2" if both are equal."""
    return f"{least}" if least == most else f"{least} to {most}"


def rename_resources(resources: Mapping[str, Mapping[str, str]]) -> Iterator[dict[str, str]]:
    """Yield a container's requests, then its limits, both by the names in COLUMNS in place of Kubernetes' names."""
    for kind in ("requests", "limits"):
        yield {KUBERNETES[key]: value for key, value in resources[kind].items()}


def resource_cells(requests: Mapping[str, str], limits: Mapping[str, str]) -> Iterator[str]:
    """Return a text for each of COLUMNS, such as "2 to 4" for a request of 2 and a limit of 4."""
    return (format_range(requests.get(name, "-"), limits.get(name, "-")) for name in COLUMNS)


def align_columns(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yield each row as a line, with all columns aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


if __name__ == "__main__":
    main(sys.argv[1])
