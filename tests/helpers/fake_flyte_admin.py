"""A fake Flyte cluster on loopback, which accepts registrations and executions."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from flyteidl.admin import common_pb2, execution_pb2, launch_plan_pb2, task_pb2, workflow_pb2
from flyteidl.core import identifier_pb2
from flyteidl.service import admin_pb2_grpc, dataproxy_pb2, dataproxy_pb2_grpc
from loopback import QuietHandler, serving


def storing(name: str, response: Callable[[], Any]) -> Callable[[Any, Any, Any], Any]:
    """Return a call that appends the request to the list of this name."""

    def store(self: Any, request: Any, _: Any) -> Any:
        getattr(self, name).append(request)
        return response()

    return store


class FakeFlyteAdmin(admin_pb2_grpc.AdminServiceServicer, dataproxy_pb2_grpc.DataProxyServiceServicer):  # type: ignore[misc]
    """Stores registered, activated and uploaded items."""

    def __init__(self, upload_address: str) -> None:
        self.upload_address = upload_address
        self.endpoint = ""
        self.tasks: list[task_pb2.TaskCreateRequest] = []
        self.workflows: list[workflow_pb2.WorkflowCreateRequest] = []
        self.launch_plans: list[launch_plan_pb2.LaunchPlanCreateRequest] = []
        self.activated: list[launch_plan_pb2.LaunchPlanUpdateRequest] = []
        self.executions: list[execution_pb2.ExecutionCreateRequest] = []
        self.uploads: list[bytes] = []

    CreateTask = storing("tasks", task_pb2.TaskCreateResponse)
    CreateWorkflow = storing("workflows", workflow_pb2.WorkflowCreateResponse)
    CreateLaunchPlan = storing("launch_plans", launch_plan_pb2.LaunchPlanCreateResponse)
    UpdateLaunchPlan = storing("activated", launch_plan_pb2.LaunchPlanUpdateResponse)

    def GetTask(self, request: Any, context: Any) -> Any:
        task = self.found(self.tasks, request, context)
        return task_pb2.Task(id=task.id, closure={"compiled_task": {"template": task.spec.template}})

    def GetWorkflow(self, request: Any, context: Any) -> Any:
        workflow = self.found(self.workflows, request, context)
        compiled = {
            "primary": {"template": workflow.spec.template},
            "tasks": [{"template": task.spec.template} for task in self.tasks],
        }
        return workflow_pb2.Workflow(id=workflow.id, closure={"compiled_workflow": compiled})

    def GetLaunchPlan(self, request: Any, context: Any) -> Any:
        plan = self.found(self.launch_plans, request, context)
        inputs = plan.spec.default_inputs
        return launch_plan_pb2.LaunchPlan(id=plan.id, spec=plan.spec, closure={"expected_inputs": inputs})

    def GetActiveLaunchPlan(self, request: Any, context: Any) -> Any:
        active = [each.id for each in self.activated if each.state == launch_plan_pb2.ACTIVE]
        named = [each for each in active if each.name == request.id.name]
        if not named:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no active launch plan {request.id.name}")
        return self.GetLaunchPlan(common_pb2.ObjectGetRequest(id=named[-1]), context)

    def ListLaunchPlans(self, request: Any, context: Any) -> Any:
        newest = [plan for plan in reversed(self.launch_plans) if plan.id.name == request.id.name]
        return launch_plan_pb2.LaunchPlanList(launch_plans=[{"id": plan.id, "spec": plan.spec} for plan in newest])

    def found(self, created: list[Any], request: Any, context: Any) -> Any:
        """Return the first item of ``created`` with the request's id, or answer NOT_FOUND."""
        same = [each for each in created if each.id == request.id]
        if not same:
            context.abort(grpc.StatusCode.NOT_FOUND, f"{request.id} is not there")
        return same[0]

    def CreateExecution(self, request: Any, context: Any) -> Any:
        self.executions.append(request)
        project, domain = request.project, request.domain
        created = identifier_pb2.WorkflowExecutionIdentifier(project=project, domain=domain, name="f1a2b3c4")
        return execution_pb2.ExecutionCreateResponse(id=created)

    def GetExecution(self, request: Any, context: Any) -> Any:
        return execution_pb2.Execution(id=request.id, spec={"launch_plan": self.executions[-1].spec.launch_plan})

    def CreateUploadLocation(self, request: Any, context: Any) -> Any:
        native = f"s3://bucket/{request.project}/{request.domain}/{request.filename}"
        return dataproxy_pb2.CreateUploadLocationResponse(signed_url=self.upload_address, native_url=native)


@contextmanager
def fake_flyte_admin() -> Iterator[FakeFlyteAdmin]:
    """Run a cluster until the end of the block, on ports that the system chooses."""

    class Upload(QuietHandler):
        def do_PUT(self) -> None:
            admin.uploads.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(200, {"Content-Length": "0"}, b"")

    with serving(Upload) as address:
        admin = FakeFlyteAdmin(f"{address}/upload")
        server = grpc.server(ThreadPoolExecutor())
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        dataproxy_pb2_grpc.add_DataProxyServiceServicer_to_server(admin, server)
        admin.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield admin
        finally:
            server.stop(None).wait()
