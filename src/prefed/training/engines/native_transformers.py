"""The transformers of prefed.models as C programs: what stands below transformer.c.

Taken are GPT with learned positions, the character transformer and the vision transformer, without
dropout; `write` says of any other why not.
"""

import torch
from torch import nn

from prefed.core.layout import Layout
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
    check_embedding,
    check_kinds,
    check_layer,
)

MODELS = GPT, CharTransformer, ViT
KINDS = (
    *MODELS, TransformerBlock, nn.Sequential, nn.Linear, nn.LayerNorm, nn.GELU, nn.Embedding,
)  # fmt: skip
TOKENS_AT_A_TIME = 128
"""About: a weight that is loaded serves all of them, and what is between layers is cached."""
MOST_TOKENS = 512
"""Of a sequence: beyond, the shares of an attention leave the cache; torch does not hold them."""


def _in_a_block(wide: int, hidden: int) -> dict[str, Shape]:
    """Parameters and their shapes, in the order of Places in transformer.c."""
    return {
        "norm1.weight": (wide,), "norm1.bias": (wide,),
        "qkv.weight": (3 * wide, wide), "qkv.bias": (3 * wide,),
        "out.weight": (wide, wide), "out.bias": (wide,),
        "norm2.weight": (wide,), "norm2.bias": (wide,),
        "mlp.0.weight": (hidden, wide), "mlp.0.bias": (hidden,),
        "mlp.2.weight": (wide, hidden), "mlp.2.bias": (wide,),
    }  # fmt: skip


