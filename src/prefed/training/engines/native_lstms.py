"""The character LSTM of prefed.models as a C program: what stands below lstm.c."""

import math

import torch
from torch import nn

from prefed.core.layout import Layout
from prefed.models.chars import CharLSTM
from prefed.training.engines.native_writing import (
    TYPES,
    Memory,
    NotNative,
    Shape,
    Vectors,
    Written,
    check_embedding,
    check_kinds,
    check_layer,
)

MODELS = (CharLSTM,)
KINDS = CharLSTM, nn.Embedding, nn.LSTM, nn.Linear
MOST_LAYERS = 4
TOGETHER = 2
"""Vectors of the output that are summed for all samples at a time."""


def write(
    module: nn.Module, layout: Layout, sample: Shape, dtype: torch.dtype, batch: int
) -> Written:
    assert isinstance(module, CharLSTM)
    _check(module, sample)
    (times,), layers, hidden = sample, module.lstm.num_layers, module.lstm.hidden_size
    rows, embedding, classes = *module.embed.weight.shape, module.head.out_features
    lanes, held = Vectors.widest(TYPES[dtype][2])
    samples = math.ceil(batch / math.ceil(batch / (held // TOGETHER)))

    def rounded(features: int) -> int:
        return features + -features % lanes

    out, h_wide = Memory(layout), rounded(hidden)
    widest, gates = max(rounded(embedding), h_wide), 4 * h_wide + lanes

    def steps(kind: str, name: str, features: int) -> str:
        """Memory for the numbers of all rows."""
        return f"{kind} *{name} = ({kind} *){out.numbers(times * samples * features)};"

    table = out.parameter("embed.weight", (rows, embedding)).offset
    head = out.parameter("head.weight", (classes, hidden)).offset
    bias = out.parameter("head.bias", (classes,)).offset
    scores = out.numbers(times * samples * rounded(classes))
    largest = max(4 * h_wide * widest, rounded(classes) * h_wide)
    names = [
        f"real *z = {scores};",
        f"Room *room = (Room *){out.numbers(2 * largest)};",
        steps("real", "x0", rounded(embedding)),
    ]
    forward = [f"if (symbols(count, {embedding}, x, w + {table}, {rows}, x0)) return -3;"]
    back: list[str] = []
    for i in range(layers):
        wide, taken = (embedding, "x0") if i == 0 else (hidden, f"(real *)h{i - 1}")
        matrices: dict[str, Shape] = {
            "weight_ih": (4 * hidden, wide),
            "weight_hh": (4 * hidden, hidden),
        }
        shapes = matrices | {"bias_ih": (4 * hidden,), "bias_hh": (4 * hidden,)}
        x, h, x_bias, h_bias = (
            out.parameter(f"lstm.{name}_l{i}", shape).offset for name, shape in shapes.items()
        )
        names += [
            f"const Weights w{i} = {{w + {x}, w + {h}, w + {x_bias}, w + {h_bias}}};",
            steps("real", f"gates{i}", gates),
            *(steps("vec", f"{name}{i}", h_wide) for name in ("cells", "tangents", "h")),
        ]
        layer, kept = f"{wide}, {hidden}, w{i}", f"gates{i}, cells{i}, tangents{i}"
        forward.append(f"lstm({layer}, {taken}, {kept}, h{i}, room);")
        back = [
            f"lstm_back({layer}, {kept}, d, later, room);",
            f"weights_back(4, {hidden}, {wide}, ALL_ROWS, gates{i}, {taken}, g + {x}, add, room);",
            f"weights_back(4, {hidden}, {hidden}, ALL_ROWS - SAMPLES, "
            f"gates{i} + SAMPLES * APART_ROWS(4, {hidden}), (real *)h{i}, g + {h}, add, room);",
            f"bias_back(4, {hidden}, gates{i}, g + {x_bias}, add);",
            f"memcpy(g + {h_bias}, g + {x_bias}, {4 * hidden} * sizeof(real));",
            *back,
        ]
    out.check_all_used()
    top, sizes = f"(real *)h{layers - 1}", f"1, CLASSES, {hidden}"
    forward.append(f"outputs_of({sizes}, w + {head}, w + {bias}, 0, {top}, z, room);")
    back = [
        steps("real", "d", widest),
        f"vec *later = (vec *){out.numbers(2 * samples * h_wide)};",
        "if (loss_of(count, of, y, z, loss)) return -1;",
        f"weights_back({sizes}, ALL_ROWS, z, {top}, g + {head}, add, room);",
        f"bias_back(1, CLASSES, z, g + {bias}, add);",
        f"inputs_back({sizes}, w + {head}, z, d, room);",
        *back,
        f"if (!add) memset(g + {table}, 0, {rows} * {embedding} * sizeof(real));",
        f"symbols_back(count, {embedding}, x, d, g + {table});",
    ]
    more: dict[str, object] = {
        "TIMES": times, "LARGEST": largest, "TOGETHER": TOGETHER,
    }  # fmt: skip
    more["SCORE(c, s, l)"] = f"(((l) * SAMPLES + (s)) * {rounded(classes)} + (c))"
    files = "chain.c", "product.c", "lstm.c"
    return Written(
        [*names, *forward], [*names, *back], scores, classes, out.size, lanes, lanes, held,
        samples, files, more, labels=sample,
    )  # fmt: skip


def _check(module: CharLSTM, sample: Shape) -> None:
    """Everything is where the constructor put it, and as it was made."""
    for name, layer in module.named_modules():
        check_layer(name or "model", layer, KINDS)
    check_kinds([module.embed, module.lstm, module.head], [nn.Embedding, nn.LSTM, nn.Linear])
    check_embedding(module.embed)
    lstm = module.lstm
    plain = lstm.bias and lstm.batch_first and not (lstm.bidirectional or lstm.proj_size)
    if not plain or (lstm.dropout and lstm.num_layers > 1):
        raise NotNative("its LSTM has other options than those of the character LSTM")
    if lstm.num_layers > MOST_LAYERS:
        raise NotNative(f"it has more than {MOST_LAYERS} layers, which take long to compile")
    if len(sample) != 1:
        raise NotNative("its samples are not sequences of symbols")
