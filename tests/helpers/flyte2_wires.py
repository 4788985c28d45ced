"""Prints the wire forms of Flyte 2's tasks, and the environment of small pods, as JSON for this process's variables."""

import json
from pathlib import Path

from flyte._internal.image_cache import ImageCache
from flyte._internal.runtime.task_serde import translate_task_to_wire
from flyte._task import TaskTemplate
from flyte.models import SerializationContext
from google.protobuf.json_format import MessageToDict

from flyte2 import deployment, pods

MODULES = (deployment.training, deployment.elastic_training, deployment.release, deployment.sweep)


def main() -> None:
    """Print the tasks that other tasks await, and the variables of the pods that await."""
    found = {task.name: task for module in MODULES for task in vars(module).values() if isinstance(task, TaskTemplate)}
    images = ImageCache(image_lookup={task.parent_env_name: "image" for task in found.values()})
    context = SerializationContext(
        version="v1", project="p", domain="d", org="o", root_dir=Path.cwd(), image_cache=images
    )
    wires = {name: MessageToDict(translate_task_to_wire(task, context)) for name, task in found.items()}
    print(json.dumps({"wires": wires, "variables": pods.CHECKS.env_vars}))


if __name__ == "__main__":
    main()
