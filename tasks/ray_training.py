"""The training task on Ray. Flyte sets up a cluster for the run.

A local run uses a running cluster, or this machine.
"""

from flytekit.core.resources import ResourceSpec
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.config import Hyperparameters
from flyte_ddp.pods.profiles import read_node_range, read_profile
from flytekitplugins.ddp.ray import SUBMITTER, make_ray_cluster
from flytekitplugins.ddp.resources import requests_and_limits
from flytekitplugins.ddp.run import make_engine_launcher
from tasks import pods
from tasks.flyte import flyte_task
from tasks.training import TrainingOutputs, train_and_make_outputs

PROFILE = read_profile()
# KubeRay starts the job when all nodes are available, so the lower end of a range is unused.
NODES = read_node_range()[1]
CLUSTER = make_ray_cluster(NODES, ResourceSpec(**requests_and_limits(PROFILE)), PROFILE.shared_memory, PROFILE.gpu_type)


@flyte_task(task_config=CLUSTER, **pods.launching_pod_options(SUBMITTER), cache=pods.training_cache())
def train_on_ray(hp: Hyperparameters, data: FlyteDirectory, run_version: str) -> TrainingOutputs:
    """Train a model on a Ray cluster that Flyte sets up for this task.

    Each rank uses a GPU, or CPUs if the nodes have no GPUs. The inputs are outputs of check_inputs. The outputs are
    those of train_model. A local run uses RAY_ADDRESS, if set.
    """
    return train_and_make_outputs(hp, data, run_version, make_engine_launcher("ray", NODES))
