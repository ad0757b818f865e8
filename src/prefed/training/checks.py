"""What is looked at before the first round: whether settings fit the data, and whether an
algorithm's rules, its sharing policy and its options can work with the model."""

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from prefed.algorithms import Algorithm, Policy
from prefed.algorithms.personal import FedRep
from prefed.algorithms.sharing import NO_MEAN
from prefed.codecs import codec
from prefed.core.errors import PrefedError, shown
from prefed.core.flat_model import FlatModel
from prefed.core.layout import Layout
from prefed.core.machine import torch_threads
from prefed.core.patterns import named
from prefed.core.schedule import Warmup, at
from prefed.data import FederatedData
from prefed.rules import Rule
from prefed.rules.grouped import check_groups
from prefed.rules.halved import check_halved
from prefed.rules.rule import BLOCK, OTHER
from prefed.rules.wrapped import MEAN_CHANGE
from prefed.training.block_state import shared_fields
from prefed.training.other_gradients import check_other
from prefed.training.server_state import (
    BUFFERS,
    LAST,
    LOCAL_STEPS,
    LOST,
    PERSONAL,
    STEPS,
    policies,
    policy,
)
from prefed.training.settings import Settings
from prefed.training.task import Task
from prefed.training.task_trial import try_out

TRIED = 100
"""Steps that a rule may leave the weights as they are."""
IN_BLOCK = 3
"""Steps that a block of two clients takes, to be compared with each alone."""
RESERVED = {
    "weights",
    BUFFERS,
    STEPS,
    LOCAL_STEPS,
    PERSONAL,
    LAST,
    LOST,
    MEAN_CHANGE,
    OTHER,
    "mean",
}
"""Names of what is sent or kept, or is handed to rules, beside the fields of a rule."""


def check_settings(algorithm: Algorithm, data: FederatedData, settings: Settings) -> None:
    """Compare what a run is given, before anything is made of it."""
    if not isinstance(algorithm, Algorithm):
        named = f"the class {algorithm.__name__}" if isinstance(algorithm, type) else ""
        raise PrefedError(f"algorithm: should be an Algorithm such as prefed.FedAvg(), "
                          f"not {named or type(algorithm).__name__}")  # fmt: skip
    if not isinstance(data, FederatedData):
        raise PrefedError(
            f"data: should be a prefed.FederatedData, as prefed.FederatedData([(x, y), ...]), "
            f"not {type(data).__name__}"
        )
    if settings.clients_per_round is not None and settings.clients_per_round > len(data):
        raise PrefedError(
            f"clients_per_round: {settings.clients_per_round} is more than the "
            f"{len(data)} clients there are"
        )
    if isinstance(settings.weighting, list) and len(settings.weighting) != len(data):
        raise PrefedError(
            f"weighting: has {len(settings.weighting)} weights, but there are "
            f"{len(data)} clients; give one for each"
        )
    rate, steps = algorithm.client_lr, settings.local_steps
    if isinstance(rate, Warmup) and rate.steps and steps and rate.local_steps != steps:
        raise PrefedError(
            f"client_lr: the warm-up counts {rate.local_steps} local steps a round, but the run "
            f"has {steps}; give both the same local_steps"
        )
    if settings.quorum > (asked := settings.clients_per_round or len(data)):
        raise PrefedError(f"quorum: {settings.quorum} is more than the {asked} of a cohort")
    if settings.local_epochs is not None and algorithm.client_rule().lockstep:
        raise PrefedError(
            f"local_epochs: clients of {type(algorithm).__name__} meet in every step, so all "
            f"of them take equally many; set local_steps"
        )
    if isinstance(algorithm, FedRep):
        _check_turns(algorithm, data, settings)


def _check_turns(algorithm: FedRep, data: FederatedData, settings: Settings) -> None:
    """There has to be a client whose steps come to what is shared."""
    first, steps = algorithm.personal_steps, settings.local_steps
    if steps is not None:
        enough, taken, more = steps > first, f"{steps}", "more local_steps"
    else:
        enough = any(settings.steps(data.size(client)) > first for client in range(len(data)))
        taken, more = f"at most {first}", "more local_epochs, a smaller batch_size"
    if enough:
        return
    raise PrefedError(
        f"personal_steps: clients take {taken} local steps a round, and the first {first} move the "
        f"personal part alone, so that nothing that is shared is trained; set {more} or fewer "
        f"personal_steps"
    )


def check_task(algorithm: Algorithm, task: Task, data: FederatedData, settings: Settings) -> None:
    """Try the algorithm, the model and the data on each other."""
    flat = task.flat
    with torch_threads(1):
        try_out(task, data)
        check_single_samples(task, settings, data)
        check_sharing(algorithm, flat.shared)
        check_parts(algorithm, flat)
        check_other(algorithm, task, data)
        check_in_place(algorithm, flat, settings.steps(len(data.client(0))))


