"""A model hub on 127.0.0.1: as much of its protocol as huggingface_hub needs to make, fill and read repositories.

`serve` serves it from a thread; `point` leads the hub's client there. Files go through the commit itself, never through
LFS or Xet: `preupload` answers "regular" for all.
"""

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

OWNER, TOKEN = "owner", "hf_writes"
LICENCES = ("apache-2.0", "mit", "llama3.1", "other")  # identifiers that the hub's check of a card accepts


class Hub(http.server.ThreadingHTTPServer):
    """Repositories by id: a list of commits, each the files by name; `asked`: (method, path) of every request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, list[dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.asked: list[tuple[str, str]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def names(self, repository: str) -> list[str]:
        """Returns the revisions of a repository, the first commit first."""
        return [
            hashlib.sha1(f"{repository} {n}".encode()).hexdigest() for n in range(len(self.repositories[repository]))
        ]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, body: object, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self) -> None:
        self.server.asked.append((self.command, self.path))
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            if commit := self.find(found[1], found[2] or "main"):
                self.answer({"id": found[1], "sha": commit[0], "siblings": []})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            if commit := self.find(*found.groups()):
                self.answer([_describe(name, data) for name, data in commit[1].items()])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if commit := self.find(found[1], found[2]):
                data = commit[1].get(found[3])
                stamp = {"X-Repo-Commit": commit[0]}
                if data is None:
                    self.answer({}, 404, stamp | {"X-Error-Code": "EntryNotFound"})
                else:
                    self.answer(data, headers=stamp | {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'})
        else:
            self.answer({}, 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.server.asked.append((self.command, self.path))
        data = self.rfile.read(int(self.headers["Content-Length"]))
        path = unquote(urlsplit(self.path).path)
        if path == "/api/repos/create":
            self.create(json.loads(data))
        elif path == "/api/validate-yaml":
            stated = re.search(r"^license: (\S+)", json.loads(data)["content"], re.M)
            known = not stated or stated[1] in LICENCES
            errors = [] if known else [{"message": '"license" must be one of the hub\'s identifiers'}]
            self.answer({"errors": errors, "warnings": []}, 200 if known else 400)
        elif not self.may_write(path.split("/")[3]):
            self.answer({"error": "no rights"}, 403)
        elif "/preupload/" in path:
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(data)["files"]
            ]
            self.answer({"files": files})
        else:
            self.commit("/".join(path.split("/")[3:5]), [json.loads(line) for line in data.splitlines()])

    def create(self, asked: dict[str, str]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if "Authorization" not in self.headers:
            self.answer({"error": "Invalid username or password."}, 401)
        elif not self.may_write(asked["organization"]):
            self.answer({"error": f"You don't have the rights to create a model under {asked['organization']}"}, 403)
        elif name in self.server.repositories:
            self.answer({"error": "You already created this model repo", "url": f"{self.server.address}/{name}"}, 409)
        else:
            self.server.repositories[name] = [{}]
            if asked["visibility"] == "private":
                self.server.private.add(name)
            self.answer({"url": f"{self.server.address}/{name}"})

    def commit(self, name: str, operations: list[dict]) -> None:
        files = dict(self.server.repositories[name][-1])
        for one in (line["value"] for line in operations if line["key"] == "file"):
            files[one["path"]] = base64.b64decode(one["content"])
        self.server.repositories[name].append(files)
        oid = self.server.names(name)[-1]
        self.answer({"commitUrl": f"{self.server.address}/{name}/commit/{oid}", "commitOid": oid})

    def find(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Returns a commit's id and files; None after an answer that it is not there, or not for this reader."""
        commits = self.server.repositories.get(name)
        if commits is None or (name in self.server.private and not self.may_write(name.split("/")[0])):
            self.answer({"error": "Repository not found"}, 401, {"X-Error-Code": "RepoNotFound"})
            return None
        names = self.server.names(name)
        revision = names[-1] if revision == "main" else revision
        if revision not in names:
            self.answer({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return None
        return revision, commits[names.index(revision)]

    def may_write(self, owner: str) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}" and owner == OWNER


def _describe(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@contextlib.contextmanager
def serve(server: Any) -> Iterator[Any]:
    """Lets a server, as `Hub()`, answer from a thread."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def point(patch: pytest.MonkeyPatch, address: str, cache: Path, *, token: str = TOKEN) -> None:
    """Leads this process's client there, which has read its variables already."""
    from huggingface_hub import constants

    patch.setattr(constants, "ENDPOINT", address)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    patch.setenv("HF_TOKEN", token)
