"""What people hand in from Python: taken as it is meant, or refused with words that help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import prefed
from tests.helpers.commands import prefed_here

X = torch.randn(4, 20, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(80).view(4, 20) % 3


def history(x: Tensor, y: Any, model: nn.Module | None = None, **more: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    data = prefed.FederatedData([*zip(x, y, strict=True)])
    asked: dict[str, Any] = {"rounds": 2, "local_steps": 2, "batch_size": 4, "device": "cpu"}
    algorithm = more.pop("algorithm", prefed.FedAvg(client_lr=0.1))
    model = model or nn.Linear(5, 3)
    return prefed.simulate(algorithm, model, data, **asked | more, progress=False).history


def loss(*given: Any, **more: Any) -> float:
    return float(history(*given, **more)[-1]["train_loss"])


def test_masks_are_parts() -> None:
    x, y = torch.arange(8.0)[:, None], torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    for masks in ([y == 1, y == 2], [(y == 1).numpy(), (y == 2).tolist()]):
        data = prefed.FederatedData((x, y), parts=masks)
        assert [data.client(n).all()[0].flatten().tolist() for n in (0, 1)] == [[1, 4, 7], [2, 5]]
    with pytest.raises(prefed.PrefedError, match=r"parts\[1\]: a mask of 3 for 8 samples"):
        prefed.FederatedData((x, y), parts=[y == 1, (y == 2)[:3]])
    with pytest.raises(prefed.PrefedError, match=r"parts\[0\]: should be sample numbers or a mask"):
        prefed.FederatedData((x, y), parts=[[1.7, 2.9]])


@pytest.mark.parametrize("kind", [torch.int8, torch.int16, torch.int32])
def test_labels_of_any_width(kind: torch.dtype) -> None:
    assert loss(X, Y.to(kind)) == loss(X, Y) == loss(X, Y.to(kind).numpy())


def test_labels_of_a_data_set_of_any_width() -> None:
    class Own(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 9

        def __getitem__(self, number: int) -> tuple[Tensor, Any]:
            return X[0, number], np.int32(Y[0, number])

    data = prefed.FederatedData([Own()])
    assert data.client(0).take(torch.arange(2))[1].dtype == torch.int64


def test_what_made_the_samples_is_not_trained() -> None:
    encoder = nn.Linear(5, 5)
    for engine in ("sequential", "vectorised"):
        found = loss(encoder(X), Y, engine=engine)
        assert found == loss(encoder(X).detach(), Y, engine=engine)
    pair = prefed.FederatedData([((encoder(X[0]), X[0]), Y[0])]).client(0).all()[0]
    assert not any(leaf.requires_grad for leaf in pair)


@pytest.mark.parametrize("y", [Y, Y - 1, 2.0 * (Y == 1) - 1, torch.full_like(Y, -100)])
def test_yes_or_no_is_0_or_1(y: Tensor) -> None:
    with pytest.raises(prefed.PrefedError, match=r"y reaches from -?\d+ to -?\d+, but binary"):
        loss(X, y, nn.Linear(5, 1), loss="bce")
    assert loss(X, Y == 1, nn.Linear(5, 1), loss="bce") > 0


@pytest.mark.parametrize(
    ("x", "y", "word"),
    [
        (X.to(torch.int8), Y, r"convert it with x\.float\(\)"),
        (X, Y > 0, r"convert it with y\.long\(\)"),
    ],
)
def test_types_that_do_not_fit(x: Tensor, y: Tensor, word: str) -> None:
    with pytest.raises(prefed.PrefedError, match=word):
        loss(x, y)


def test_settings_as_people_write_them() -> None:
    plain = loss(X, Y)
    assert loss(X, Y, device=torch.device("cpu"), weighting=np.ones(4)) == plain
    assert loss(X, Y, weighting=torch.ones(4)) == plain
    with pytest.raises(prefed.PrefedError, match="callbacks: should be a list of them"):
        loss(X, Y, callbacks=prefed.Callback())
    with pytest.raises(prefed.PrefedError, match="not the class PreFed"):
        loss(X, Y, algorithm=prefed.PreFed)


@pytest.mark.parametrize(
    ("sizes", "settings", "word"),
    [
        ((1, 9), {"local_epochs": 1, "drop_last": True}, "leave out clients with a single sample"),
        ((9, 9), {"local_steps": 1, "batch_size": 3, "micro_batch": 2}, "another micro_batch"),
        ((9, 9), {"local_epochs": 1}, "set drop_last = true"),
    ],
)
def test_batches_of_one_sample(sizes: tuple[int, int], settings: Any, word: str) -> None:
    """What is said can be done."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    data = prefed.FederatedData([(X[0, :n], Y[0, :n]) for n in sizes])
    given = {"rounds": 1, "batch_size": 4, "device": "cpu", **settings}
    with pytest.raises(prefed.PrefedError, match=word):
        prefed.simulate(prefed.FedAvg(), model, data, **given)


@pytest.mark.process
def test_on_the_command_line(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.full((6, 2), np.nan), y=np.arange(6) % 2)
    done = prefed_here("data", "check", "mine.npz", cwd=tmp_path)
    assert (done.returncode, "x has values that are not finite" in done.stdout) == (1, True)