def check_single_samples(task: Task, settings: Settings, data: FederatedData) -> None:
    """BatchNorm takes no statistics of a single number: name a client that would come to that."""
    flat = task.flat
    if not any(isinstance(layer, _BatchNorm) for layer in flat.module.modules()):
        return
    clients = (c for c in range(len(data)) if 1 in settings.batch_sizes(data.size(c)))
    if (client := next(clients, None)) is None:
        return
    training, statistics = flat.module.training, flat.read_buffers()
    try:
        flat.module.train()
        with torch.no_grad(), torch.random.fork_rng(), task.seeded(0):
            task.forward(data.client(client).take(torch.arange(1))[0])
    except ValueError as error:
        raise PrefedError(
            f"clients[{client}]: it has batches of one sample, and BatchNorm takes no statistics "
            f"of one; {_instead(settings, data.size(client))}"
        ) from error
    finally:
        flat.module.train(training)
        flat.write_buffers(statistics, torch.zeros((), dtype=torch.int64))


def _instead(settings: Settings, samples: int) -> str:
    """What lets no batch of such a client have one sample."""
    if samples == 1:
        return "leave out clients with a single sample, or use GroupNorm"
    if 1 not in settings.model_copy(update={"micro_batch": None}).batch_sizes(samples):
        return "set another micro_batch"
    return "set drop_last = true (with local_epochs), or another batch_size"


def check_in_place(algorithm: Algorithm, flat: FlatModel, steps: int) -> None:
    """Try both rules on copies of the weights, as a client and the server hold them."""
    client_lr, server_lr = at(algorithm.client_lr, 0), at(algorithm.server_lr, 0)
    whole, shared, weights = flat.layout, flat.shared, flat.weights
    rule = algorithm.client_rule().fit(whole)
    _try(rule, whole, weights[None], client_lr, min(steps, TRIED))
    if not type(rule).__module__.startswith("prefed."):
        _try_block(rule, whole, weights)
    _try(algorithm.server_rule().fit(shared), shared, weights[: shared.size], server_lr, TRIED)


def _try_block(rule: Rule, layout: Layout, weights: Tensor) -> None:
    """A rule takes a block of clients as it takes each of them alone: sums over all numbers, as
    g.norm() is one, would mix them, and each engine would train another model."""
    if rule.lockstep:
        return
    generator = torch.Generator(weights.device).manual_seed(0)
    g = weights.new_empty(IN_BLOCK, 2, len(weights)).normal_(generator=generator)
    g[:, 1] *= 5

    def moved(rows: slice) -> Tensor:
        w = weights.repeat(2, 1)[rows]
        state = {name: field.new(weights, len(w)) for name, field in rule.fields(layout).items()}
        rule.begin(w, state)
        for k, each in enumerate(g):
            if rule.other(k) is not None:
                state[OTHER] = each[rows].clone()
            rule.step(w, each[rows].clone(), state, 1e-2, k)
            state.pop(OTHER, None)
        return w - weights

    together, alone = moved(slice(0, 2)), torch.cat([moved(slice(0, 1)), moved(slice(1, 2))])
    error = torch.linalg.vector_norm(together - alone, dim=1)
    if not bool((error <= 1e-2 * torch.linalg.vector_norm(alone, dim=1)).all()):
        raise PrefedError(
            f"{type(rule).__name__}.step: two clients in a block (2, d) move otherwise than each "
            f"alone; a rule works on rows, as g.norm(dim=-1, keepdim=True) does and g.norm() not"
        )


def _try(rule: Rule, layout: Layout, weights: Tensor, lr: float, steps: int) -> None:
    """A rule's steps must change the weights and the state that they are given: with new tensors
    in their place nothing would be trained. The weights may be too large for a small step to be
    seen, so zeros are tried as well. Of a rule that works block by block, one block is tried."""
    lr = min(lr or 1e-3, 1.0)  # what is too large is told elsewhere
    name, clients = type(rule).__name__, len(weights) if weights.dim() == 2 else None
    if rule.in_parts and all(f.shape == (layout.size,) for f in rule.fields(layout).values()):
        weights = weights[..., :BLOCK]
        layout = Layout.of([("first", weights.reshape(-1))])
    for zero in (False, True):
        start = torch.zeros_like(weights) if zero else weights
        w = start.clone()
        state = {n: field.new(weights, clients) for n, field in rule.fields(layout).items()}
        given = dict(state)
        for k in [*range(steps)] * 2:  # in the first round a rule may only gather what it needs
            if k == 0:
                rule.begin(w, state)
            g = torch.full_like(w, 0.5)
            if rule.lockstep:
                state["mean"] = g[0].clone()
            if rule.other(k) is not None:
                state[OTHER] = g.clone()
            rule.step(w, g, state, lr, k)
            if not torch.equal(w, start):
                break
        replaced = [n for n, value in given.items() if state.get(n) is not value]
        if replaced:
            raise PrefedError(
                f"{name}.step: it puts another tensor into state[{replaced[0]!r}]; a rule changes "
                f"its state in place, as state[{replaced[0]!r}].mul_(beta).add_(g) does"
            )
        rule.finish(w, state, lr, k + 1)
        if not torch.equal(w, start):
            return
    raise PrefedError(
        f"{name}.step: it leaves the weights as they are; a rule changes w in place: "
        f"w.sub_(lr * g) does, w = w - lr * g makes another tensor and trains nothing"
    )