def write(
    module: nn.Module, layout: Layout, sample: Shape, dtype: torch.dtype, batch: int
) -> Written:
    assert isinstance(module, MODELS)
    blocks = _checked(module)
    if module.positions is None:
        raise NotNative("rotary positions")
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
        "TOKENS": tokens, "PADDED": padded, "SEQUENCES": sequences,
        "CAUSAL": int(block.causal), "EPSILON": repr(module.norm.eps), "WIDEST": widest,
    }  # fmt: skip
    layer = width * (6 * wide + 2 + 2 * hidden) + sequences * block.heads * tokens * padded
    room = width * (3 * wide + max(wide, hidden) + widest)
    room += (5 * wide // block.heads + tokens + padded) * padded
    inside = _in_a_block(wide, hidden).items()
    places = [
        ", ".join(str(out.parameter(f"blocks.{i}.{n}", shape).offset) for n, shape in inside)
        for i in range(len(blocks))
    ]
    tables = [
        f"static const Places places[] = {{{', '.join(f'{{{place}}}' for place in places)}}};",
        f'_Static_assert(sizeof(Layer) == {layer} * sizeof(real), "memory of a block");',
        f'_Static_assert(sizeof(Room) == {room} * sizeof(real), "memory beside it");',
    ]
    scores = out.numbers(classes * width)
    places_of = [
        f"vec *h = (vec *){out.numbers(wide * width)}, *z = (vec *){scores};",
        f"vec *normed = (vec *){out.numbers(wide * width)}, *scale = (vec *){out.numbers(width)};",
        f"Layer *layers = (Layer *){out.numbers(layer * len(blocks))};",
        f"Room *room = (Room *){out.numbers(room)};",
    ]
    if isinstance(module, ViT):
        more, forward, back = _images(module, sample, width, len(blocks), out)
    else:
        more, forward, back = _text(module, len(blocks), out)
    places_of += more
    out.check_all_used()
    labels = () if vit else (tokens,)
    files = "chain.c", "product.c", "transformer.c"
    return Written(
        [*places_of, *forward], [*places_of, *back], scores, classes, out.size, lanes, width, rows,
        sequences, files, sizes, tables, labels,
    )  # fmt: skip


def _checked(module: GPT | CharTransformer | ViT) -> list[TransformerBlock]:
    """Its blocks, if everything is where the constructor put it, and as it was made."""
    for name, layer in module.named_modules():
        check_layer(name or "model", layer, KINDS)
        if isinstance(layer, nn.GELU) and layer.approximate != "none":
            raise NotNative("its GELU is an approximation")
        if getattr(layer, "dropout", 0):
            raise NotNative("dropout")
    embed = nn.Linear if isinstance(module, ViT) else nn.Embedding
    check_kinds([module.embed, module.norm, module.head], [embed, nn.LayerNorm, nn.Linear])
    if isinstance(module.embed, nn.Embedding):
        check_embedding(module.embed)
    blocks: list[TransformerBlock] = []
    for block in module.blocks:
        if not isinstance(block, TransformerBlock):
            raise NotNative("it is not made of blocks")
        kinds = [nn.LayerNorm, nn.LayerNorm, nn.Linear, nn.Linear]
        check_kinds([block.norm1, block.norm2, block.qkv, block.out], kinds)
        check_kinds([*block.mlp], [nn.Linear, nn.GELU, nn.Linear])
        blocks.append(block)
        if block.rotary or "_dropped" in vars(block):
            raise NotNative("rotary positions, or a block that was changed")
    if len({(block.heads, block.causal) for block in blocks}) != 1:
        raise NotNative("its blocks differ")
    norms = [layer for layer in module.modules() if isinstance(layer, nn.LayerNorm)]
    if len({norm.eps for norm in norms}) > 1 or not norms[0].eps > 0:
        raise NotNative("norms that differ, or divide by 0")
    return blocks


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


def _scores(
    module: GPT | CharTransformer | ViT, name: str, source: str, count: str, out: Memory
) -> tuple[list[str], list[str]]:
    """The last norm of `source` and the head; the loss of so many columns, and the way back into
    `source`, which is the gradient then."""
    head, bias, into = module.head, "0", "0"
    wide, classes = head.in_features, head.out_features
    weight, shift = (out.parameter(f"norm.{n}", (wide,)).offset for n in ("weight", "bias"))
    place = out.parameter(name, (classes, wide)).offset
    if not isinstance(module, GPT):
        own = out.parameter("head.bias", (classes,)).offset
        bias, into = f"w + {own}", f"g + {own}"
    forward = [
        f"norm({source}, normed, scale);",
        f"norm_output(w + {weight}, w + {shift}, normed, room->a);",
        f"product(CLASSES, N, WIDE, ALL, w + {place}, WIDE, 1, room->a, N, {bias}, z, N, 0);",
    ]
    back = [
        f"if (cross_entropy(CLASSES, {count}, of, y, z, loss)) return -1;",
        f"weights_of(WIDE, CLASSES, {count}, z, room->a, g + {place}, {into}, add, room);",
        f"product(WIDE, N, CLASSES, ALL, w + {place}, 1, WIDE, z, N, 0, room->b, N, 0);",
        f"memset({source}, 0, WIDE * N * sizeof(vec));",
        f"norm_back(w + {weight}, normed, scale, room->b, g + {weight}, g + {shift}, "
        f"{source}, add);",
    ]
    return forward, back


def _positions(module: GPT | CharTransformer | ViT, out: Memory) -> int:
    assert module.positions is not None
    return out.parameter("positions", (len(module.positions), module.head.in_features)).offset


Lines = tuple[list[str], list[str], list[str]]
"""What names places, goes forward, and goes back."""


def _text(module: GPT | CharTransformer, layers: int, out: Memory) -> Lines:
    """Symbols, positions, and scores for each position."""
    tied = isinstance(module, GPT)
    rows, wide = module.embed.num_embeddings, module.head.in_features
    table = out.parameter("embed.weight", (rows, wide)).offset
    positions, (forward, back) = _positions(module, out), _through_blocks(layers)
    head = "embed.weight" if tied else "head.weight"
    scores, scores_back = _scores(module, head, "h", "count * TOKENS", out)
    start = [
        "memset(h, 0, WIDE * N * sizeof(vec));",
        f"if (symbols(count, x, w + {table}, {rows}, w + {positions}, (real *)h)) return -3;",
        forward,
    ]
    end = [
        back,
        "samples_first(WIDE, ROUND(WIDE), h, room->turned);",
        *([] if tied else [f"if (!add) memset(g + {table}, 0, {rows} * WIDE * sizeof(real));"]),
        f"symbols_back(count, x, room->turned, g + {table});",
        f"positions_back(count, room->turned, g + {positions}, add);",
    ]
    return [], [*start, *scores], [*scores_back, *end]


def _images(module: ViT, sample: Shape, width: int, layers: int, out: Memory) -> Lines:
    """Patches behind a first token, whose end has the scores."""
    side, features, each = module.patch, module.embed.in_features, module.head.in_features
    if len(sample) != 3 or any(pixels % side for pixels in sample[1:]):
        raise NotNative("its images cannot be cut into patches")
    channels, high, wide = sample
    patches = (high // side) * (wide // side)
    if patches + 1 != len(module.positions) or channels * side * side != features:
        raise NotNative("its images have another size than its positions")
    embed = out.parameter("embed.weight", (each, features)).offset
    shift = out.parameter("embed.bias", (each,)).offset
    first, positions = out.parameter("first", (1, each)).offset, _positions(module, out)
    forward, back = _through_blocks(layers)
    scores, scores_back = _scores(module, "head.weight", "ends", "count", out)
    own = [
        f"vec *cut = (vec *){out.numbers(features * width)};",
        f"vec *ends = (vec *){out.numbers(each * width)};",
    ]
    start = [
        f"patches(count, {channels}, {high}, {wide}, {side}, x, (real *)cut);",
        f"product(WIDE, N, {features}, ALL, w + {embed}, {features}, 1, cut, N, "
        f"w + {shift}, h, N, 0);",
        f"with_first(count, w + {first}, w + {positions}, (real *)h);",
        forward,
        "first_tokens(count, (real *)h, (real *)ends);",
    ]
    end = [
        "first_tokens_back(count, (real *)ends, (real *)h);",
        back,
        "samples_first(WIDE, ROUND(WIDE), h, room->turned);",
        f"positions_back(count, room->turned, g + {positions}, add);",
        f"first_back(count, (real *)h, g + {first}, add);",
        f"weights_of({features}, WIDE, count * TOKENS, h, cut, g + {embed}, g + {shift}, "
        "add, room);",
    ]
    return own, [*start, *scores], [*scores_back, *end]