class Table:
    """What pandas and others have in common, where an array is meant."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def to_numpy(self) -> Any:
        return self.values.numpy()


def test_tables_are_arrays() -> None:
    tables = [(Table(x), Table(y)) for x, y in zip(X, Y, strict=True)]
    torch.manual_seed(0)
    data, asked = prefed.FederatedData(tables), {"rounds": 2, "local_steps": 2, "batch_size": 4}
    algorithm = prefed.FedAvg(client_lr=0.1)
    found = prefed.simulate(algorithm, nn.Linear(5, 3), data, device="cpu", **asked)  # type: ignore[arg-type]
    assert found.history[-1]["train_loss"] == loss(X, Y)
    with pytest.raises(prefed.PrefedError, match=r"clients\[0\]: a table has no x and y"):
        prefed.FederatedData([Table(X[0])]).client(0)


def test_what_is_no_list_of_clients_is_told() -> None:
    with pytest.raises(prefed.PrefedError, match=r"clients: is a dict; .*list\(clients.values\(\)"):
        prefed.FederatedData({"ann": (X[0], Y[0])})
    with pytest.raises(prefed.PrefedError, match=r"clients: is one pair \(x, y\)"):
        prefed.FederatedData((X[0], Y[0]))


class Logits(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        return {"logits": super().forward(input)}


def test_a_dict_with_logits_is_an_output() -> None:
    torch.manual_seed(0)
    assert loss(X, Y, Logits(5, 3)) == loss(X, Y)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("shape", ["full", "block", "kronecker"])
def test_a_client_that_diverges_is_left_out_whatever_the_shape(shape: str, engine: str) -> None:
    x = X.double().clone()
    x[2] = 1e200
    algorithm = prefed.PreFed(client_lr=0.01, shape=shape)
    asked: dict[str, Any] = {"algorithm": algorithm, "engine": engine, "local_steps": 6}
    model = nn.Linear(5, 2).double()
    targets = [torch.randn(20, 2, dtype=torch.float64) for _ in x]
    found = history(x, targets, model, on_divergence="continue", loss="mse", **asked)
    assert all(record["left_out"] == [2] for record in found)
    with pytest.raises(prefed.Diverged):
        history(x, targets, model, loss="mse", **asked)


@pytest.mark.parametrize(
    "algorithm",
    [
        prefed.PreFedS(m_codec="log8"),
        prefed.Pair(client="adam", share={"m": {"kind": "average", "codec": "log8"}}),
    ],
    ids=["prefeds", "pair"],
)
def test_codecs_without_signs_are_for_values_without(algorithm: Any) -> None:
    with pytest.raises(prefed.PrefedError, match="log8 is for values that are never negative"):
        loss(X, Y, algorithm=algorithm)


def test_a_warm_up_counts_the_steps_of_the_run() -> None:
    rate = prefed.schedule.warmup(0.1, steps=8, local_steps=4)
    with pytest.raises(prefed.PrefedError, match="counts 4 local steps a round, but the run has 2"):
        loss(X, Y, algorithm=prefed.FedAvg(client_lr=rate))


def test_a_loss_is_made_first() -> None:
    with pytest.raises(prefed.PrefedError, match=r"is a class; make one, CrossEntropyLoss\(\)"):
        loss(X, Y, loss=nn.CrossEntropyLoss)


def test_stop_when_may_meet_a_round_without_evaluation() -> None:
    with pytest.raises(prefed.PrefedError, match=r"stop_when: .*test_accuracy.* may be None"):
        history(X, Y, stop_when=lambda r: r["test_accuracy"] > 0.9, evaluate_every=3)


def test_a_run_that_goes_on_ends_where_the_whole_one_does(tmp_path: Path) -> None:
    """Also if its patience was at an end in the last round of the first part."""
    asked: dict[str, Any] = {"stop_when": {"metric": "lowest train_loss", "patience": 2}, "seed": 1}
    asked |= {"algorithm": prefed.FedAvg(client_lr=1e-9)}
    whole = history(X, Y, rounds=40, **asked)
    assert len(whole) < 40
    history(X, Y, rounds=len(whole), out=tmp_path / "run", **asked)
    parts = history(X, Y, rounds=40, out=tmp_path / "run", resume=True, **asked)
    assert len(parts) == len(whole)
    assert parts[-1]["ended"] == whole[-1]["ended"]


def test_a_server_takes_several_steps_along_one_direction() -> None:
    rules = [{"name": "spectral", "refresh": n} for n in (1, 3)]
    pairs = [prefed.Pair(server=rule, server_lr=0.1) for rule in rules]
    one, several = (loss(X, Y, algorithm=pair, rounds=4) for pair in pairs)
    assert one != several


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_x, self.of_z = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        out: Tensor = self.of_x(x) + self.of_z(z)
        return out


def test_arrays_of_unequal_shape_are_several_inputs() -> None:
    x, z = np.ones((6, 4), np.float32), np.ones((6, 2), np.float32)
    given = (x, z), (torch.tensor(x), torch.tensor(z))
    losses = []
    for inputs in given:
        torch.manual_seed(0)
        clients = prefed.FederatedData([(inputs, np.arange(6) % 3)] * 2)
        run = prefed.simulate(
            prefed.FedAvg(client_lr=0.1), TwoInputs(), clients, rounds=2, local_steps=2,
            batch_size=2, progress=False,
        )  # fmt: skip
        losses.append(run.history[-1]["train_loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("metric", ["f1", "accuracy"])
def test_metrics_of_labels_are_not_for_numbers(metric: str) -> None:
    x = torch.randn(6, 4)
    data = prefed.FederatedData([(x, 3 * x[:, :1])] * 2, test=(x, 3 * x[:, :1]))
    with pytest.raises(prefed.PrefedError, match="count labels, and the targets are numbers"):
        prefed.simulate(
            prefed.FedAvg(client_lr=0.1), nn.Linear(4, 1), data, rounds=1, local_steps=1,
            batch_size=2, loss="mse", metrics=[metric], progress=False,
        )  # fmt: skip


def test_options_of_groups_are_near_those_that_are_meant() -> None:
    with pytest.raises(
        prefed.PrefedError, match='lr_scal: unknown option; did you mean "lr_scale"'
    ):
        prefed.FedAvg(groups=[{"params": "x", "lr_scal": 0.1}])
