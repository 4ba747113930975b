"""As much of a W&B server on loopback as a run needs, which can fall ill at any moment; and addresses without one."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FALLS = ("gone", "hangs", "fails", "refuses")
STATUS = {"fails": 500, "refuses": 403}


class WandbServer(ThreadingHTTPServer):
    """Answers W&B's start-up, records and uploads until `fall(how)`; `asked` lists (operation or path, content)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.asked, self.ill, self.over, self.connections = [], None, threading.Event(), []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.fall("gone")
        self.over.set()

    def fall(self, how: str) -> None:
        """From now on it is gone, or hangs (accepts and never answers), fails (500) or refuses (403)."""
        already, self.ill = self.ill, how
        if how == "gone" and already != "gone":
            self.shutdown()
            self.server_close()
            for connection in self.connections:
                with suppress(OSError):  # closed before
                    connection.shutdown(socket.SHUT_RDWR)

    def variables(self, operation: str) -> list[dict]:
        """What each call of a GraphQL operation came with."""
        return [content for name, content in self.asked if name == operation]

    def get_request(self):
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    def handle_error(self, *_) -> None:
        """A client that left is no error of the test's."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        name, content = self.path, body
        if name.endswith("/graphql"):
            call = json.loads(body)
            name, content = re.search(r"(?:query|mutation) (\w+)", call["query"])[1], call.get("variables") or {}
        self.server.asked.append((name, content))
        if self.server.ill == "hangs":
            self.server.over.wait()
            self.close_connection = True
            return
        reply = {"data": graphql(name, content, self.server.url)} if isinstance(content, dict) else {}
        reply = json.dumps(reply).encode()
        self.send_response(STATUS.get(self.server.ill, 200))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    do_GET = do_POST = do_PUT = answer

    def log_message(self, *_) -> None:
        pass


def graphql(operation: str, variables: dict, url: str) -> dict:
    """The data of an answer, as far as W&B's client reads it."""
    if operation == "UpsertBucket":
        project = {"id": "p", "name": variables.get("project"), "entity": {"id": "e", "name": "someone"}}
        names = {"id": "b", "name": variables.get("name"), "displayName": variables.get("displayName")}
        return {"upsertBucket": {"bucket": names | {"project": project, "historyLineCount": 0}, "inserted": True}}
    if operation == "CreateRunFiles":
        files = [{"name": name, "uploadUrl": f"{url}/upload/{name}"} for name in variables["files"]]
        return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
    if operation == "CreateArtifact":
        artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": {"latestArtifact": {"id": "a"}}}
        return {"createArtifact": {"artifact": artifact}}
    return {
        "ServerFeaturesQuery": {"serverInfo": {"features": []}},
        "Viewer": {
            "viewer": {"id": "v", "entity": "someone", "username": "someone", "flags": "{}", "teams": {"edges": []}}
        },
        "RunResumeStatus": {"model": None},
        "ArtifactType": {"project": {"artifact": None}},
    }.get(operation, {})


@contextmanager
def nobody(how: str) -> Iterator[str]:
    """An address where connections are refused, swallowed (as by a firewall), or accepted and left without answer."""
    with socket.create_server(("127.0.0.1", 0), backlog=0 if how == "swallows" else 16) as listener:
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(3 if how == "swallows" else 0)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)  # a full queue: the next one's first packet is dropped
        if how == "refuses":
            listener.close()
        try:
            yield "http://{}:{}".format(*address)
        finally:
            for filler in fillers:
                filler.close()
