"""Profiles: how large pods are. FLYTE_DDP_PROFILE chooses one at registration, and pods are given its name.

So what was requested of Kubernetes and what training expects come from the same entry of PROFILES.
"""

import math
import re
from dataclasses import dataclass
from decimal import Decimal

from flyte_ddp.errors import UserError, unknown_name
from flyte_ddp.hardware import MOST_CPU_RANKS
from flyte_ddp.settings import read_text

PROFILE_VARIABLE = "FLYTE_DDP_PROFILE"
NODES_VARIABLE = "FLYTE_DDP_NODES"
UNITS = {  # of Kubernetes' quantities
    "": Decimal(1),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("num", -3)},
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a pod requests, in Kubernetes' quantities."""

    cpu: str
    memory: str
    ephemeral_storage: str
    gpus: int = 0


@dataclass(frozen=True, kw_only=True)
class Profile(Size):
    """The size of a training pod, and those of other pods.

    Args:
        shared_memory: Size of /dev/shm, over which NCCL talks between GPUs that have no direct link.
        data: Size of pods that fetch, pack and check data, whose disk must hold all of it.
        light: Limits of pods that look at inputs or an index; they request half a CPU and 1 GiB.
        gpu_type: Value of the nodes' label for their GPU, such as nvidia-l4. Empty takes any.
        pod_template: Name of a pod template in the cluster (deploy/pod-template.yaml): tolerations, grace period.
        grace_seconds: Seconds from SIGTERM to SIGKILL: the template's terminationGracePeriodSeconds, or Kubernetes' 30.
        interruptible: True trains on nodes that may be taken away; None does what the launch says.
    """

    shared_memory: str
    data: Size
    light: Size
    gpu_type: str = ""
    pod_template: str | None = None
    grace_seconds: int = 30
    interruptible: bool | None = None


PROFILES: dict[str, Profile] = {
    # For clusters without GPUs. On one's own machine nothing limits a run to it.
    "local": Profile(
        cpu="2",
        memory="4Gi",
        ephemeral_storage="5Gi",
        shared_memory="256Mi",
        data=Size(cpu="2", memory="4Gi", ephemeral_storage="20Gi"),
        light=Size(cpu="2", memory="4Gi", ephemeral_storage="4Gi"),
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
        light=Size(cpu="2", memory="4Gi", ephemeral_storage="4Gi"),
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
        light=Size(cpu="2", memory="4Gi", ephemeral_storage="4Gi"),
        gpu_type="nvidia-tesla-a100",
        pod_template="flyte-ddp-gpu",
        grace_seconds=120,
    ),
}


def chosen_profile() -> Profile:
    """Return the profile that FLYTE_DDP_PROFILE names.

    Raises:
        UserError: there is no profile of that name.
    """
    name = read_text(PROFILE_VARIABLE)
    if name not in PROFILES:
        raise unknown_name(PROFILE_VARIABLE, name, PROFILES)
    return PROFILES[name]


def split_size(size: Size, parts: int) -> Size:
    """Return one of several equal parts of a size: of its CPUs, memory and GPUs, with the whole disk."""
    thousandths = max(1, int(parse_quantity(size.cpu) / parts * 1000))
    return Size(
        cpu=f"{thousandths}m" if thousandths % 1000 else f"{thousandths // 1000}",
        memory=f"{parse_bytes(size.memory) // parts // 2**20}Mi" if parts > 1 else size.memory,
        gpus=size.gpus // parts,
        ephemeral_storage=size.ephemeral_storage,
    )


def node_range() -> tuple[int, int]:
    """Return over how many pods of the profile's size an engine's ranks are spread, at least and at most.

    Raises:
        UserError: FLYTE_DDP_NODES is neither a number nor a range such as 2:4.
    """
    text = read_text(NODES_VARIABLE)
    least, _, most = text.partition(":")
    try:
        nodes = int(least), int(most or least)
    except ValueError:
        nodes = (0, 0)
    if not 1 <= nodes[0] <= nodes[1]:
        raise UserError(f"{NODES_VARIABLE}={text!r}: must be a number of nodes, such as 2, or a range, such as 2:4")
    return nodes


def elastic_ranks_per_node() -> int:
    """Return how many ranks torch Elastic starts on each node: one for each GPU, and a few without GPUs."""
    profile = chosen_profile()
    return profile.gpus or max(1, min(int(parse_quantity(profile.cpu)), MOST_CPU_RANKS))


def nodes_and_ranks(engine: str) -> tuple[int, int, int]:
    """Return the most nodes of a training, its ranks where num_ranks does not decide, and the most ranks without GPUs.

    Args:
        engine: elastic, ray or dask. Empty for training in one pod.

    Returns:
        Three numbers: the second is 0 where num_ranks decides, the third where there is no limit.

    Raises:
        UserError: another engine.
    """
    if not engine:
        return 1, 0, 0
    most, profile = node_range()[1], chosen_profile()
    capacities = {"elastic": 0, "ray": math.ceil(parse_quantity(profile.cpu)), "dask": max(1, profile.gpus)}
    if engine not in capacities:
        raise unknown_name("engine", engine, capacities)
    return most, most * elastic_ranks_per_node() if engine == "elastic" else 0, most * capacities[engine]


def parse_quantity(text: str) -> Decimal:
    """Return the number that a Kubernetes quantity stands for, such as 20Gi, 3500m or 1.5e9.

    Raises:
        UserError: the text is no quantity, or the number is not positive.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)(?:([eE][+-]?\d+)|([KMGTPE]i|[numkMGTPE])?)", text)
    if found is None or not Decimal(found[1]):
        raise UserError(
            f"quantity {text!r} (flyte_ddp/pods/profiles.py): must be one of Kubernetes', such as 8, 3500m, 20Gi or 20G"
        )
    number, exponent, suffix = found.groups()
    return Decimal(f"{number}{exponent or ''}") * UNITS[suffix or ""]


def parse_bytes(text: str) -> int:
    """Return the bytes that a quantity of memory or disk stands for."""
    return int(parse_quantity(text))
