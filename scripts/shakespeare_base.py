"""The base of the preset shakespeare-lora: src/prefed/models/shakespeare-base.safetensors.

    python scripts/shakespeare_base.py --data ../shared/data/shakespeare.txt

A small GPT, trained in one place on the speeches of the first 100 speakers, who are no clients of
the preset (`skip = 100`), and in lower case: capitals, and so where a line or a name begins, are
left for the adapters to learn. Half a minute of one core; prints the loss on what these speakers
say later, in lower case, and on what the preset is tested on. The file holds float16.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from prefed.core.safe_files import write_whole
from prefed.data.shakespeare import shakespeare, speeches
from prefed.experiments.config import load
from prefed.models import MODELS

PRESET = load("shakespeare-lora")
SPEAKERS = int(PRESET.data.options["skip"])
LENGTH = int(PRESET.data.options["length"])
FILE = (
    Path(__file__).parent.parent
    / "src/prefed/models"
    / f"{PRESET.model.options['base']}.safetensors"
)
STEPS, BATCH, LR, WARMUP = 600, 32, 3e-3, 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the text")
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    whole = shakespeare(str(given.data), length=LENGTH)
    clients = shakespeare(str(given.data), length=LENGTH, skip=SPEAKERS)
    assert isinstance(whole.client, Tensor)
    mine, lower = whole.client < SPEAKERS, in_lower_case(given.data)
    options = dict(PRESET.model.options["of"])
    model = MODELS.get(options.pop("name"))((LENGTH,), whole.labels, **options)
    train(model, lower[whole.x[mine].long()], lower[whole.y[mine]], given.steps)
    assert whole.test is not None
    assert clients.test is not None
    later = len(whole.test[0]) - len(clients.test[0])
    own = (lower[part[:later].long()] for part in whole.test)
    for who, x, y in (("these speakers", *own),
                      ("the clients", *clients.test)):  # fmt: skip
        print(f"loss on what {who} say later: {loss_of(model, x, y):.4f}")
    half = {name: value.half() for name, value in model.state_dict().items()}
    write_whole(FILE, safetensors.torch.save(half))
    print(f"{FILE.name}: {FILE.stat().st_size} bytes")


def in_lower_case(path: Path) -> Tensor:
    """The code of the small letter for that of each capital, as the data set numbers characters."""
    spoken = [lines for lines in speeches(path.read_text()).values() if len(lines) >= 2]
    alphabet = sorted({*"".join("".join(lines) for lines in spoken), "\n"})
    return torch.tensor([alphabet.index(character.lower()) for character in alphabet])


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.1)
    draw = torch.Generator().manual_seed(1)
    for step in range(steps):
        fall = (1 + math.cos(math.pi * step / steps)) / 2
        for group in optimiser.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP) * fall
        rows = torch.randint(len(x), (BATCH,), generator=draw)
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()


@torch.no_grad()
def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> float:
    parts = zip(x.split(256), y.split(256), strict=True)
    return sum(float(nn.functional.cross_entropy(model(a), b)) * len(a) for a, b in parts) / len(x)


if __name__ == "__main__":
    main()
