"""The pod specification that satisfies Kubernetes' PodSecurity level "restricted"."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kubernetes.client import V1PodSpec


def make_restricted_pod_spec(primary_container_name: str) -> "V1PodSpec":
    """Return the specification of every pod. The platform adds image, command, resources and environment.

    Imports Kubernetes' client, which takes a second.
    """
    from kubernetes import client

    capabilities, seccomp = client.V1Capabilities(drop=["ALL"]), client.V1SeccompProfile(type="RuntimeDefault")
    container = client.V1SecurityContext(allow_privilege_escalation=False, capabilities=capabilities)
    pod = client.V1PodSecurityContext(run_as_non_root=True, seccomp_profile=seccomp)
    primary = client.V1Container(
        name=primary_container_name,
        security_context=container,
        termination_message_policy="FallbackToLogsOnError",  # the last log lines of a lost pod become its error
    )
    # No code calls Kubernetes' API, so pods get no token for it.
    return client.V1PodSpec(containers=[primary], security_context=pod, automount_service_account_token=False)
