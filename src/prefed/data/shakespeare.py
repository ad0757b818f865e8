"""Plays as plain text, divided by speaker, for next-character prediction."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from prefed.core.errors import PrefedError
from prefed.data import cache, reading
from prefed.data.dataset import DATASETS, Dataset

Array = np.ndarray[Any, Any]


@DATASETS.register("shakespeare")
def shakespeare(
    path: str | None = None, length: int = 80, test: float = 0.2, skip: int = 0
) -> Dataset:
    """Each speaker with at least two speeches is a client; x is `length` characters, y the
    character after each of them.

    The file has speeches with empty lines between them, the speaker's name and a colon on the
    first line. A speaker's last speeches, a share `test` of them and at least one, are for
    testing. Texts are cut into windows side by side, the last one reaching back so that it is
    full; a text shorter than a window is preceded by line breaks.

    path    the text file, or a folder with input.txt or shakespeare.txt
    length  of a window, in characters
    test    the share of a speaker's speeches that is for testing
    skip    how many speakers are left out, the first in the text: a base may be trained on them
    """
    if length < 1 or not 0 < test < 1 or skip < 0:
        raise PrefedError(
            "data: length should be at least 1, test between 0 and 1, skip not below 0"
        )
    where = reading.root(path)
    if not where.is_file():
        where = reading.find("shakespeare", where, ["shakespeare.txt", "input.txt"])
    codes, targets = ((torch.uint8,), (length,)), ((torch.int64,), (length,))
    one = (torch.int64,), ()
    form: cache.Form = {"x": codes, "y": targets, "test_x": codes, "test_y": targets}
    form = {**form, "client": one, "classes": one}
    options = length, test, skip
    found = cache.decoded("shakespeare", [where], options, form, lambda: _decode(where, *options))
    test_pair = found["test_x"], found["test_y"]
    return Dataset(found["x"], found["y"], test_pair, None, found["client"], int(found["classes"]))


def _decode(where: Path, length: int, test: float, skip: int) -> cache.Arrays:
    try:
        text = where.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise reading.wrong(where, error.start, "not UTF-8 text") from None
    except OSError as error:
        raise PrefedError(f"{where}: cannot be read: {error}") from None
    text = text.replace("\r\n", "\n")
    speakers = {name: lines for name, lines in speeches(text).items() if len(lines) >= 2}
    if not speakers:
        raise reading.wrong(where, 0, 'no speaker with two speeches ("NAME:" on a line, then text)')
    alphabet = sorted({*"".join("".join(lines) for lines in speakers.values()), "\n"})
    if len(alphabet) > 256:
        text = f"{len(alphabet)} different characters; at most 256 can be used"
        raise reading.wrong(where, 0, text)
    codes = {character: code for code, character in enumerate(alphabet)}

    train: list[Array] = []
    held: list[Array] = []
    owners: list[int] = []
    if skip >= len(speakers):
        raise PrefedError(f"data: skip leaves none of the {len(speakers)} speakers")
    for owner, lines in enumerate([*speakers.values()][skip:]):
        cut = len(lines) - max(1, round(test * len(lines)))
        mine = _windows("\n".join(lines[: max(cut, 1)]), codes, length)
        train.append(mine)
        owners += [owner] * len(mine)
        held.append(_windows("\n".join(lines[max(cut, 1) :]), codes, length))
    (x, y), (test_x, test_y) = _pair(np.concatenate(train)), _pair(np.concatenate(held))
    about = {"client": torch.tensor(owners), "classes": torch.tensor([len(alphabet)])}
    return {"x": x, "y": y, "test_x": test_x, "test_y": test_y} | about


def speeches(text: str) -> dict[str, list[str]]:
    """What each speaker says, speech by speech, in the order of their first words. A block whose
    first line is no name goes on with the speech before it."""
    found: dict[str, list[str]] = {}
    last: str | None = None
    for block in text.split("\n\n"):
        first, _, rest = block.strip("\n").partition("\n")
        if first.endswith(":") and len(first) > 1 and rest:
            last = first[:-1].strip()
            found.setdefault(last, []).append(rest)
        elif last is not None and block.strip():
            found[last][-1] += "\n\n" + block.strip("\n")
    return found


def _windows(text: str, codes: dict[str, int], length: int) -> Array:
    """Rows of length + 1 codes, each beginning with the last character of the row before."""
    symbols = np.array([codes[c] for c in text.rjust(length + 1, "\n")], np.uint8)
    starts = list(range(0, len(symbols) - length, length))
    if starts[-1] + length + 1 < len(symbols):
        starts.append(len(symbols) - length - 1)
    return np.stack([symbols[s : s + length + 1] for s in starts])


def _pair(rows: Array) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = rows[:, :-1].copy(), rows[:, 1:].astype(np.int64)
    return torch.from_numpy(x), torch.from_numpy(y)
