"""The transformers of prefed.models as C programs: what stands below transformer.c.

Taken are GPT with learned positions, the character transformer and the vision transformer, without
dropout; `write` says of any other why not.
"""

from collections.abc import Sequence

import torch
from torch import nn

from prefed.core.layout import Layout, row_major
from prefed.models.attention import TransformerBlock
from prefed.models.chars import CharTransformer
from prefed.models.gpt import GPT
from prefed.models.vit import ViT
from prefed.training.engines.native_writing import (
    TYPES,
    Memory,
    NotNative,
    Shape,
    Vectors,
    Written,
    check_layer,
)

MODELS = GPT, CharTransformer, ViT
KINDS = (
    *MODELS, TransformerBlock, nn.Sequential, nn.Linear, nn.LayerNorm, nn.GELU, nn.Embedding,
)  # fmt: skip
TOKENS_AT_A_TIME = 128
"""About: a weight that is loaded serves all of them, and what is between layers is cached."""
MOST_TOKENS = 512
"""Of a sequence: its attention is held on the stack."""
IN_A_BLOCK = (
    "norm1.weight", "norm1.bias", "qkv.weight", "qkv.bias", "out.weight", "out.bias",
    "norm2.weight", "norm2.bias", "mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias",
)  # fmt: skip
"""In the order of Places in transformer.c."""


def write(
    module: nn.Module, layout: Layout, sample: Shape, dtype: torch.dtype, batch: int
) -> Written:
    assert isinstance(module, MODELS)
    blocks = [block for block in module.blocks if isinstance(block, TransformerBlock)]
    _check(module, blocks, layout)
    if module.positions is None or not blocks:
        raise NotNative("rotary positions, or no blocks")
    block, vit, tokens = blocks[0], isinstance(module, ViT), len(module.positions)
    wide, classes = block.out.out_features, module.head.out_features
    up = block.mlp[0]
    assert isinstance(up, nn.Linear)
    hidden = up.out_features
    if not vit and sample != (tokens,):
        raise NotNative("its samples are not as long as its positions")
    if tokens > MOST_TOKENS:
        raise NotNative(f"more than {MOST_TOKENS} tokens")
    lanes, rows = Vectors.widest(TYPES[dtype][2])
    sequences = max(1, min(batch, round(TOKENS_AT_A_TIME / tokens)))
    width, padded = (n + -n % lanes for n in (sequences * tokens, tokens))
    out = Memory(layout)
    widest = max(wide, hidden, module.embed.in_features if isinstance(module, ViT) else 0)
    widest += -widest % lanes
    sizes: dict[str, object] = {
        "WIDE": wide, "HEADS": block.heads, "EACH": wide // block.heads, "HIDDEN": hidden,
        "CLASSES": classes, "TOKENS": tokens, "PADDED": padded, "SEQUENCES": sequences,
        "CAUSAL": int(block.causal), "EPSILON": repr(module.norm.eps), "WIDEST": widest,
    }  # fmt: skip
    layer = width * (6 * wide + 2 + 2 * hidden) + sequences * block.heads * tokens * padded
    room = width * (3 * wide + max(wide, hidden) + widest)
    names = [[f"blocks.{i}.{name}" for name in IN_A_BLOCK] for i in range(len(blocks))]
    places = [", ".join(str(out.parameter(name).offset) for name in of) for of in names]
    tables = [
        f"static const Places places[] = {{{', '.join(f'{{{place}}}' for place in places)}}};",
        f'_Static_assert(sizeof(Layer) == {layer} * sizeof(real), "memory of a block");',
        f'_Static_assert(sizeof(Room) == {room} * sizeof(real), "memory beside it");',
    ]
    lines = [
        f"vec *h = (vec *){out.numbers(wide * width)}, *z = (vec *){out.numbers(classes * width)};",
        f"vec *normed = (vec *){out.numbers(wide * width)}, *scale = (vec *){out.numbers(width)};",
        f"Layer *layers = (Layer *){out.numbers(layer * len(blocks))};",
        f"Room *room = (Room *){out.numbers(room)};",
        *(
            _images(module, sample, width, len(blocks), out)
            if isinstance(module, ViT)
            else _text(module, len(blocks), out)
        ),
    ]
    out.check_all_used()
    labels = () if vit else (tokens,)
    files = "chain.c", "transformer.c"
    return Written(
        lines, out.size, lanes, width, rows, sequences, files, sizes, tables, labels, compiling=6.0
    )  # fmt: skip


