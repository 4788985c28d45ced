"""The pod template of every task: what Kubernetes' PodSecurity level "restricted" asks of a pod."""

from functools import cached_property
from typing import TYPE_CHECKING

from flytekit import PodTemplate

if TYPE_CHECKING:
    from kubernetes.client import V1PodSpec


class RestrictedPod(PodTemplate):  # type: ignore[misc]
    """A pod template with security contexts, and with the policy that Flyte gives to tasks without a template.

    flytekit puts the task's image, command, resources and environment into its container. Flyte then merges the
    cluster's pod template that the task names, and makes the pods of PyTorchJobs, RayJobs and DaskJobs from the result.
    """

    def __init__(self) -> None:
        """Set no field: pod_spec is made below, and the others keep their defaults."""

    @cached_property
    def pod_spec(self) -> "V1PodSpec":
        """Make the specification when a task is serialized.

        Only then: importing Kubernetes' client takes a second, which local runs and pods save.
        """
        from kubernetes import client

        container = client.V1SecurityContext(
            allow_privilege_escalation=False, capabilities=client.V1Capabilities(drop=["ALL"])
        )
        pod = client.V1PodSecurityContext(
            run_as_non_root=True, seccomp_profile=client.V1SeccompProfile(type="RuntimeDefault")
        )
        primary = client.V1Container(
            name=self.primary_container_name,
            security_context=container,
            termination_message_policy="FallbackToLogsOnError",  # so that a lost pod's last lines are its error
        )
        return client.V1PodSpec(containers=[primary], security_context=pod)
