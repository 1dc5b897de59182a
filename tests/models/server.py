"""A small hub on loopback: the requests of huggingface-hub that find and fetch the files of a model."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    """Files of a repository. `token`: required to see it; `gated`: no user has accepted its terms."""

    files: dict[str, bytes]
    token: str | None = None
    gated: bool = False

    @property
    def commit(self) -> str:
        names = "".join(
            f"{name}{hashlib.sha1(data).hexdigest()}" for name, data in sorted(self.files.items())
        )
        return hashlib.sha1(names.encode()).hexdigest()


@dataclass
class Hub:
    """Served repositories, and method, path and range of each request."""

    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    stop_after: int | None = None
    """Bytes of a file after which the server waits until `resume` is set."""
    honest: bool = True
    """Whether the content matches its hash."""
    ranges: bool = True
    answers: list[bytes] = field(default_factory=list)
    """Descriptions of repositories for the next requests, one each; then the true ones."""
    etags: list[str] = field(default_factory=list)
    """ETags for the next requests, one each; then the SHA-256."""
    commit: str | None = None
    """Commit in the headers; None: the true one."""
    resume: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def downloads(self) -> list[tuple[str, str | None]]:
        """File and range of each request for content."""
        return [
            (path.rpartition("/")[2], span)
            for method, path, span in self.requests
            if "/resolve/" in path and method == "GET"
        ]


def describe(name: str, repo: Repo) -> dict[str, Any]:
    """Return a hub's description of a repository."""
    siblings = [
        {
            "rfilename": file,
            "size": len(data),
            "blobId": git_sha1(data),
            "lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134},
        }
        for file, data in repo.files.items()
    ]
    facts = {"id": name, "modelId": name, "sha": repo.commit, "private": False, "tags": []}
    return {**facts, "siblings": siblings}


def git_sha1(data: bytes) -> str:
    """Return git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the client's word on the headers
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path):
            self._tell(match[1])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._serve(match[1], match[3])
        else:
            self._refuse(404, "EntryNotFound")

    def _repo(self, name: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.token and self.headers.get("Authorization") != f"Bearer {repo.token}"):
            self._refuse(401, "RepoNotFound")
            return None
        return repo

    def _tell(self, name: str) -> None:
        repo = self._repo(name)
        if repo is None:
            return
        data = self.hub.answers.pop(0) if self.hub.answers else json.dumps(describe(name, repo)).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(data))})
        self.wfile.write(data)

    def _serve(self, name: str, file: str) -> None:
        repo = self._repo(name)
        if repo is None:
            return
        if repo.gated:
            self._refuse(403, "GatedRepo")
            return
        data = repo.files.get(file)
        if data is None:
            self._refuse(404, "EntryNotFound")
            return
        start = 0
        span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if span and self.hub.ranges:
            start = int(span[1])
        headers = {
            "X-Repo-Commit": self.hub.commit or repo.commit,
            "ETag": f'"{self.hub.etags.pop(0) if self.hub.etags else hashlib.sha256(data).hexdigest()}"',
            "Accept-Ranges": "bytes",
            "Content-Length": str(len(data) - start),
        }
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._head(206 if start else 200, headers)
        if self.command == "GET":
            self._send(data[start:] if self.hub.honest else bytes(len(data) - start))

    def _send(self, data: bytes) -> None:
        stop = self.hub.stop_after
        try:
            self.wfile.write(data[:stop])
            if stop is not None and stop < len(data):
                self.wfile.flush()
                self.hub.resume.wait(60)
                self.close_connection = True
        except OSError:  # the client has gone
            self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        self._head(status, {"X-Error-Code": code, "X-Error-Message": code, "Content-Length": "0"})

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` at `hub.url` while the context lasts."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield hub
        finally:
            hub.resume.set()
            server.shutdown()
            thread.join()
