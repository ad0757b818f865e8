"""Parts of a model that stay with each client: against plain PyTorch, in every engine, resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import prefed
from prefed.core.flat_model import personal_names
from prefed.experiments.config import load
from prefed.models.lora import Adapted
from tests.helpers.adapters import adapted, base
from tests.helpers.oracles.modules import check_same, federated
from tests.helpers.problems import SIZES, tiny_data
from tests.helpers.run_folders import whole_and_resumed

LR, STEPS, COHORT = 0.1, 3, 2


def conv_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Unflatten(1, (1, SIZES[0])), nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4),
        nn.ReLU(), nn.Flatten(), nn.LayerNorm(4 * SIZES[0]), nn.Linear(4 * SIZES[0], SIZES[2]),
    ).double()  # fmt: skip


def mlp() -> nn.Sequential:
    torch.manual_seed(4)
    layers = [nn.Linear(SIZES[0], 6), nn.Tanh(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, SIZES[2])]
    return nn.Sequential(*layers).double()


def simulate(algorithm: prefed.Algorithm, model: nn.Module, **options: Any) -> prefed.Result:
    settings: dict[str, Any] = {"rounds": 3, "local_steps": STEPS, "batch_size": None,
                                "clients_per_round": COHORT, "device": "cpu"}  # fmt: skip
    return prefed.simulate(algorithm, model, tiny_data(), **settings | options)


CASES: dict[str, tuple[prefed.Algorithm, Any, str, dict[str, Any]]] = {
    "FedBN": (prefed.FedBN(client_lr=LR), conv_net, "25", {"statistics": "keep"}),
    "FedPer": (prefed.FedPer(client_lr=LR), mlp, "4", {}),
    "FedPer, conv": (prefed.FedPer(client_lr=LR, client_momentum=0.5), conv_net, "6",
                     {"momentum": 0.5}),
    "FedPer, first layer": (prefed.FedPer(client_lr=LR, personal=("0.*",)), mlp, "0", {}),
    "FedRep": (prefed.FedRep(client_lr=LR, personal_steps=1), mlp, "4", {"personal_steps": 1}),
    "FedRep, momentum": (
        prefed.FedRep(client_lr=LR, personal_steps=2, client_momentum=0.9, personal=("[24].*",)),
        mlp, "24", {"personal_steps": 2, "momentum": 0.9},
    ),
    "FedRep, conv": (prefed.FedRep(client_lr=LR, statistics="keep", personal=("@last", "@norm")),
                     conv_net, "256", {"personal_steps": 1, "statistics": "keep"}),
    "FedPer, aligned": (prefed.FedPer(client_lr=LR, align=0.4), mlp, "4", {"align": 0.4}),
    "FedRep, aligned": (prefed.FedRep(client_lr=LR, align=0.4, align_form="mixed"), mlp, "4",
                        {"personal_steps": 1, "align": 0.4, "mixed": True}),
}  # fmt: skip


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("case", CASES)
def test_against_plain_pytorch(case: str, engine: str) -> None:
    algorithm, make, layers, options = CASES[case]
    model, data = make(), tiny_data()
    result = simulate(algorithm, model, engine=engine)
    cohorts = [r["cohort"] for r in result.history]
    samples = [data.client(i).all() for i in range(len(data))]
    wanted, used = federated(
        model, samples, cohorts, LR, STEPS, personal=lambda name: name[0] in layers, **options
    )
    check_same(result.model, wanted)
    for client, module in used.items():
        check_same(result.client_model(client), module)
    took_part = {client for cohort in cohorts for client in cohort}
    assert took_part == result.kept.keys()
    assert len(took_part) < len(used)  # some have nothing of their own yet
    shared = sum(p.numel() for n, p in model.named_parameters() if n[0] not in layers)
    sent = 8 * shared
    if options.get("statistics", "average") == "average":
        sent += 8 * sum(b.numel() for b in model.buffers() if b.is_floating_point())
    assert {r["bytes_up"] for r in result.history} == {COHORT * sent}
    down = sent + (8 * shared if "align" in options else 0)
    assert {r["bytes_down"] for r in result.history} == {COHORT * down}


ANY: list[prefed.Algorithm] = [
    prefed.PreFed(client_lr=0.005, personal=("4.*",)),
    prefed.PreFed(client_lr=0.005, momentum="keep", personal=("4.*",), upload="topk(0.2)"),
    prefed.PreFed(client_lr=0.005, momentum="derived", personal=("4.*",), clip_norm=1.0),
    prefed.PreFedOpt(client_lr=0.05, personal=("4.*",)),
    prefed.SCAFFOLD(client_lr=0.05, personal=("4.*",)),
    prefed.FedProx(client_lr=0.05, personal=("4.*",)),
    prefed.AdaAlter(client_lr=0.01, personal=("4.*",)),
    prefed.LocalAdam(client_lr=0.01, personal=("4.*",), state="keep"),
    prefed.PreFed(client_lr=0.005, momentum="derived", personal=("4.*",), align=0.3,
                  align_form="mixed", decoupled_weight_decay=0.1),
]  # fmt: skip


@pytest.mark.parametrize("algorithm", ANY, ids=lambda a: type(a).__name__)
def test_any_algorithm_in_every_engine(algorithm: prefed.Algorithm) -> None:
    one = simulate(algorithm, mlp(), engine="sequential", batch_size=4)
    two = simulate(algorithm, mlp(), engine="sequential", batch_size=4, workers=2)
    other = simulate(algorithm, mlp(), engine="vectorised", batch_size=4)
    for client in range(6):
        check_same(two.client_model(client), one.client_model(client), 0)
        check_same(other.client_model(client), one.client_model(client), 1e-9)
    assert one.server.weights.numel() == 64
    heads = [one.client_model(i)[4].weight for i in sorted(one.kept)]  # type: ignore[index]
    assert all(not torch.equal(heads[0], head) for head in heads[1:])


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")
def test_parts_in_turns_compiled() -> None:
    algorithm = prefed.FedRep(client_lr=LR, client_momentum=0.5, personal_steps=2)
    one, other = (
        simulate(algorithm, mlp(), engine=engine, batch_size=4)
        for engine in ("sequential", "compiled")
    )
    for client in range(6):
        check_same(other.client_model(client), one.client_model(client), 1e-9)


def test_the_state_of_the_personal_part_stays_with_it() -> None:
    """A cohort of one: the client and the server together are one client that trains alone, so
    where a part of it lives makes no difference."""
    data = prefed.FederatedData([tiny_data().client(0).all()])
    options: dict[str, Any] = {"rounds": 4, "local_steps": 3, "batch_size": 4, "device": "cpu"}
    for more in ({"momentum": "average"}, {"momentum": "keep"}, {"momentum": "derived"}):
        apart, whole = (
            prefed.simulate(
                prefed.PreFed(client_lr=0.005, personal=p, **more), mlp(), data, **options
            )
            for p in (("2.*", "4.*"), ())
        )
        check_same(apart.client_model(0), whole.model, 1e-12)


@pytest.mark.parametrize("name", ["fedbn", "fedrep", "prefed"])
def test_a_resumed_run_has_the_same_bits(name: str, tmp_path: Path) -> None:
    changes = ["rounds=4", "local_steps=2", "clients_per_round=3", "device=cpu",
               "engine=sequential", f"algorithm={name}", "model=resnet8", "model.width=2",
               "model.norm=batch", "data.split.clients=5"]  # fmt: skip
    if name == "prefed":
        changes += ['personal=["head.*"]', "upload=topk(0.2)"]
    config = load("digits-noniid", changes)
    whole, cut = whole_and_resumed(config, tmp_path)
    for client in range(5):
        check_same(cut.client_model(client), whole.client_model(client), 0)
    assert [r["train_loss"] for r in cut.history] == [r["train_loss"] for r in whole.history]


def test_names() -> None:
    net = conv_net()
    assert personal_names(net, ["@norm"]) == ["2.weight", "2.bias", "5.weight", "5.bias"]
    assert personal_names(net, ["@last", "1.b*"]) == ["1.bias", "6.weight", "6.bias"]
    for names in (["@norm"], ["@norm", "@last"]):
        with pytest.raises(prefed.PrefedError, match=r"'@norm' finds no .* there are 0\.weight,"):
            personal_names(mlp(), names)
    with pytest.raises(prefed.PrefedError, match=r"personal: 'head' names no .* it has 0\.weight,"):
        personal_names(mlp(), ["head"])
    with pytest.raises(prefed.PrefedError, match="share some"):
        personal_names(mlp(), ["*"])


class TinyRMSNorm(nn.Module):
    """As models of Hugging Face have it: torch's class is not among its bases."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * self.weight