def check_parts(algorithm: Algorithm, flat: FlatModel) -> None:
    """Refuse what has no meaning for a part of the weights: one that stays with clients, or one
    that is trained otherwise than the rest."""
    rule = algorithm.client_rule().fit(flat.layout)
    check_groups(algorithm.groups, flat.layout, rule)
    names = [entry.name for entry in flat.layout.entries]
    for option, patterns in (rule.patterns() | algorithm.server_rule().patterns()).items():
        for pattern in patterns:
            named(f"{type(algorithm).__name__}.{option}", pattern, names)
    if algorithm.needs_one_tau and any(group.tau is not None for group in algorithm.groups):
        raise PrefedError(
            f"groups: {type(algorithm).__name__} needs tau on the server as well, and there it is "
            f"one number; leave tau out of groups"
        )
    if algorithm.state_dtype != "weights":
        check_halved(rule, flat.layout)
        if any(group.tau is not None for group in algorithm.groups):
            raise PrefedError("state_dtype: bfloat16 cannot stand beside groups with a tau")
    if algorithm.groups and algorithm.in_turns(rule, flat.shared.size) is not rule:
        name = type(algorithm).__name__
        raise PrefedError(
            f"{name}.groups: its parts move in turns, which groups do not; take FedPer"
        )
    _check_personal(algorithm, flat)


def _check_personal(algorithm: Algorithm, flat: FlatModel) -> None:
    if flat.shared.size == flat.layout.size:
        return
    rule, name = algorithm.client_rule(), type(algorithm).__name__
    if rule.lockstep:
        raise PrefedError(f"{name}.personal: its clients average every gradient, all of it")
    if not rule.elementwise:
        raise PrefedError(
            f"{name}.personal: its client rule joins coordinates, which cannot stay in part; "
            + (
                'take shape="diagonal"'
                if "shape" in type(algorithm).model_fields
                else "take PreFed"
            )
        )
    fields = rule.fields(flat.layout)
    chosen = policies(algorithm, fields)
    for field in sorted(fields.keys() - {*shared_fields(chosen, fields, flat.layout)}):
        if chosen[field].comes_down:
            raise PrefedError(
                f"{name}.personal: {field} is not a number for each weight but for many of them, "
                f"and those that stay have seen other steps than those that are averaged; set "
                f"bias_correction=False where there is such an option, or take another algorithm"
            )


def check_sharing(algorithm: Algorithm, layout: Layout) -> None:
    """Build both rules and compare the sharing policy with the fields they have."""
    fields = algorithm.client_rule().fields(layout)
    algorithm.server_rule().fields(layout)
    if algorithm.server_rule().other(0) is not None:
        raise PrefedError(
            f"{type(algorithm).__name__}: its server rule needs a gradient of samples, which only "
            f"clients have; let it be the client rule"
        )
    for name in RESERVED & fields.keys():
        raise PrefedError(
            f"{type(algorithm).__name__}: the client rule has a field {name!r}, which is the name "
            f"of something else that is sent or kept; give it another"
        )
    kind = type(algorithm)
    derives = kind.derive is not Algorithm.derive or kind.after_mean is not Algorithm.after_mean
    for name, given in algorithm.sharing().items():
        if not isinstance(given, Policy):
            raise PrefedError(
                f"{type(algorithm).__name__}.sharing: {name} is {shown(given)}; give a policy, as "
                f"prefed.average(), prefed.keep() or prefed.reset()"
            )
        if given.kind == "derived" and not derives:
            raise PrefedError(
                f"{type(algorithm).__name__}.sharing: {name} is derived, and the algorithm has no "
                f"`derive` that says from what"
            )
        if name not in fields and not name.endswith("_mass"):
            raise PrefedError(
                f"{type(algorithm).__name__}.sharing: the client rule has no state {name!r}; "
                f"it has {', '.join(fields) or 'none'}"
            )
        if given.kind == "average" and name in fields and fields[name].cache:
            raise PrefedError(f"{type(algorithm).__name__}.sharing: {name}: {NO_MEAN}")
    if not codec(algorithm.upload).signed:
        raise PrefedError(
            f"{type(algorithm).__name__}.upload: {algorithm.upload} is for values that are never "
            f"negative, such as P; changes of weights are, so take int8 or bfloat16"
        )
    for name, field in fields.items():
        chosen = policy(algorithm, name).codec
        if chosen != "exact" and field.shape != (layout.size,):
            raise PrefedError(
                f"{type(algorithm).__name__}.sharing: codec {chosen} is for vectors as long as "
                f"the weights, and {name} has the shape {list(field.shape)}; take exact"
            )
        if not codec(chosen).signed and not field.nonnegative:
            raise PrefedError(
                f"{type(algorithm).__name__}.sharing: codec {chosen} is for values that are never "
                f"negative, such as P, and {name} has both signs; take int8 or bfloat16"
            )
        if codec(chosen).feedback:
            raise PrefedError(
                f"{type(algorithm).__name__}.sharing: codec {chosen} needs error feedback, which "
                f"is for the change of the weights alone; {name} cannot have it"
            )
