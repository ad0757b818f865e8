"""The message of a strategy, as `local_train` and its like in a ClientApp read it."""

import json
from collections.abc import Iterator, Mapping
from glob import escape
from typing import Any, cast

from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn

from prefed.algorithms import ALGORITHMS, Algorithm
from prefed.core.errors import PrefedError
from prefed.core.flat_model import FlatModel
from prefed.core.layout import Layout
from prefed.flower import protocol as p
from prefed.flower.kept_state import NEVER
from prefed.flower.statedict import StateDict
from prefed.flower.wire import unpack
from prefed.rules import Covariance, State
from prefed.training.admission import broadcast
from prefed.training.checks import check_parts
from prefed.training.server_state import Server

NAMES = (
    "send arrays under the model's own names: model.state_dict(), or, of a model that is frozen in "
    "part, {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}, with the "
    "buffers that training changes"
)


class Asked:
    """A strategy's message, taken apart."""

    def __init__(self, content: RecordDict) -> None:
        arrays = [r for key, r in content.array_records.items() if key != p.STATE]
        configs = [r for r in content.config_records.values() if p.ALGORITHM in r]
        if len(arrays) != 1 or len(configs) != 1:
            raise PrefedError("the message is not from a strategy of prefed.flower")
        self.arrays, (self.config,) = arrays[0], configs
        self.state = content.get(p.STATE, ArrayRecord())
        self.private = bool(self.config.get(p.PRIVATE, False))
        self.mean = str(self.config.get(p.MEAN, ""))
        self.question = bool(self.config.get(p.QUESTION, False))
        self.round = int(self.config["server-round"]) - 1  # type: ignore[arg-type]
        self.after = int(self.config.get(p.AFTER, NEVER))  # type: ignore[arg-type]
        buffers, personal = (cast(Any, self.config.get(k, ())) for k in (p.BUFFERS, p.PERSONAL))
        self.shape = StateDict(self.arrays, list(buffers), [escape(name) for name in personal])

    def load(self, model: nn.Module, algorithm: Algorithm) -> tuple[FlatModel, int]:
        """The model with the arrays, as flat vectors, and the size of the part that is shared.
        What nobody trains may be left out of the arrays: the model has it."""
        found = model.load_state_dict(self.arrays.to_torch_state_dict(), strict=False)
        if found.unexpected_keys:
            raise PrefedError(
                f"initial_arrays: the model has no {found.unexpected_keys[0]!r}; {NAMES}"
            )
        flat = FlatModel(model.train(), algorithm.personal)
        self.check_whole(flat)
        check_parts(algorithm, flat)
        trained = {entry.name for entry in flat.layout.entries}
        stay = trained - {entry.name for entry in flat.shared.entries}
        if other := sorted(stay ^ (trained & {*self.shape.personal})):
            raise PrefedError(
                f"personal: the server, which has the names of parameters and no model, and this "
                f"client do not agree on {', '.join(other)}; name parameters in place of @norm "
                f"and @last"
            )
        return flat, flat.shared.size

    def check_whole(self, flat: FlatModel) -> None:
        """Raise if what training changes is missing from the arrays."""
        changing = [*(entry.name for entry in flat.layout.entries), *flat.buffers.changing]
        if missing := [name for name in changing if name not in self.arrays]:
            raise PrefedError(
                f"initial_arrays: they lack {', '.join(missing)}, which training changes; {NAMES}"
            )

    def order(self, algorithm: Algorithm, model: nn.Module, layout: Layout) -> "Order":
        """From the server's vectors to those of this layout of the model; refused if the server
        would count what the model does not train."""
        order = Order(self.shape.layout, layout, _tied(model, layout))
        others, twice = order.untrained(), [n for n in order.untrained() if n in order.tied]
        leave = "leave frozen parameters, and second names of tied ones, out of initial_arrays"
        if self.private and others:
            raise PrefedError(
                f"privacy: the server would add noise to {', '.join(others)}, which this model "
                f"does not train under that name; {leave}"
            )
        if others and algorithm.server_rule().counts_all:
            raise PrefedError(
                f"{type(algorithm).__name__}: with these options the server's step is worked out "
                f"of all weights together, and it would count {', '.join(others)}, which this "
                f"model does not train under that name; {leave}"
            )
        if self.mean and twice:
            raise PrefedError(
                f"{self.mean}: the distances between clients would count {', '.join(twice)}, which "
                f"are tied to other weights of this model, once more; {leave}"
            )
        return order

    def algorithm(self) -> Algorithm:
        options = json.loads(str(self.config[p.ALGORITHM]))
        name = options.pop("name")
        if any(":" in text for text in _texts(options.get("server_lr"))):
            del options["server_lr"]  # a function of the server's own, which clients do not need
        chosen = [name, *(value for key, value in options.items() if key != "personal")]
        if own := [text for text in _texts(chosen) if ":" in text]:
            # A message must not choose what is imported here.
            raise PrefedError(f"the server runs {own[0]}: hand the algorithm to local_train")
        return ALGORITHMS.get(name)(**options)

    def shared(self, algorithm: Algorithm) -> State:
        """What the server shares besides the weights, in the order of its own vectors."""
        weights, buffers = self.shape.read(self.arrays)
        server = Server.start(algorithm, self.shape.layout, weights, buffers)
        specs = broadcast(algorithm, server)
        return unpack(self.state, {name: specs[name] for name in server.shared})

    def vectors(self) -> State:
        """The same for a training loop that is not `local_train`, whose steps are those of
        prefed.optim.Covariance."""
        if self.shape.personal:
            raise PrefedError("personal: parts that stay with a client need local_train")
        algorithm = self.algorithm()
        if algorithm.align:
            raise PrefedError("align: moving along the mean change needs local_train")
        if any(policy.kept_between for policy in algorithm.sharing().values()):
            raise PrefedError('between="keep": state that stays with a client needs local_train')
        fields = type(algorithm).model_fields
        for option in ("groups", "clip_norm", "decoupled_weight_decay", "state_dtype"):
            if getattr(algorithm, option) != fields[option].default:
                raise PrefedError(f"{option}: is carried out by local_train alone")
        shared, rule = self.shared(algorithm), algorithm.client_rule()
        if shared and (type(rule) is not Covariance or rule.tau_relative is not None):
            raise PrefedError(
                f"{type(algorithm).__name__}: with these options the client rule is another than "
                f"that of prefed.optim.Covariance, and needs local_train"
            )
        return shared


