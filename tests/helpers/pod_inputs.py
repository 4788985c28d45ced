"""Inputs of packaged tasks as the console and the engine send them, and the message of a refusal."""

from typing import Any

from flyteidl.core.errors_pb2 import ContainerError
from flyteidl.core.execution_pb2 import ExecutionError
from flyteidl.core.literals_pb2 import Literal
from pod import Cluster, PodEnded

CHECK, FETCH = "tasks.preparation.check_inputs", "tasks.preparation.fetch_dataset"
TRAIN, PREDICT = "tasks.training.train_model", "tasks.prediction.predict_images"
SMOKE: dict[str, Any] = {"dataset": "digits", "epochs": 1, "max_steps": 8, "num_ranks": 2}
Inputs = dict[str, Literal]  # of a task, by their names
VERSION = "0.0.0+package"  # of the packaged library, to tell it from the one that is installed here


def from_console(hp: dict[str, Any]) -> Literal:
    """Hyperparameters as the console's form sends them."""
    literal = Literal()
    literal.scalar.generic.update(hp)
    return literal


def check_inputs(cluster: Cluster, hp: Literal) -> Inputs:
    """Inputs of the first task, with what the workflow itself gives it."""
    nodes = cluster.package.workflows["workflows.training.training_wf"].template.nodes
    [node] = [node for node in nodes if node.task_node.reference_id.name == CHECK]
    bound = {binding.var: binding.binding for binding in node.inputs}
    given = {"kickoff_time", "engine", "model_name"}
    assert set(bound) == {"hp", *given}
    return {"hp": hp, **{name: Literal(scalar=bound[name].scalar) for name in given}}


def refused(ended: PodEnded) -> str:
    """The message of a pod that failed by a user's mistake: not tried again, and without outputs."""
    assert ended.error is not None, ended.log
    assert ended.outputs is None
    assert ended.error.kind == ContainerError.NON_RECOVERABLE
    assert ended.error.origin == ExecutionError.USER
    assert ended.error.code.partition(":")[0] == "USER"
    message: str = ended.error.message
    return message
