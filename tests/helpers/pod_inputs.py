"""Inputs of packaged tasks as the console and the engine send them, and the message of a rejection."""

from typing import Any

from flyteidl.core.literals_pb2 import Literal
from pod import Cluster

CHECK, FETCH = "tasks.preparation.check_inputs", "tasks.preparation.fetch_dataset"
TRAIN, PREDICT = "tasks.training.train_model", "tasks.prediction.predict_images"
SMOKE: dict[str, Any] = {"dataset": "digits", "epochs": 1, "max_steps": 8, "num_ranks": 2}
Inputs = dict[str, Literal]  # of a task, by their names
VERSION = "0.0.0+package"  # of the packaged library; differs from the version installed here


def from_console(hp: dict[str, Any]) -> Literal:
    """Return hyperparameters as the console's form sends them."""
    literal = Literal()
    literal.scalar.generic.update(hp)
    return literal


def check_inputs(cluster: Cluster, hp: Literal) -> Inputs:
    """Return the inputs of the first task, including the inputs that the workflow adds."""
    nodes = cluster.package.workflows["workflows.training.training_wf"].template.nodes
    [node] = [node for node in nodes if node.task_node.reference_id.name == CHECK]
    bound = {binding.var: binding.binding for binding in node.inputs}
    given = {"kickoff_time", "engine", "model_name", "run"}
    assert set(bound) == {"hp", *given}
    return {"hp": hp, **{name: Literal(scalar=bound[name].scalar) for name in given}}