def _texts(value: Any) -> Iterator[str]:
    """All texts in lists and tables."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _tied(model: nn.Module, layout: Layout) -> dict[str, str]:
    """More names of the parameters in the layout, and those that they have there."""
    names = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    found = {name: names[id(p)] for name, p in every if names[id(p)] != name}
    known = {entry.name for entry in layout.entries}
    return {other: name for other, name in found.items() if name in known}


class Order:
    """From the server's vector, in the order of the state dict, to the model's and back. The model
    may have frozen parameters, which it does not train, tied ones, which the state dict has under
    several names, and another memory layout."""

    def __init__(self, server: Layout, model: Layout, tied: Mapping[str, str]) -> None:
        """tied   more names of parameters, and the one that the model's layout has"""
        self.server, self.model, self.tied = server, model, tied
        shapes = {entry.name: entry.shape for entry in server.entries}
        for entry in model.entries:
            if shapes.get(entry.name) != entry.shape:
                raise PrefedError(
                    f"the arrays of the server do not fit the model: {entry.name}, which is "
                    f"trained, should be parameters {[*entry.shape]} there; {NAMES}"
                )
        self.same = server == model

    def to_model(self, vector: Tensor) -> Tensor:
        if self.same or vector.numel() == 1:
            return vector.clone()
        self._only_vectors(vector)
        result = vector.new_empty(self.model.size)
        there = self.server.views(vector)
        for name, view in self.model.views(result).items():
            view.copy_(there[name])
        return result

    def to_server(self, vector: Tensor, received: Tensor) -> Tensor:
        if self.same or vector.numel() == 1:
            return vector
        result = received.clone()
        there = self.server.views(result)
        here = self.model.views(vector)
        for name, view in (here | {other: here[name] for other, name in self.tied.items()}).items():
            there[name].copy_(view)
        return result

    def untrained(self) -> list[str]:
        """Parameters of the server, one for each name, that the model does not train: frozen ones,
        and more names of tied ones."""
        trained = {entry.name for entry in self.model.entries}
        return [entry.name for entry in self.server.entries if entry.name not in trained]

    def _only_vectors(self, vector: Tensor) -> None:
        if tuple(vector.shape) != (self.server.size,):
            others = ", ".join(self.untrained())
            ask = f"; not trained under their names: {others}; leave them out of initial_arrays"
            raise PrefedError(
                'state that is not one number for each weight (shape="full", the means of '
                "FedAdamW) needs a model without frozen or tied parameters, in the memory layout "
                f"of the server's{others and ask}"
            )