class LayerNorm2d(TinyRMSNorm):
    pass


class Unlike(LayerNorm2d):
    pass


@pytest.mark.parametrize("norm", [TinyRMSNorm, LayerNorm2d, Unlike, nn.RMSNorm])
def test_normalisation_layers_by_their_names(norm: type[nn.Module]) -> None:
    model = mlp()
    model[1] = norm(6).double()
    result = simulate(prefed.FedBN(client_lr=LR), model, clients_per_round=None)
    kept = [result.client_model(client).state_dict() for client in range(6)]
    assert not torch.equal(kept[0]["1.weight"], kept[1]["1.weight"])
    assert torch.equal(kept[0]["0.weight"], kept[1]["0.weight"])


def test_norms_that_are_frozen_or_have_statistics_alone() -> None:
    """Frozen ones would be FedAvg; without parameters there may be statistics that stay."""
    frozen = conv_net()
    frozen[5] = nn.Identity()
    frozen[2].requires_grad_(False)
    assert personal_names(frozen, ["@norm"]) == []
    frozen[2] = nn.GroupNorm(2, 4).requires_grad_(False)
    with pytest.raises(prefed.PrefedError, match="no normalisation layer that is trained"):
        personal_names(frozen, ["@norm"])


def test_the_last_layer_with_parametrizations() -> None:
    model = mlp()
    weight_norm(model[4])
    names = personal_names(model, ["@last"])
    assert names == [name for name, _ in model.named_parameters() if name[0] == "4"]
    assert "4.bias" in names
    result = simulate(prefed.FedPer(client_lr=LR), model, clients_per_round=None)
    kept = [result.client_model(client).state_dict() for client in (0, 1)]
    same = {name for name in kept[0] if torch.equal(kept[0][name], kept[1][name])}
    assert same == {name for name in kept[0] if name[0] != "4"}


