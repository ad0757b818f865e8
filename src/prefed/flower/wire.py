"""Named vectors as Flower's arrays, and back. The only place that knows how a vector travels.

Flower sends an array as a .npy file with a declared dtype and shape beside it, and compares none of
these with each other. A .npy header may also ask for more memory than the machine has. So nothing
is read before the header is known to say what is expected and the data to be as long as that takes.
"""

import io
from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core.errors import PrefedError
from prefed.training.admission import Refused, Spec
from prefed.training.messages import Message as PackedMessage
from prefed.training.messages import receive
from prefed.training.server_state import Server, codec_of

LONGEST_HEADER = 4096


def pack(values: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({name: _pack_one(name, value) for name, value in values.items()})


def unpack(record: object, specs: Mapping[str, Spec]) -> dict[str, Tensor]:
    """The tensors in a record; Refused if it does not hold exactly what the specs name."""
    if not isinstance(record, ArrayRecord):
        raise Refused("it has no arrays")
    if unknown := sorted(record.keys() - specs.keys()):
        raise Refused(f"there is an array {unknown[0]!r} that was not asked for")
    if missing := sorted(specs.keys() - record.keys()):
        raise Refused(f"the array {missing[0]!r} is missing")
    return {name: _unpack_one(name, record[name], spec) for name, spec in specs.items()}


def pack_message(message: PackedMessage) -> ArrayRecord:
    """The message of one client, each part of each value an array of its own."""
    return pack({_key(n, p): rows[0] for n, parts in message.items() for p, rows in parts.items()})


def unpack_message(record: object, algorithm: Algorithm, server: Server) -> dict[str, Tensor]:
    """The values in the message of one client, decoded."""
    forms = {
        name: codec_of(algorithm, name).form(server.layout, like)
        for name, like in server.values(algorithm).items()
    }
    specs = {
        _key(name, part): Spec(tuple(shape), dtype)
        for name, form in forms.items()
        for part, (dtype, shape) in form.items()
    }
    found = unpack(record, specs)
    message = {
        name: {part: found[_key(name, part)][None].to(server.weights.device) for part in form}
        for name, form in forms.items()
    }
    values = receive(algorithm, server, message)
    return {name: rows[0].cpu() for name, rows in values.items()}


def _key(value: str, part: str) -> str:
    return f"{value}/{part}"


def _pack_one(name: str, value: Tensor) -> Array:
    if value.dtype == torch.bfloat16:
        raise PrefedError(f"{name}: Flower cannot send bfloat16; convert the model to float32")
    return Array(value.detach().cpu().contiguous().numpy())


def _unpack_one(name: str, array: Array, spec: Spec) -> Tensor:
    shape, dtype, start = _read_header(name, array.data)
    if shape != spec.shape or tuple(array.shape) != spec.shape:
        raise Refused(f"{name}: shape {shape}, not {spec.shape}")
    if dtype != numpy_dtype(spec.dtype) or array.dtype != str(numpy_dtype(spec.dtype)):
        raise Refused(f"{name}: {dtype}, not {spec.dtype}")
    if len(array.data) - start != spec.nbytes:
        raise Refused(f"{name}: {len(array.data) - start} bytes of data, not {spec.nbytes}")
    if array.stype != "numpy.ndarray":
        raise Refused(f"{name}: serialised as {array.stype!r}")
    flat = np.frombuffer(array.data, dtype, offset=start)
    return torch.from_numpy(flat.reshape(spec.shape).copy())


def _read_header(name: str, data: bytes) -> tuple[tuple[int, ...], np.dtype[np.generic], int]:
    """Shape, dtype and where the numbers begin."""
    file = io.BytesIO(data[:LONGEST_HEADER])
    try:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"version {version}")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file, LONGEST_HEADER)
        if fortran and len(shape) > 1:
            raise ValueError("in Fortran order")
    except Exception as error:  # whatever a hostile header makes numpy raise
        raise Refused(f"{name}: not a usable .npy array: {str(error)[:200]}") from None
    return tuple(shape), dtype, file.tell()


def numpy_dtype(dtype: torch.dtype) -> np.dtype[np.generic]:
    return torch.empty(0, dtype=dtype).numpy().dtype