def _check(module: nn.Module, blocks: Sequence[TransformerBlock], layout: Layout) -> None:
    for name, layer in module.named_modules():
        check_layer(name or "model", layer, KINDS)
        if isinstance(layer, nn.GELU) and layer.approximate != "none":
            raise NotNative("its GELU is an approximation")
        if isinstance(layer, nn.Embedding) and (layer.padding_idx, layer.max_norm) != (None, None):
            raise NotNative("its embedding leaves symbols out, or limits them")
        if getattr(layer, "dropout", 0):
            raise NotNative("dropout")
        if isinstance(layer, TransformerBlock) and (layer.rotary or layer.heads != blocks[0].heads):
            raise NotNative("rotary positions, or blocks that differ")
    norms = [layer for layer in module.modules() if isinstance(layer, nn.LayerNorm)]
    if len({(norm.eps, norm.normalized_shape) for norm in norms}) > 1:
        raise NotNative("norms that differ")
    if any(entry.stride != row_major(entry.shape) for entry in layout.entries):
        raise NotNative("its matrices do not lie row by row")


def _through_blocks(layers: int) -> tuple[str, str]:
    """Forward and back."""
    forward = (
        f"for (int l = 0; l < {layers}; l++) block(w, places + l, h, layers + l, room, count);"
    )
    back = (
        f"for (int l = {layers - 1}; l >= 0; l--) "
        "block_back(w, g, places + l, h, layers + l, room, count, add);"
    )
    return forward, back


def _scores(head: str, has_bias: bool, source: str, count: str, out: Memory) -> list[str]:
    """The last norm of `source`, the head, the loss of so many columns, and the way back into
    `source`, which is the gradient then."""
    weight, shift = (out.parameter(f"norm.{name}").offset for name in ("weight", "bias"))
    place, bias, into = out.parameter(head).offset, "0", "0"
    if has_bias:
        bias, into = (f"{vector} + {out.parameter('head.bias').offset}" for vector in "wg")
    return [
        f"norm({source}, normed, scale);",
        f"norm_output(w + {weight}, w + {shift}, normed, room->a);",
        f"product(CLASSES, N, WIDE, ALL, w + {place}, WIDE, 1, room->a, N, {bias}, z, N, 0);",
        f"if (cross_entropy(CLASSES, {count}, of, y, z, loss)) return -1;",
        f"weights_of(WIDE, CLASSES, {count}, z, room->a, g + {place}, {into}, add, room);",
        f"product(WIDE, N, CLASSES, ALL, w + {place}, 1, WIDE, z, N, 0, room->b, N, 0);",
        f"memset({source}, 0, WIDE * N * sizeof(vec));",
        f"norm_back(w + {weight}, normed, scale, room->b, g + {weight}, g + {shift}, "
        f"{source}, add);",
    ]


def _text(module: GPT | CharTransformer, layers: int, out: Memory) -> list[str]:
    """Symbols, positions, and scores for each position."""
    tied = isinstance(module, GPT)
    table, positions = (out.parameter(name).offset for name in ("embed.weight", "positions"))
    rows, (forward, back) = module.embed.num_embeddings, _through_blocks(layers)
    return [
        "memset(h, 0, WIDE * N * sizeof(vec));",
        f"if (symbols(count, x, w + {table}, {rows}, w + {positions}, (real *)h)) return -3;",
        forward,
        *_scores("embed.weight" if tied else "head.weight", not tied, "h", "count * TOKENS", out),
        back,
        "samples_first(WIDE, ROUND(WIDE), h, room->turned);",
        *([] if tied else [f"if (!add) memset(g + {table}, 0, {rows} * WIDE * sizeof(real));"]),
        f"symbols_back(count, x, room->turned, g + {table});",
        f"positions_back(count, room->turned, g + {positions}, add);",
    ]


def _images(module: ViT, sample: Shape, width: int, layers: int, out: Memory) -> list[str]:
    """Patches behind a first token, whose end has the scores."""
    channels, high, wide = sample
    side, features = module.patch, module.embed.in_features
    if (high // side) * (wide // side) + 1 != len(module.positions):
        raise NotNative("its images have another size than its positions")
    embed, shift = (out.parameter(f"embed.{name}").offset for name in ("weight", "bias"))
    first, positions = (out.parameter(name).offset for name in ("first", "positions"))
    forward, back = _through_blocks(layers)
    return [
        f"vec *cut = (vec *){out.numbers(features * width)};",
        f"vec *ends = (vec *){out.numbers(module.head.in_features * width)};",
        f"patches(count, {channels}, {high}, {wide}, {side}, x, (real *)cut);",
        f"product(WIDE, N, {features}, ALL, w + {embed}, {features}, 1, cut, N, "
        f"w + {shift}, h, N, 0);",
        f"with_first(count, w + {first}, w + {positions}, (real *)h);",
        forward,
        "first_tokens(count, (real *)h, (real *)ends);",
        *_scores("head.weight", True, "ends", "count", out),
        "first_tokens_back(count, (real *)ends, (real *)h);",
        back,
        "samples_first(WIDE, ROUND(WIDE), h, room->turned);",
        f"positions_back(count, room->turned, g + {positions}, add);",
        f"first_back(count, (real *)h, g + {first}, add);",
        f"weights_of({features}, WIDE, count * TOKENS, h, cut, g + {embed}, g + {shift}, "
        "add, room);",
    ]
