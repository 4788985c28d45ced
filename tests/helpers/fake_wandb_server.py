"""A fake wandb server on loopback, which works or fails in several ways."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from loopback import QuietHandler, serving


@dataclass
class FakeServer:
    """Address and behaviour of the server, and the received run names, history rows and uploaded files."""

    behaviour: str
    url: str = ""
    run_ids: set[str] = field(default_factory=set)
    history: list[dict[str, Any]] = field(default_factory=list)
    uploads: dict[str, bytes] = field(default_factory=dict)
    requests: int = 0

    def asked_for(self, name: str) -> dict[str, Any]:
        """Return the answer with the upload address of an artifact's file."""
        at = {"name": name, "displayName": name, "uploadUrl": f"{self.url}/upload/{name}", "uploadHeaders": []}
        return {"id": name, **at, "storagePath": name, "uploadMultipartUrls": None, "artifact": {"id": "a"}}

    def graphql(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the shortest answer to a GraphQL query that wandb 0.31 accepts."""
        variables = body.get("variables") or {}
        project = {"id": "p", "name": variables.get("project"), "entity": {"id": "e", "name": "someone"}}
        if "query ArtifactType" in body["query"]:
            return {"project": {"artifact": None}}
        match body.get("operationName"):
            case "Viewer":
                viewer = {"id": "u", "entity": "someone", "username": "someone", "email": "", "flags": "{}"}
                return {"viewer": {**viewer, "teams": {"edges": []}}}
            case "RunResumeStatus":
                return {"model": None}
            case "UpsertBucket":
                self.run_ids.add(variables["name"])
                bucket = {"id": "b", "name": variables["name"], "displayName": "", "project": project}
                return {"upsertBucket": {"bucket": bucket, "inserted": True}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
                return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return self.about_artifact(str(body.get("operationName")), variables)

    def about_artifact(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a step of an artifact's upload."""
        match operation:
            case "CreateArtifact":
                artifact = {"id": "a", "state": "PENDING", "artifactSequence": {"id": "s", "latestArtifact": None}}
                return {"createArtifact": {"artifact": artifact}}
            case "CreateArtifactManifest" | "UpdateArtifactManifest" as name:
                manifest = {"id": "m", "file": self.asked_for("manifest")}
                return {name[0].lower() + name[1:]: {"artifactManifest": manifest}}
            case "CreateArtifactFiles":
                asked = [self.asked_for(each["name"]) for each in variables["input"]["artifactFiles"]]
                return {"createArtifactFiles": {"files": {"edges": [{"node": each} for each in asked]}}}
            case "CommitArtifact":
                return {"commitArtifact": {"artifact": {"id": "a", "digest": "d"}}}
        return {}

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/graphql":
            return {"data": self.graphql(json.loads(body))}
        if path.endswith("/file_stream"):
            stream = json.loads(body).get("files", {}).get("wandb-history.jsonl", {})
            self.history += [json.loads(line) for line in stream.get("content", [])]
        elif path.startswith("/upload/"):
            self.uploads[path.removeprefix("/upload/")] = body
        return {}


def accept_only(listener: socket.socket, server: FakeServer) -> None:
    """Accept connections without answering, until the listener is shut down."""
    with ExitStack() as connections, suppress(OSError):
        while True:
            connections.enter_context(listener.accept()[0])
            server.requests += 1


@contextmanager
def fake_server(behaviour: str = "works") -> Iterator[FakeServer]:
    """Run a server until the end of the block.

    Args:
        behaviour: works, hangs (accepts connections and never answers), denies (401, the key is wrong), or babbles
            (answers text that is not JSON). The behaviour may change later, except to or from hangs.
    """
    server = FakeServer(behaviour)
    if behaviour == "hangs":
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            silent = threading.Thread(target=accept_only, args=(listener, server), daemon=True)
            silent.start()
            yield server
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread up
            silent.join()
        return

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            server.requests += 1
            status, content = 200, b"<html>hello</html>"
            if server.behaviour == "works":
                content = json.dumps(server.answer(self.path, body)).encode()
            elif server.behaviour == "denies":
                status = 401
            self.answer(status, {"Content-Length": str(len(content))}, content)

        do_GET = do_PUT = do_POST

    with serving(Handler) as server.url:
        yield server
