"""Media of a request, from URL to bytes, and on an encoder from bytes to a decoded picture.

Runs in threads, off the event loop. On a PD only the bytes are taken, for their hash: no image is opened.
"""

import base64
import binascii
import io
import os
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from eccon.sim.errors import ApiError, bad_request
from eccon.sim.vision import Picture

__all__ = ["decode", "fetch"]

MAX_BYTES = 64 << 20
"""Of one remote item. vLLM has no limit; a stand-in on a shared machine does."""
MAX_PIXELS = 178956970
"""Pillow refuses twice that as a decompression bomb."""


def fetch(url: str, param: str) -> bytes:
    """The bytes behind a data: or http(s): URL.

    Raises:
        ApiError: as vLLM 0.30 answers: 400, 422 for a remote status, 500 where nobody answers, 501.
    """
    scheme = url.partition(":")[0].lower()
    if scheme == "data":
        return _inline(url)
    if scheme in {"http", "https"}:
        return _remote(url, param)
    if scheme == "file":
        msg = "Cannot load local files without `--allowed-local-media-path`."
        raise ApiError(msg, status=500, type_="InternalServerError")
    msg = "The URL must be either a HTTP, data or file URL."
    raise bad_request(msg)


def _inline(url: str) -> bytes:
    head, comma, data = url[5:].partition(",")
    if not comma or not head.endswith(";base64"):
        msg = "Only base64 data URLs are supported for now."
        raise ApiError(msg, status=501, type_="NotImplementedError")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as e:
        msg = str(e) if "padding" in str(e) else "Non-base64 digit found"
        raise bad_request(msg) from e


def _remote(url: str, param: str) -> bytes:
    from urllib.request import Request, urlopen  # noqa: PLC0415  5 MB, seldom needed

    timeout = float(os.environ.get("VLLM_IMAGE_FETCH_TIMEOUT", "5"))
    where = urlsplit(url)
    place = f"{where.hostname}:{where.port or (443 if where.scheme == 'https' else 80)}"
    try:
        with urlopen(Request(url), timeout=timeout) as answer:  # noqa: S310  the scheme was checked above
            body: bytes = answer.read(MAX_BYTES + 1)
    except HTTPError as e:
        msg = f"Failed to fetch media from URL: HTTP {e.code} error (parameter={param}, value={url})"
        e.close()
        raise ApiError(msg, status=422, type_="UnprocessableEntityError", param=param) from e
    except (URLError, OSError, ValueError) as e:
        reason = getattr(e, "reason", e)
        msg = f"Cannot connect to host {place} ssl:default [{reason}]"
        raise ApiError(msg, status=500, type_="InternalServerError") from e
    if len(body) > MAX_BYTES:
        msg = f"{url}: larger than {MAX_BYTES} bytes"
        raise bad_request(msg)
    return body


def decode(data: bytes, modality: str) -> Picture:
    """Open, decode and look at an image, or at the first frame of a moving one.

    Raises:
        ApiError: no image, or one too large to be opened.
    """
    from PIL import Image, ImageStat, UnidentifiedImageError  # noqa: PLC0415  a PD must not even load it

    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > MAX_PIXELS:
                msg = f"Failed to load {modality}: image of {image.width}x{image.height} pixels is too large"
                raise bad_request(msg)
            mean = ImageStat.Stat(image.convert("RGB")).mean
            red, green, blue = (round(c) for c in mean)
            return Picture(image.format or "?", image.width, image.height, (red, green, blue))
    except UnidentifiedImageError as e:
        msg = f"Failed to load {modality}: cannot identify image file <_io.BytesIO object>"
        raise bad_request(msg) from e
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as e:
        msg = f"Failed to load {modality}: {e}"
        raise bad_request(msg) from e
