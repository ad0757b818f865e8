"""What is looked at before a strategy begins."""

from typing import TYPE_CHECKING

from prefed.algorithms import Algorithm
from prefed.core.errors import PrefedError
from prefed.flower.arrivals import refuse_lockstep
from prefed.training.means.choice import Means
from prefed.training.privacy_setting import Privacy

if TYPE_CHECKING:
    from prefed.flower.strategy import Strategy


def check(strategy: "Strategy") -> Means:
    """Raise if an option is wrong; the means that the others ask for."""
    algorithm = strategy.algorithm
    if not isinstance(algorithm, Algorithm):
        raise PrefedError(f"algorithm: should be an Algorithm, not {type(algorithm).__name__}")
    refuse_lockstep(algorithm)
    if algorithm.client_rule().other(0) is not None:
        raise PrefedError(
            f"{type(algorithm).__name__}: its clients need more than the gradients of their "
            f"steps, which a Flower app of one's own does not have: prefed deploy"
        )
    if algorithm.state_dtype != "weights":
        raise PrefedError(
            f"{type(algorithm).__name__}.state_dtype: its random numbers have the run's seed, "
            f"which a Flower app of one's own does not know: prefed deploy"
        )
    if algorithm.freeze:
        raise PrefedError(
            f"{type(algorithm).__name__}.freeze: the model of a Flower app of one's own is its "
            f"own: set requires_grad to False there, or take prefed deploy"
        )
    codecs = {algorithm.upload, *(policy.codec for policy in algorithm.sharing().values())}
    if codecs != {"exact"}:
        raise PrefedError(
            f"{type(algorithm).__name__}: a Flower app of one's own sends arrays as they are; "
            f"the codecs {', '.join(sorted(codecs - {'exact'}))} need both ends to be "
            f"prefed's: prefed deploy"
        )
    for name in ("fraction_train", "min_fraction"):
        if not 0 < (value := getattr(strategy, name)) <= 1:
            raise PrefedError(f"{name}: should be above 0 and at most 1, not {value}")
    if strategy.local_steps is not None and strategy.local_steps < 1:
        raise PrefedError(f"local_steps: should be at least 1, not {strategy.local_steps}")
    if strategy.weighting not in ("samples", "uniform"):
        raise PrefedError(
            f'weighting: should be "samples" or "uniform", not {strategy.weighting!r}'
        )
    try:
        means = Means.of(strategy.mean, strategy.state_mean)
    except ValueError as error:
        raise PrefedError(f"mean, state_mean: {error}") from None
    if strategy.privacy is not None:
        _check_privacy(strategy, means)
    return means


def _check_privacy(strategy: "Strategy", means: Means) -> None:
    if not means.is_plain:
        raise PrefedError(
            "privacy: the noise is made for the plain mean, on which a client has a bounded "
            'influence; set mean="plain"'
        )
    if strategy.weighting != "uniform":
        raise PrefedError('privacy: the noise is made for weighting="uniform"')
    if isinstance(privacy := strategy.privacy, Privacy):
        if (privacy.sampling, privacy.neighbours) != ("fixed", "add-remove"):
            raise PrefedError(
                "privacy: a strategy asks nodes that happen to be there, which amplifies "
                'nothing; set sampling="fixed" and neighbours="add-remove"'
            )
        if privacy.where == "client" or privacy.noise_multiplier is None:
            raise PrefedError(
                'privacy: a strategy needs a noise_multiplier, and where="server"; '
                "`prefed deploy` knows the rest"
            )
    elif any(policy.kind == "average" for policy in strategy.algorithm.sharing().values()):
        raise PrefedError(
            f"privacy: clients of {type(strategy.algorithm).__name__} share optimiser state, which "
            f"needs noise of its own: take prefed.Privacy in place of CentralDP, or choose an "
            f"algorithm with its state on the server"
        )
