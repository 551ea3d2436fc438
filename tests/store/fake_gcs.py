"""A small Google Cloud Storage over its XML protocol, as far as an object store client speaks it.

    python -m tests.store.fake_gcs PORT BUCKET

Generations are counted in this one process and preconditions are checked between two awaits, hence atomically.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
import time
from email.utils import formatdate
from urllib.parse import unquote
from xml.sax.saxutils import escape

from aiohttp import web

PAGE = 1000


class Gcs:
    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self.objects: dict[str, dict] = {}
        self.uploads: dict[str, tuple[dict, dict[int, bytes]]] = {}
        self.generations = itertools.count(1)

    def check_bucket(self, request) -> None:
        if request.match_info["bucket"] != self.bucket:
            raise web.HTTPNotFound(text="<Error><Code>NoSuchBucket</Code></Error>")

    def store(self, key: str, data: bytes, request, headers: dict) -> web.Response:
        wanted = request.headers.get("x-goog-if-generation-match")
        current = self.objects.get(key, {"generation": 0})["generation"]
        if wanted is not None and int(wanted) != current:
            raise web.HTTPPreconditionFailed(text="<Error><Code>PreconditionFailed</Code></Error>")
        self.objects[key] = {
            "data": data,
            "generation": next(self.generations),
            "etag": hashlib.md5(data).hexdigest(),
            "time": time.time(),
            "headers": headers,
        }
        return web.Response(headers=self.describe(key))

    def describe(self, key: str) -> dict[str, str]:
        found = self.objects[key]
        return {
            "ETag": f'"{found["etag"]}"',
            "x-goog-generation": str(found["generation"]),
            "Last-Modified": formatdate(found["time"], usegmt=True),
            **found["headers"],
        }

    async def put(self, request) -> web.Response:
        self.check_bucket(request)
        body = await request.read()
        if "uploadId" in request.query:
            _, parts = self.uploads[request.query["uploadId"]]
            parts[int(request.query["partNumber"])] = body
            return web.Response(headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        key, source = unquote(request.match_info["key"]), unquote(request.headers.get("x-goog-copy-source", ""))
        if not source:
            return self.store(key, body, request, metadata(request))
        found = self.objects.get(source.removeprefix(f"{self.bucket}/"))
        if found is None:
            raise web.HTTPNotFound(text="<Error><Code>NoSuchKey</Code></Error>")
        return self.store(key, found["data"], request, found["headers"])

    async def post(self, request) -> web.Response:
        self.check_bucket(request)
        key = unquote(request.match_info["key"])
        if "uploads" in request.query:
            upload = f"upload-{next(self.generations)}"
            self.uploads[upload] = (metadata(request), {})
            names = f"<Bucket>{self.bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
            return web.Response(text=f"<InitiateMultipartUploadResult>{names}</InitiateMultipartUploadResult>")
        headers, parts = self.uploads.pop(request.query["uploadId"], (None, {}))
        if headers is None:
            raise web.HTTPNotFound(text="<Error><Code>NoSuchUpload</Code></Error>")
        made = self.store(key, b"".join(parts[number] for number in sorted(parts)), request, headers)
        names = f"<Bucket>{self.bucket}</Bucket><Key>{escape(key)}</Key><ETag>{made.headers['ETag']}</ETag>"
        text = f"<CompleteMultipartUploadResult><Location>x</Location>{names}</CompleteMultipartUploadResult>"
        return web.Response(headers=made.headers, text=text)

    async def get(self, request) -> web.Response:
        self.check_bucket(request)
        key = unquote(request.match_info["key"])
        if key not in self.objects:
            raise web.HTTPNotFound(text="<Error><Code>NoSuchKey</Code></Error>")
        data, headers = self.objects[key]["data"], self.describe(key)
        if request.method == "HEAD":
            return web.Response(headers={**headers, "Content-Length": str(len(data))})
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if wanted is None:
            return web.Response(body=data, headers=headers)
        begin, end = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        if begin >= len(data):
            raise web.HTTPRequestRangeNotSatisfiable
        headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
        return web.Response(status=206, body=data[begin : end + 1], headers=headers)

    async def delete(self, request) -> web.Response:
        self.check_bucket(request)
        if "uploadId" in request.query:
            self.uploads.pop(request.query["uploadId"], None)
            return web.Response(status=204)
        found = self.objects.pop(unquote(request.match_info["key"]), None)
        return web.Response(status=404 if found is None else 204)

    async def list(self, request) -> web.Response:
        self.check_bucket(request)
        query = request.query
        after = query.get("continuation-token") or query.get("start-after") or ""
        keys = sorted(key for key in self.objects if key.startswith(query.get("prefix", "")) and key > after)
        page = keys[: min(PAGE, int(query.get("max-keys", PAGE)))]
        items = "".join(f"<Contents><Key>{escape(key)}</Key>{self.facts(key)}</Contents>" for key in page)
        is_cut = len(page) < len(keys)
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if is_cut else ""
        text = f"<ListBucketResult>{items}<IsTruncated>{str(is_cut).lower()}</IsTruncated>{more}</ListBucketResult>"
        return web.Response(content_type="application/xml", text=text)

    def facts(self, key: str) -> str:
        found = self.objects[key]
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found["time"]))
        size = len(found["data"])
        return f'<LastModified>{stamp}</LastModified><ETag>"{found["etag"]}"</ETag><Size>{size}</Size>'


def metadata(request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name.lower().startswith("x-goog-meta-")}


def main() -> None:
    gcs = Gcs(sys.argv[2])
    app = web.Application(client_max_size=1 << 30)
    for method, handler in (("PUT", gcs.put), ("POST", gcs.post), ("DELETE", gcs.delete)):
        app.router.add_route(method, "/{bucket}/{key:.+}", handler)
    app.router.add_get("/{bucket}/{key:.+}", gcs.get)  # HEAD as well
    app.router.add_get("/{bucket}", gcs.list)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)


if __name__ == "__main__":
    main()
