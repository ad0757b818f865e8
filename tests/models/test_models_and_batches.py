"""Models by name, batches, augmentation, devices and precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import prefed
from prefed.core import draws
from prefed.data.images import CropAndFlip, Normalise
from prefed.training.task import Task
from tests.helpers.problems import tiny_data, tiny_model

COUNTS = [
    ("resnet8", (3, 32, 32), 10, {"norm": "batch"}, 78_042),
    ("resnet20", (3, 32, 32), 10, {"norm": "batch"}, 272_474),
    ("resnet18", (3, 32, 32), 10, {"norm": "batch"}, 11_173_962),
    ("resnet34", (3, 32, 32), 10, {"norm": "group"}, 21_282_122),
    ("simple-cnn", (3, 32, 32), 10, {}, 62_006),
    ("cnn", (1, 28, 28), 62, {"kernel": 5, "hidden": 2048}, 6_603_710),
    ("mlp", (1, 28, 28), 10, {"hidden": [200, 200]}, 199_210),
    ("char-lstm", (80,), 80, {}, 819_920),
    ("char-transformer", (80,), 65, {}, 113_601),
    ("gpt", (1024,), 50_257, {"size": "small"}, 124_439_808),  # GPT-2's
    ("gpt", (80,), 65, {"positions": "rotary"}, 88_032),  # 65w + 3(12w^2 + 13w) + 2w
    ("vit", (3, 224, 224), 1000, {"size": "tiny", "patch": 16}, 5_717_416),  # DeiT's
    ("vit", (3, 32, 32), 10, {}, 208_074),  # the same with 49w + 66w + 10(w + 1)
]


@pytest.mark.parametrize(("name", "inputs", "classes", "options", "count"), COUNTS)
def test_parameter_counts(
    name: str, inputs: tuple[int, ...], classes: int, options: dict[str, Any], count: int
) -> None:
    given: dict[str, Any] = {"classes": classes}
    if name != "char-lstm":
        given["inputs"] = inputs
    with torch.device("meta" if count > 20_000_000 else "cpu"):
        model = prefed.MODELS.get(name)(**given, **options)
    assert sum(p.numel() for p in model.parameters()) == count
    if count < 1_000_000:
        x = torch.zeros(2, *inputs) if len(inputs) == 3 else torch.zeros(2, *inputs).to(torch.uint8)
        shape = (2, classes, *inputs) if len(inputs) == 1 else (2, classes)
        assert model(x).shape == shape


def test_character_models_do_not_look_ahead() -> None:
    x = torch.randint(0, 20, (2, 12))
    later = x.clone()
    later[:, 8:] = 3
    for name in ("char-lstm", "char-transformer", "gpt"):
        given = {"inputs": (12,)} if name != "char-lstm" else {}
        model = prefed.MODELS.get(name)(classes=20, **given)
        torch.testing.assert_close(model(x)[:, :, :8], model(later)[:, :, :8])


def test_epochs_use_each_sample_as_often() -> None:
    drawn = draws.epochs(0, 1, 2, 7, 20).tolist()
    assert len(drawn) == 20
    assert sorted(drawn[:7]) == list(range(7))
    assert {drawn.count(sample) for sample in range(7)} == {2, 3}
    assert drawn == draws.epochs(0, 1, 2, 7, 20).tolist()
    assert drawn != draws.epochs(0, 2, 2, 7, 20).tolist()


@pytest.mark.parametrize("batches", ["replacement", "epochs"])
def test_clients_smaller_than_a_batch(batches: Any) -> None:
    result = prefed.simulate(
        prefed.FedAvg(), tiny_model(), tiny_data(), rounds=1, local_steps=2, batch_size=64,
        batches=batches, device="cpu",
    )  # fmt: skip
    assert torch.isfinite(result.weights).all()


def test_crop_and_flip() -> None:
    x = torch.from_numpy(np.random.default_rng(0).integers(1, 256, (9, 3, 8, 6), dtype=np.uint8))
    out = CropAndFlip(2)(x, draws.generator(0, "augment", 1, 2, 3))
    assert (out.shape, out.dtype) == (x.shape, torch.uint8)
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    for image, changed in zip(padded, out, strict=True):
        windows = [image[:, i : i + 8, j : j + 6] for i in range(5) for j in range(5)]
        assert any(torch.equal(changed, w) or torch.equal(changed, w.flip(2)) for w in windows)
    again = CropAndFlip(2)(x, draws.generator(0, "augment", 1, 2, 3))
    assert torch.equal(out, again)
    assert not torch.equal(out, CropAndFlip(2)(x, draws.generator(0, "augment", 1, 2, 4)))
    assert CropAndFlip(2)(x[:0], draws.generator(0, "augment", 1, 2, 3)).shape == (0, 3, 8, 6)


def test_normalise_is_the_formula() -> None:
    x = torch.randint(0, 256, (4, 3, 5, 5), dtype=torch.uint8)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    expected = (x.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(
        3, 1, 1
    )
    torch.testing.assert_close(Normalise(mean, std)(x), expected.float())


def images() -> prefed.FederatedData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (40, 3, 16, 16), dtype=torch.uint8, generator=generator)
    y = torch.arange(40) % 4
    clients = [(x[i::4], y[i::4]) for i in range(4)]
    return prefed.FederatedData(clients, (x, y), Normalise((0.5,) * 3, (0.25,) * 3), CropAndFlip(1))


@pytest.mark.long
def test_formats_and_precision_agree() -> None:
    """On the CPU for correctness: another memory format is the same arithmetic in another order,
    bfloat16 is near it, and the weights stay float32. (With 4 channels torch 2.13 itself
    corrupts memory in channels_last on the CPU, so it is 16.)"""

    def run(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = prefed.MODELS.get("resnet8")((3, 16, 16), 4, width=16)
        result = prefed.simulate(
            prefed.PreFed(), model, images(), rounds=2, local_steps=2, batch_size=8, device="cpu",
            **options,
        )  # fmt: skip
        assert result.weights.dtype == torch.float32
        named = dict(result.model.named_parameters())
        return torch.cat([p.detach().reshape(-1) for p in named.values()])

    plain = run()
    torch.testing.assert_close(run(channels_last=True), plain, rtol=1e-3, atol=1e-4)
    mixed = run(precision="bfloat16")
    assert not torch.equal(mixed, plain)
    assert (mixed - plain).abs().mean() < 1e-3


def test_a_device_that_is_not_there() -> None:
    if not torch.backends.mps.is_available():
        with pytest.raises(prefed.PrefedError, match="device: 'mps' cannot be used here"):
            prefed.simulate(prefed.FedAvg(), tiny_model(), tiny_data(), rounds=1, local_steps=1,
                            device="mps")  # fmt: skip


def test_one_input_channel_does_not_undo_channels_last() -> None:
    """A single channel fits both formats, and the strides of its weights decide which."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.Flatten())
    data = prefed.FederatedData([(torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.long))])
    task = Task(model, None, data, torch.device("cpu"))
    assert task.channels_last
    seen: list[Tensor] = []
    for layer in list(task.flat.module.children())[:3]:
        layer.register_forward_hook(lambda *a: seen.append(a[-1]))
    task.forward(data.client(0).x)
    assert all(v.is_contiguous(memory_format=torch.channels_last) for v in seen)
    assert len(seen) == 3


def test_first_weights() -> None:
    """Glorot's are uniform in +-sqrt(6 / (in + out)), He's have the variance 2 / in."""
    bound = (6 / (300 + 200)) ** 0.5
    for first, spread in (("glorot", bound / 3**0.5), ("he", (2 / 300) ** 0.5)):
        model: Any = prefed.MODELS.get("mlp")((300,), 5, hidden=(200,), first=first)
        layer = model[1]
        assert float(layer.weight.detach().std()) == pytest.approx(spread, rel=0.02)
        assert not layer.bias.any()
        assert (float(layer.weight.detach().abs().max()) <= bound) == (first == "glorot")
