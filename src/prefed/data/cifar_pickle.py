"""The pickled Python layout of CIFAR, read without pickle.

The official files are pickles of protocol 2 made by Python 2: a dictionary of byte strings, lists
of numbers and one array of bytes. Loading a pickle means to run whatever program it holds, so it
is not loaded: this walks over its opcodes, does what those that the format needs stand for, and
stops at any other. Nothing is imported and nothing is called; an array is three checked values.
"""

import io
import math
import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prefed.core.errors import PrefedError
from prefed.data import reading

MARK = object()
RECONSTRUCT = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}
GLOBALS = {*RECONSTRUCT, ("numpy", "ndarray"), ("numpy", "dtype")}
VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE",
    "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
}  # fmt: skip
CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
MOST_MEMOS = 1 << 20


@dataclass
class Pending:
    """An array, or the type of one, between its creation and its state."""

    kind: str
    value: Any = None


class _Refused(Exception):
    pass


class _Bounded(io.BufferedReader):
    """A file that is never asked for more than it has: a length in a pickle may be a lie, and
    read() allocates all of it first."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self.most = path.stat().st_size

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(self.most if size is None or size < 0 else min(size, self.most))


def read_pickle(path: Path) -> Any:
    """The dictionary in the file, with byte strings as keys."""
    position = 0
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        with _Bounded(path) as file:
            for opcode, argument, at in pickletools.genops(file):
                position = at or 0
                if opcode.name == "STOP":
                    break
                _do(opcode.name, argument, stack, memo)
            position = file.tell()
            if file.read(1):
                raise _Refused("the data should end here, but the file goes on")
        if len(stack) != 1:
            raise _Refused("the pickle ends with something left over")
        return _finished(stack[0])
    except (_Refused, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        if isinstance(error, PrefedError):
            raise
        text = "" if isinstance(error, _Refused) else "not a pickle of this format: "
        raise reading.wrong(path, position, f"{text}{error}") from None
    except OSError as error:
        raise PrefedError(f"{path}: cannot be read: {error}") from None


def _do(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    match name:
        case "PROTO" | "FRAME":
            pass
        case "MARK":
            stack.append(MARK)
        case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
            stack.append({"DICT": dict, "LIST": list, "TUPLE": tuple}[name[6:]]())
        case "SHORT_BINSTRING" | "BINSTRING":  # a str of Python 2: bytes
            stack.append(argument.encode("latin-1"))
        case _ if name in VALUES:
            stack.append(argument)
        case _ if name in CONSTANTS:
            stack.append(CONSTANTS[name])
        case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
            if len(memo) >= MOST_MEMOS:
                raise _Refused("it remembers more things than a file of this format has")
            memo[len(memo) if argument is None else argument] = stack[-1]
        case "BINGET" | "LONG_BINGET":
            stack.append(memo[argument])
        case "APPEND" | "APPENDS":
            items = [stack.pop()] if name == "APPEND" else _to_mark(stack)
            _typed(stack[-1], list).extend(items)
        case "SETITEM" | "SETITEMS":
            items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else _to_mark(stack)
            pairs = zip(items[::2], items[1::2], strict=True)
            _typed(stack[-1], dict).update((_key(key), value) for key, value in pairs)
        case "TUPLE":
            stack.append(tuple(_to_mark(stack)))
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            count = int(name[-1])
            if len(stack) < count:
                raise IndexError("a tuple of things that are not there")
            stack[-count:] = [tuple(stack[-count:])]
        case "GLOBAL" | "STACK_GLOBAL":
            pair = tuple(argument.split(" ")) if name == "GLOBAL" else (stack.pop(-2), stack.pop())
            if pair not in GLOBALS:
                raise _Refused(
                    f"it asks for {'.'.join(map(str, pair))}, which a file of this format never "
                    f"does; nothing was run"
                )
            stack.append(pair)  # it stays a name
        case "REDUCE":
            stack[-2:] = [_reduce(stack[-2], stack[-1])]
        case "BUILD":
            state = stack.pop()
            _build(_typed(stack[-1], Pending), state)
        case _:
            raise _Refused(f"the opcode {name}, which a file of this format never has")


def _to_mark(stack: list[Any]) -> list[Any]:
    items: list[Any] = []
    while (item := stack.pop()) is not MARK:
        items.append(item)
    return items[::-1]


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise _Refused(f"a {kind.__name__.lower()} should stand here")
    return value


def _key(key: Any) -> bytes:
    if isinstance(key, str):
        return key.encode()
    if not isinstance(key, bytes):
        raise _Refused("a key that is not a string")
    return key


def _reduce(name: Any, arguments: Any) -> Pending:
    """What `_reconstruct(ndarray, (0,), b"b")` and `dtype("u1", 0, 1)` stand for."""
    if name not in GLOBALS or not isinstance(arguments, tuple):
        raise _Refused("a call of something that is not an array")
    if name in RECONSTRUCT:
        return Pending("array")
    if name == ("numpy", "dtype") and arguments and arguments[0] in (b"u1", "u1"):
        return Pending("dtype")
    raise _Refused("an array of something else than bytes")


def _build(target: Pending, state: Any) -> None:
    """The state of an array is (version, shape, dtype, is Fortran order, bytes)."""
    if target.kind == "dtype":
        return
    if target.value is not None or not isinstance(state, tuple) or len(state) != 5:
        raise _Refused("an array with a state it cannot have")
    _, shape, dtype, fortran, content = state
    whole = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
    if not whole or not isinstance(dtype, Pending) or dtype.kind != "dtype":
        raise _Refused("an array with a shape or type it cannot have")
    if not isinstance(content, bytes) or math.prod(shape) != len(content):
        raise _Refused(f"an array of shape {shape} needs {math.prod(shape)} bytes, but has others")
    target.value = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


def _finished(value: Any) -> Any:
    """The dictionary with arrays in place of what they were made of."""
    table = _typed(value, dict)
    return {k: v.value if isinstance(v, Pending) else v for k, v in table.items()}