def test_a_last_layer_that_is_none() -> None:
    tied = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False))
    tied[2].weight = tied[0].weight
    with pytest.raises(prefed.PrefedError, match=r"'@last' would be 2, which shares 2\.weight"):
        personal_names(tied, ["@last"])
    assert personal_names(tied, ["1.*"]) == ["1.weight", "1.bias"]
    model = nn.Sequential(Adapted(nn.Linear(6, 6), 2, 4.0), nn.Linear(6, 3))
    assert personal_names(model, ["@last"]) == ["1.weight", "1.bias"]
    with pytest.raises(prefed.PrefedError, match=r"0\.lora_B, a part of an adapter"):
        personal_names(model[:1], ["@last"])


def test_heads_of_hugging_face() -> None:
    model = adapted()
    assert all("classifier" in name for name in personal_names(model, ["@last"]))
    with pytest.raises(prefed.PrefedError, match="no normalisation layer that is trained"):
        personal_names(model, ["@norm"])
    norms = personal_names(base(), ["@norm"])
    assert len(norms) == 10
    assert all("LayerNorm" in name for name in norms)


@pytest.mark.parametrize(("algorithm", "what"), [
    (prefed.PreFedSync(personal=("4.*",)), "average every gradient"),
    (prefed.PreFed(shape="kronecker", personal=("4.*",)), 'shape="diagonal"'),
    (prefed.PreFed(bias_correction=True, personal=("4.*",)), "bias_correction=False"),
])  # fmt: skip
def test_what_has_no_meaning_is_refused(algorithm: prefed.Algorithm, what: str) -> None:
    with pytest.raises(prefed.PrefedError, match=what):
        simulate(algorithm, mlp())


@pytest.mark.parametrize(("steps", "enough"), [
    ({"local_steps": 3}, {"local_steps": 4}),
    ({"local_steps": None, "local_epochs": 3}, {"batch_size": 8}),  # the largest has 15 samples
], ids=["steps", "epochs"])  # fmt: skip
def test_turns_that_never_come_to_what_is_shared(
    steps: dict[str, Any], enough: dict[str, Any]
) -> None:
    algorithm = prefed.FedRep(personal_steps=3)
    with pytest.raises(prefed.PrefedError, match=r"personal_steps: clients take .*3 local steps"):
        simulate(algorithm, mlp(), **steps)
    simulate(algorithm, mlp(), rounds=1, **steps | enough)


def test_a_single_name_is_a_list_of_one() -> None:
    assert prefed.FedAvg(personal="@last") == prefed.FedAvg(personal=["@last"])
    assert prefed.FedPer(personal="4.*") == prefed.FedPer(personal=["4.*"])
    assert prefed.FedAvg(freeze="0.*") == prefed.FedAvg(freeze=["0.*"])
    assert prefed.PreFedS(plain="head.*").plain == ("head.*",)
    assert prefed.FedMuon(adam="head.*").adam == ("head.*",)
    made = load("digits-iid", ["algorithm=fedavg", "client_lr=1", "personal=@last"])
    assert made.make_algorithm().personal == ("@last",)
    with pytest.raises(prefed.PrefedError, match=r"FedAvg\.freeze: should be a list of names, not"):
        prefed.FedAvg(freeze=3)


def test_a_client_that_is_not_there() -> None:
    result = simulate(prefed.FedPer(), mlp(), rounds=1)
    with pytest.raises(prefed.PrefedError, match="client: 6 is none of the 6"):
        result.client_model(6)
