"""Profiles, which are sizes of pods, and the engines.

FLYTE_DDP_PROFILE chooses a profile at registration, also for pods.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

from flyte_ddp.core.errors import UserError, unknown_name_error
from flyte_ddp.core.machine.resources import MOST_CPU_RANKS
from flyte_ddp.core.settings import read_text_variable

PROFILE_VARIABLE = "FLYTE_DDP_PROFILE"
NODES_VARIABLE = "FLYTE_DDP_NODES"
UNITS = {  # factors of the suffixes in Kubernetes' quantities
    "": Decimal(1),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("num", -3)},
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """CPUs, memory, disk and GPUs of a pod, as Kubernetes quantities and a number of GPUs."""

    cpu: str
    memory: str
    ephemeral_storage: str
    gpus: int = 0


@dataclass(frozen=True, kw_only=True)
class Profile(Size):
    """The size of a training pod, and the sizes of other pods."""

    shared_memory: str  # size of /dev/shm, through which NCCL copies between GPUs without a direct link
    data: Size  # of pods that fetch, pack and check data; the disk must hold a whole data set
    # Limits of pods that check inputs or read an index. Such pods request half a CPU and 1 GiB.
    light: Size = Size(cpu="2", memory="4Gi", ephemeral_storage="4Gi")
    gpu_type: str = ""  # value of the nodes' label for their GPU, such as nvidia-l4; "" accepts any type
    pod_template: str | None = None  # a template in the cluster (deploy/pod-template.yaml): tolerations, grace period
    grace_seconds: int = 30  # from SIGTERM to SIGKILL: the template's terminationGracePeriodSeconds, or Kubernetes' 30
    interruptible: bool | None = None  # True trains on nodes that may be taken away; None lets the launch decide


PROFILES: dict[str, Profile] = {
    # For clusters without GPUs. A run without a cluster is not limited to this size.
    "local": Profile(
        cpu="2",
        memory="4Gi",
        ephemeral_storage="5Gi",
        shared_memory="256Mi",
        data=Size(cpu="2", memory="4Gi", ephemeral_storage="20Gi"),
    ),
    # The demo cluster of `flytectl demo start` on a laptop.
    "sandbox": Profile(
        cpu="1",
        memory="2Gi",
        ephemeral_storage="2Gi",
        shared_memory="128Mi",
        data=Size(cpu="1", memory="2Gi", ephemeral_storage="4Gi"),
        light=Size(cpu="1", memory="2Gi", ephemeral_storage="2Gi"),
    ),
    "gpu": Profile(
        gpus=2,
        cpu="8",
        memory="30Gi",
        ephemeral_storage="20Gi",
        shared_memory="4Gi",
        data=Size(cpu="2", memory="8Gi", ephemeral_storage="100Gi"),
        pod_template="flyte-ddp-gpu",
        grace_seconds=120,
    ),
    "gpu-a100": Profile(
        gpus=8,
        cpu="64",
        memory="480Gi",
        ephemeral_storage="200Gi",
        shared_memory="32Gi",
        data=Size(cpu="4", memory="16Gi", ephemeral_storage="500Gi"),
        gpu_type="nvidia-tesla-a100",
        pod_template="flyte-ddp-gpu",
        grace_seconds=120,
    ),
}


def read_profile() -> Profile:
    """Return the profile that FLYTE_DDP_PROFILE names.

    Raises:
        UserError: No profile has this name.
    """
    name = read_text_variable(PROFILE_VARIABLE)
    if name not in PROFILES:
        raise unknown_name_error(PROFILE_VARIABLE, name, PROFILES)
    return PROFILES[name]


def divide_size(size: Size, parts: int) -> Size:
    """Return the size of one of ``parts`` equal parts of a pod. Each part has the whole disk.

    CPUs are rounded down to thousandths, at least 0.001, and memory to MiB.
    """
    thousandths = max(1, int(parse_quantity(size.cpu) / parts * 1000))
    return Size(
        cpu=f"{thousandths}m" if thousandths % 1000 else f"{thousandths // 1000}",
        memory=f"{int(parse_quantity(size.memory)) // parts // 2**20}Mi" if parts > 1 else size.memory,
        gpus=size.gpus // parts,
        ephemeral_storage=size.ephemeral_storage,
    )


def read_node_range() -> tuple[int, int]:
    """Return the smallest and the largest number of nodes from FLYTE_DDP_NODES, such as "2" or "2:4".

    Raises:
        UserError: The variable is malformed.
    """
    text = read_text_variable(NODES_VARIABLE)
    least, _, most = text.partition(":")
    try:
        nodes = int(least), int(most or least)
    except ValueError:
        nodes = (0, 0)
    if not 1 <= nodes[0] <= nodes[1]:
        raise UserError(f"{NODES_VARIABLE}={text!r}: must be a number of nodes, such as 2, or a range, such as 2:4")
    return nodes


def count_ranks_of_node(gpus: int, cpu: str) -> int:
    """Return the default number of ranks on a node: one for each GPU, else for each CPU, up to 4."""
    return gpus or max(1, min(int(parse_quantity(cpu)), MOST_CPU_RANKS))


@dataclass(frozen=True)
class Engine:
    """An engine that makes the pods of ranks.

    The key in ENGINES also names the extra, the launcher and the plugin module.
    """

    flytekit_plugin: str  # the module that the extra installs
    ranks_per_node: Callable[[Profile], int]  # the most ranks of a node without GPUs
    exact: bool = False  # whether each node has exactly this many ranks, also with GPUs


ENGINES = {
    "elastic": Engine("flytekitplugins.kfpytorch", lambda node: count_ranks_of_node(node.gpus, node.cpu), exact=True),
    "ray": Engine("flytekitplugins.ray", lambda node: math.ceil(parse_quantity(node.cpu))),
    "dask": Engine("flytekitplugins.dask", lambda node: max(1, node.gpus)),
}


class NodeAndRankLimits(NamedTuple):
    """The limits of a training on an engine."""

    most_nodes: int
    exact_ranks: int  # 0 if the hyperparameter num_ranks decides
    most_cpu_ranks: int  # of ranks without GPUs, 0 for no limit


def compute_node_and_rank_limits(engine: str) -> NodeAndRankLimits:
    """Return the limits of a training on ``engine`` (elastic, ray, dask, or "" for a single pod).

    Raises:
        UserError: The engine does not exist, or FLYTE_DDP_NODES or FLYTE_DDP_PROFILE is wrong.
    """
    if not engine:
        return NodeAndRankLimits(1, 0, 0)
    if engine not in ENGINES:
        raise unknown_name_error("engine", engine, ENGINES)
    most = read_node_range()[1]
    ranks = most * ENGINES[engine].ranks_per_node(read_profile())
    return NodeAndRankLimits(most, ranks, 0) if ENGINES[engine].exact else NodeAndRankLimits(most, 0, ranks)


def parse_quantity(text: str) -> Decimal:
    """Return the number of a Kubernetes quantity, such as 20Gi or 3500m.

    Raises:
        UserError: The quantity is malformed or not positive.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)(?:([eE][+-]?\d+)|([KMGTPE]i|[numkMGTPE])?)", text)
    if found is None or not Decimal(found[1]):
        raise UserError(
            f"quantity {text!r} (flyte_ddp/pods/profiles.py): must be a Kubernetes quantity, such as 8, 3500m, 20Gi or "
            "20G"
        )
    number, exponent, suffix = found.groups()
    return Decimal(f"{number}{exponent or ''}") * UNITS[suffix or ""]
