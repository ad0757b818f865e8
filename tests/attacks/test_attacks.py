"""The attacks reach what docs/security.md says, before and after."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from tests.attacks import attacks as a
from tests.attacks import results
from tests.attacks.victims import NOISE, images, linear
from tests.helpers import made_tables


def told(name: str, reached: results.Reached) -> None:
    print(name, {side: round(value, 6) for side, value in asdict(reached).items()})


@pytest.mark.parametrize("momentum", ["average", "reset"])
@pytest.mark.parametrize("rounds", [0, 3])
def test_one_step_gives_the_image_away(momentum: str, rounds: int) -> None:
    """With m in the upload and without, from the first round and from a later one."""
    told(f"image, m {momentum}", reached := results.inversion(momentum, rounds))
    assert reached.clear < 1e-6
    assert reached.guessed < reached.noise, "worse than a guess"
    assert reached.guessed < reached.sum


def test_members_are_told_by_p() -> None:
    told("membership by P", reached := results.membership("P"))
    assert reached.clear > 0.75
    assert abs(reached.noise - 0.5) < 0.1
    assert reached.sum < reached.clear - 0.1


def test_p_tells_members_better_than_the_change_does() -> None:
    told("membership by the change", change := results.membership("change"))
    assert 0.5 < change.clear < results.membership("P").clear


@pytest.mark.parametrize("rounds", [0, 2])
def test_words_are_read_off_p(rounds: int) -> None:
    reached, exact = results.vocabulary(rounds)
    told("words", reached)
    assert exact, "exactly the words of each client, in the clear"
    assert reached.clear == 1.0
    assert abs(reached.noise - 0.5) < 0.1
    assert reached.sum < 0.9, "a sum still tells what nobody has"


def test_the_table_in_the_docs() -> None:
    assert made_tables.rows(results.TABLE) == results.cells()


def test_the_epsilon_in_the_docs() -> None:
    """Of one upload behind that noise, by dp-accounting."""
    accounting = pytest.importorskip("dp_accounting")
    accountant = accounting.pld.PLDAccountant().compose(accounting.GaussianDpEvent(NOISE))
    text = f"epsilon is {accountant.get_epsilon(1e-5):.1f} at delta = 1e-5"
    assert text in made_tables.SECURITY.read_text(), text


def test_gradients_of_single_samples() -> None:
    """Against the formula for softmax regression, in NumPy."""
    x, y = (values[:5] for values in images())
    model = linear()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    W, b = weights[:640].view(10, 64).numpy(), weights[640:].numpy()
    flat = x.flatten(1).numpy()
    logits = flat @ W.T + b
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    delta = p - np.eye(10)[y.numpy()]
    wanted = np.concatenate([(delta[:, :, None] * flat[:, None]).reshape(5, -1), delta], axis=1)
    np.testing.assert_allclose(a.gradients(model, weights, x, y).numpy(), wanted, atol=1e-12)


def test_the_area_under_the_curve() -> None:
    torch.manual_seed(0)
    members, others = torch.randint(5, (30,)).double(), torch.randint(6, (40,)).double()
    labels = [1] * 30 + [0] * 40
    wanted = roc_auc_score(labels, torch.cat([members, others]).numpy())
    assert a.auc(members, others) == pytest.approx(wanted, abs=1e-12)
