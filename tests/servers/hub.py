"""A stand-in for the Hugging Face Hub: repositories of models behind its HTTP interface, each write one commit.

What it has not: Xet, pages of listings, branches. Its clients MUST have `HF_HUB_DISABLE_XET`, or upload nothing large.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_stand_in"
SMALL_BYTES = 64 << 10
"""Larger files are uploaded before the commit that names them (git LFS)."""
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|paths-info|preupload|commit)/main/?(.*))?")
_BATCH = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/main/(.+)")


class Hub:
    """Its repositories and what it is to answer.

    Attributes:
        files: of each repository that exists, the bytes of each file.
        ignored: patterns of paths that a repository's .gitignore names: a commit leaves them out and succeeds.
        refusals: statuses of the next commits, before any is accepted.
        requests: method and path of all that came.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.ignored: list[str] = []
        self.refusals = deque[int]()
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        self.uploaded: dict[str, bytes] = {}
        self.url = ""

    def create(self, repository: str) -> str:
        """An empty repository; the URL of a root in it."""
        self.files[repository] = {}
        return f"hf://{repository}"

    def tree(self, repository: str, folder: str, *, recursive: bool) -> list[dict[str, Any]] | None:
        """What a folder has; None: there is no such folder."""
        start = f"{folder}/" if folder else ""
        rows: dict[str, dict[str, Any]] = {}
        for path, data in self.files[repository].items():
            if not path.startswith(start):
                continue
            parts = path[len(start) :].split("/")
            for depth in range(1, len(parts)):
                if depth == 1 or recursive:
                    inner = start + "/".join(parts[:depth])
                    rows[inner] = {"type": "directory", "path": inner, "oid": "0" * 40, "size": 0}
            if len(parts) == 1 or recursive:
                rows[path] = _row(path, data)
        return list(rows.values()) if rows or not folder else None

    def commit(self, repository: str, lines: list[dict[str, Any]]) -> None:
        """All of it at once."""
        changed = dict(self.files[repository])
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "file":
                    changed[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    changed[value["path"]] = self.uploaded[value["oid"]]
                case "deletedFile":
                    changed.pop(value["path"])
        self.files[repository] = changed


def _row(path: str, data: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {"type": "file", "path": path, "oid": hashlib.sha1(data).hexdigest(), "size": len(data)}
    if len(data) > SMALL_BYTES:
        row["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return row


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    """A header and its body are two packets."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, status: int, body: Any = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _missing(self, code: str) -> None:
        self._answer(404, {"error": code}, X_Error_Code=code)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while count := int(self.rfile.readline(), 16):
            data += self.rfile.read(count)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _begin(self) -> tuple[str, dict[str, list[str]], bytes] | None:
        """The path, its query and the body; None: it is answered already."""
        split, body = urlsplit(self.path), self._body()
        self.hub.requests.append((self.command, unquote(split.path)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
            return None
        return unquote(split.path), parse_qs(split.query), body

    def do_GET(self) -> None:
        if (begun := self._begin()) is None:
            return
        path, query, _ = begun
        if found := _RESOLVE.fullmatch(path):
            self._file(*found.groups())
        elif (found := _API.fullmatch(path)) and found[1] in self.hub.files:
            if found[2] != "tree":
                self._answer(200, {"id": found[1], "_id": "0", "sha": "0" * 40, "siblings": []})
                return
            recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
            rows = self.hub.tree(found[1], found[3], recursive=recursive)
            if rows is None:
                self._missing("EntryNotFound")
            else:
                self._answer(200, rows)
        else:
            self._missing("RepoNotFound")

    do_HEAD = do_GET

    def _file(self, repository: str, path: str) -> None:
        data = self.hub.files.get(repository, {}).get(path)
        if data is None:
            self._missing("EntryNotFound")
        elif wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), int(wanted[2])
            self._answer(206, data[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(data)}")
        else:
            self._answer(200, data)

    def do_PUT(self) -> None:
        data = self._body()
        self.hub.requests.append((self.command, self.path))
        self.hub.uploaded[hashlib.sha256(data).hexdigest()] = data
        self._answer(200)

    def do_POST(self) -> None:
        if (begun := self._begin()) is None:
            return
        path, _, body = begun
        if _BATCH.fullmatch(path):
            wanted = [{"oid": one["oid"], "size": one["size"]} for one in json.loads(body)["objects"]]
            actions = {"upload": {"href": f"{self.hub.url}/lfs"}}
            self._answer(200, {"transfer": "basic", "objects": [{**one, "actions": actions} for one in wanted]})
            return
        found = _API.fullmatch(path)
        if found is None or found[1] not in self.hub.files:
            self._missing("RepoNotFound")
        elif found[2] == "preupload":
            self._answer(200, {"files": [self._mode(one) for one in json.loads(body)["files"]]})
        elif found[2] == "paths-info":
            files = self.hub.files[found[1]]
            paths = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
            self._answer(200, [_row(one, files[one]) for one in paths if one in files])
        else:
            self._commit(found[1], [json.loads(line) for line in body.splitlines()])

    def _mode(self, file: dict[str, Any]) -> dict[str, Any]:
        is_ignored = any(fnmatch.fnmatch(file["path"], pattern) for pattern in self.hub.ignored)
        mode = "lfs" if file["size"] > SMALL_BYTES else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": is_ignored}

    def _commit(self, repository: str, lines: list[dict[str, Any]]) -> None:
        with self.hub.lock:
            if self.hub.refusals:
                self._answer(self.hub.refusals.popleft(), {"error": "not now"})
                return
            try:
                self.hub.commit(repository, lines)
            except KeyError:
                self._missing("EntryNotFound")
                return
        url = f"{self.hub.url}/{repository}/commit/{'0' * 40}"
        self._answer(200, {"commitUrl": url, "commitOid": "0" * 40, "success": True})


@contextmanager
def running() -> Iterator[Hub]:
    """One, on a free port of this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, name="hub", daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10.0)
