"""Where a JSON slice lies in the body that it was cut from.

msgspec hands out slices (`msgspec.Raw`) that point into the body, but not their offsets. Searching for
a slice is not the same: a body may hold the same bytes twice, under a doubled key of which only the last
counts. So the address of the slice is asked for, by CPython's buffer protocol.
"""

import ctypes

import msgspec

__all__ = ["span"]


class _Buffer(ctypes.Structure):
    """`Py_buffer` of CPython's stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_Buffer),)


def _place(thing: object) -> tuple[int, int]:
    view = _Buffer()
    _get(thing, view, 0)
    address, length = view.buf or 0, view.len
    _release(view)
    return address, length


def span(body: bytes | bytearray, raw: msgspec.Raw) -> tuple[int, int]:
    """`(start, end)` of a slice in the body that it points into."""
    base, size = _place(body)
    address, length = _place(raw)
    start = address - base
    if not 0 <= start <= start + length <= size:
        raise ValueError("the slice does not point into this body")
    return start, start + length
