"""The protocol by itself: sums, drop-outs, what each side refuses, and what the server sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from hypothesis import given, settings
from hypothesis import strategies as st

from prefed.flower.secure import stages as m
from prefed.flower.secure.masks import add_mask
from prefed.flower.secure.party import private_key, public_key
from prefed.flower.secure.session import Session, TooFew, neighbourhoods, threshold
from prefed.flower.secure.stages import Unexpected
from tests.helpers.oracles import secure_sum as oracle
from tests.helpers.secure import COMMON, LENGTH, STAGES, Talk, sent, vectors_of

EIGHT = range(8)


def sum_of(talk: Talk, gone: Any = ()) -> np.ndarray:
    return sum(talk.vectors[n] for n in talk.vectors if n not in gone)  # type: ignore[return-value]


@pytest.mark.parametrize("gone", [
    {}, {2: m.KEYS, 5: m.KEYS}, {2: m.SHARES, 5: m.SHARES}, {2: m.MASKED, 5: m.MASKED},
    {2: m.UNMASK, 5: m.UNMASK}, {2: m.MASKED, 5: m.UNMASK}, {0: m.SHARES, 7: m.MASKED},
], ids=str)  # fmt: skip
def test_the_sum_is_exact_with_a_quarter_gone(gone: dict[int, str]) -> None:
    talk = Talk(EIGHT, gone)
    total = talk.total()
    lost = {n for n, stage in gone.items() if stage != m.UNMASK}
    assert np.array_equal(total, sum_of(talk, lost))
    assert talk.session.survivors == {*EIGHT} - lost


SLOW = [pytest.param(count, marks=pytest.mark.slow) for count in (4, 6, 10)]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("count", [3, 9, *SLOW])
def test_a_third_may_be_gone_and_no_more(count: int, stage: str) -> None:
    numbers = range(10, 10 + count)
    last = numbers[-(count // 3) :]
    talk = Talk(numbers, dict.fromkeys(last, stage))
    assert np.array_equal(talk.total(), sum_of(talk, () if stage == m.UNMASK else last))
    one_more = numbers[-(count // 3) - 1 :]
    with pytest.raises(TooFew, match=r"it takes \d+, not|fewer than \d+ shares"):
        Talk(numbers, dict.fromkeys(one_more, stage)).total()


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_nodes_and_any_third_of_them(data: st.DataObject) -> None:
    numbers = data.draw(st.sets(st.integers(0, 10**6), min_size=3, max_size=9))
    most = len(numbers) // 3
    away = data.draw(st.sets(st.sampled_from(sorted(numbers)), max_size=most))
    gone = {n: data.draw(st.sampled_from(STAGES)) for n in sorted(away)}
    talk = Talk(numbers, gone)
    lost = {n for n, stage in gone.items() if stage != m.UNMASK}
    assert np.array_equal(talk.total(), sum_of(talk, lost))


def test_with_a_few_neighbours_each() -> None:
    numbers = range(15)
    talk = Talk(numbers, {4: m.MASKED, 9: m.UNMASK}, neighbours=6)
    assert talk.session.threshold == 7 - 2
    assert np.array_equal(talk.total(), sum_of(talk, {4}))
    around = talk.session.around
    assert all(len(n) == 7 and number in n for number, n in around.items())
    assert all(number in around[other] for number in numbers for other in around[number])
    assert neighbourhoods([1, 2, 3], 4) == {n: [1, 2, 3] for n in (1, 2, 3)}


def test_groups_with_sums_of_their_own_are_not_unmasked() -> None:
    session = Session(range(12), 0, neighbours=4)
    session.around = {n: [*range(6)] if n < 6 else [*range(6, 12)] for n in range(12)}
    talk = Talk(range(12))
    talk.session.around, talk.session.threshold = session.around, 4
    with pytest.raises(TooFew, match="groups with sums of their own"):
        talk.until(m.MASKED)


def test_masks_as_in_the_papers() -> None:
    """A masked vector, from the secrets that its node held, by independent arithmetic."""
    talk = Talk(range(5)).until(m.SHARES)
    own, secrets = 2, {n: dict(p.record) for n, p in talk.parties.items()}
    talk.stage(m.MASKED)
    pairs = {
        other: generate_shared_key(
            private_key(secrets[own]["mask-key"]), public_key(secrets[other]["public"][0])
        )
        for other in talk.parties
        if other != own
    }
    by_hand = oracle.masked(
        talk.vectors[own].tolist(), own, secrets[own]["secret"], pairs, COMMON, talk.session.name
    )
    assert talk.answers[m.MASKED][own].tolist() == by_hand


def test_what_the_server_sees_of_a_node_is_noise() -> None:
    """Masked vectors are uniform: of zeros, all bits are balanced, and the same vector under
    other keys has nothing in common with it. No two of them add up to anything either."""
    length, numbers = 20_000, range(4)
    zeros = {n: np.zeros(length, np.uint64) for n in numbers}
    first, second = (Talk(numbers, vectors=zeros).until(m.MASKED) for _ in range(2))
    for number in numbers:
        seen, again = (talk.answers[m.MASKED][number] for talk in (first, second))
        for words in (seen, again, seen - again, seen + first.answers[m.MASKED][(number + 1) % 4]):
            bits = np.unpackbits(words.view(np.uint8))
            # 1.28 million fair bits: six standard deviations.
            assert abs(bits.mean() - 0.5) < 6 * 0.5 / np.sqrt(len(bits))
            assert len(np.unique(words)) == length
            small = np.abs(words.view(np.int64)) < 2**53
            assert small.mean() < 0.01, "a plain vector would be small"
    first.stage(m.UNMASK)
    assert not first.session.unmask().any()


def test_without_the_last_stage_nothing_is_known() -> None:
    """All but one of the nodes' secrets: the last one's vector stays masked, by its private mask
    after it was declared gone, and by its pairs otherwise."""
    talk = Talk(range(4), {3: m.UNMASK}).until(m.MASKED)
    victim, seen = 3, talk.answers[m.MASKED]
    total = talk.session.sum
    assert total is not None
    assert not np.array_equal(total, sum_of(talk))
    # A server that calls the victim gone, though it has its vector, gets its key, and not its
    # private mask: the vector stays as far from the truth as noise is.
    talk.session.survivors.discard(victim)
    talk.session.sum = total - seen[victim]
    talk.stage(m.UNMASK)
    assert np.array_equal(talk.session.unmask(), sum_of(talk, {victim}))
    assert all(party.record == {} for n, party in talk.parties.items() if n != victim)


def change(**values: Any) -> Callable[[ConfigRecord], ConfigRecord]:
    def changed(record: ConfigRecord) -> ConfigRecord:
        made = ConfigRecord(dict(record))
        for name, value in values.items():
            key = name.replace("_", "-")
            made[key] = value(made[key]) if callable(value) else value
        return made

    return changed


ASKS = {
    "another session": (m.SHARES, change(session=b"x" * 16), "out of turn"),
    "no session": (m.SHARES, change(session="x"), "not what was agreed on"),
    "a short name": (m.KEYS, change(session=b"x"), "no proper name"),
    "another node's number": (m.KEYS, change(number=1), "takes this node for 1"),
    "less than two thirds": (m.KEYS, change(threshold=5), "less than two thirds"),
    "more than all": (m.KEYS, change(threshold=9), "less than two thirds"),
    "a neighbour twice": (m.KEYS, change(neighbours=[0, 1, 1, 2]), "there twice"),
    "two nodes": (m.KEYS, change(neighbours=[0, 1], threshold=2), "3 are the fewest"),
    "a number that is none": (m.KEYS, change(round=True), "not what was agreed on"),
    "too few keys": (m.SHARES, change(numbers=[0], mask_keys=lambda k: k[:1],
                                      cipher_keys=lambda k: k[:1]), "6 are needed"),
    "own keys replaced": (m.SHARES, change(mask_keys=lambda k: k[1:] + k[:1]), "other keys"),
    "a key twice": (m.SHARES, change(mask_keys=lambda k: [*k[:-1], k[1]]), "the same"),
    "a key that is none": (m.SHARES, change(cipher_keys=lambda k: [*k[:-1], b"k"]), "be read"),
    "a stranger's keys": (m.SHARES, change(numbers=lambda n: [*n[:-1], 99]), "the neighbours are"),
    "fewer keys than nodes": (m.SHARES, change(mask_keys=lambda k: k[1:]), "values for the nodes"),
    "a share changed": (m.MASKED, change(ciphertexts=lambda t: [t[0][:-4] + b"AAA=", *t[1:]]),
                        "changed on the way"),
    "shares exchanged": (m.MASKED, change(ciphertexts=lambda t: [*t[1:], t[0]]), "on the way"),
    "too few shares": (m.MASKED, change(numbers=lambda n: n[:3], ciphertexts=lambda t: t[:3]),
                       "6 are needed"),
    "a node twice": (m.MASKED, change(numbers=lambda n: [n[1], *n[1:]]), "values for the nodes"),
    "another round": (m.MASKED, change(round=4), "of round 3"),
    "both secrets": (m.UNMASK, change(dropped=[3]), "both secrets"),
    "a node left out": (m.UNMASK, change(survivors=lambda n: n[:-1]), "each once"),
    "a stranger": (m.UNMASK, change(dropped=[99]), "each once"),
    "too few survivors": (m.UNMASK, change(survivors=[0, 1, 2], dropped=[3, 4, 5, 6, 7]),
                          "6 and this node"),
    "itself gone": (m.UNMASK, change(survivors=[1, 2, 3, 4, 5, 6, 7], dropped=[0]), "this node"),
}  # fmt: skip


@pytest.mark.parametrize("what", ASKS)
def test_a_node_refuses(what: str) -> None:
    stage, changed, reason = ASKS[what]

    def ask(at: str, number: int, record: ConfigRecord) -> ConfigRecord:
        return changed(record) if (at, number) == (stage, 0) else record

    with pytest.raises(Unexpected, match=reason):
        Talk(EIGHT, ask=ask).total()


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_node_answers_each_stage_once(stage: str) -> None:
    """A second vector under the same masks, or a second list of survivors, would give it away."""
    talk = Talk(range(4)).until(stage)
    with pytest.raises(Unexpected, match="out of turn"):
        talk.answer(stage, 0, talk.told[stage][0])


def test_secrets_are_forgotten_as_soon_as_they_are_used() -> None:
    talk = Talk(range(4)).until(m.MASKED)
    held = talk.parties[0].record
    assert not held.keys() & {"secret", "mask-key", "cipher-key", "peer-secrets", "own-shares"}
    keys = [talk.answers[m.KEYS][0][m.MASK_KEYS]]
    talk.stage(m.UNMASK)
    assert talk.parties[0].record == {}
    again = Talk(range(4)).until(m.KEYS)
    assert again.answers[m.KEYS][0][m.MASK_KEYS] not in keys


ANSWERS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "no record": (m.KEYS, lambda record: None, "no record"),
    "no keys": (m.KEYS, lambda record: ConfigRecord(), "values for the nodes"),
    "two keys": (m.KEYS, change(mask_keys=lambda k: k * 2), "values for the nodes"),
    "one key for both": (m.KEYS, lambda r: ConfigRecord({m.MASK_KEYS: r[m.MASK_KEYS],
                         m.CIPHER_KEYS: r[m.MASK_KEYS]}), "there already"),
    "a huge key": (m.KEYS, change(mask_keys=[b"k" * 10**6]), "impossible length"),
    "a number for a key": (m.KEYS, change(mask_keys=[7]), "not what was agreed on"),
    "a share too few": (m.SHARES, change(numbers=lambda n: n[1:], ciphertexts=lambda t: t[1:]),
                        "shares for the nodes"),
    "a share for oneself": (m.SHARES, change(numbers=lambda n: [0, *n[1:]]), "for the nodes"),
    "a secret too few": (m.UNMASK, change(numbers=lambda n: n[1:], shares=lambda s: s[1:]),
                         "shares of the nodes"),
    "another's share": (m.UNMASK, change(shares=lambda s: [b"\x05\0\0\0" + x[4:] for x in s]),
                        "not this node's"),
    "a longer share": (m.UNMASK, change(shares=lambda s: [x + b"0" for x in s]), "impossible"),
    "both of a node's": (m.UNMASK, change(numbers=lambda n: [*n, n[-1]],
                         shares=lambda s: [*s, s[-1]]), "values for the nodes"),
}  # fmt: skip


@pytest.mark.parametrize("what", ANSWERS)
def test_the_server_refuses(what: str) -> None:
    """And goes on without that node: nothing of a refused answer is kept."""
    stage, changed, reason = ANSWERS[what]
    before = STAGES[: STAGES.index(stage)]
    talk = Talk(EIGHT, {0: stage})
    for earlier in before:
        talk.stage(earlier)
    answer = talk.answer(stage, 0, sent(talk.session.ask(stage, 0)))
    with pytest.raises(Unexpected, match=reason):
        talk.take(stage, 0, changed(answer))
    for later in STAGES[STAGES.index(stage) :]:
        talk.stage(later)
    assert np.array_equal(talk.session.unmask(), sum_of(talk, () if stage == m.UNMASK else {0}))


def test_a_key_is_checked_against_the_public_one() -> None:
    """A share of a gone node's key that was changed gives another key, and no wrong sum."""
    talk = Talk(range(6), {5: m.MASKED}).until(m.UNMASK)
    holder, share = next(iter(sorted(talk.session.shares[5].items())))
    talk.session.shares[5][holder] = share[:9] + bytes([share[9] ^ 1]) + share[10:]
    with pytest.raises(TooFew, match="node 5's key give another key"):
        talk.session.unmask()


def test_nodes_that_were_told_different_things_have_no_sum() -> None:
    """One that was shown another model than the rest spoils the sum, and shows nothing."""
    talk = Talk(range(5)).until(m.SHARES)
    for number in talk.session.asked(m.MASKED):
        party, vector = talk.parties[number], talk.vectors[number].copy()
        party.take_shares(sent(talk.session.ask(m.MASKED, number)))
        party.mask(vector, b"another" if number == 3 else COMMON)
        talk.session.take_vector(number, vector)
    talk.stage(m.UNMASK)
    off = talk.session.unmask() - sum_of(talk)
    assert (np.abs(off.view(np.int64)) > 2**50).mean() > 0.9


def test_masks_are_long_and_depend_on_all_their_parts() -> None:
    length = (1 << 19) + 5
    vector = np.zeros(length, np.uint64)
    add_mask(vector, b"s" * 32, b"p")
    assert vector[-LENGTH:].tolist() == oracle.mask(b"s" * 32, b"p", length, length - LENGTH)
    assert len(np.unique(vector)) == length
    for secret, purpose in ((b"s" * 31 + b"t", b"p"), (b"s" * 32, b"q")):
        other = np.zeros(LENGTH, np.uint64)
        add_mask(other, secret, purpose)
        assert not (other == vector[:LENGTH]).any()
    add_mask(vector, b"s" * 32, b"p", -1)
    assert not vector.any()


def test_thresholds() -> None:
    for shares in range(3, 200):
        assert 3 * threshold(shares) >= 2 * shares, "some that are told one thing, some another"
        assert shares - threshold(shares) == shares // 3
    with pytest.raises(TooFew, match="3 are the fewest"):
        Session([1, 2], 0)


def test_vectors_differ() -> None:
    first, second = vectors_of(range(2)).values()
    assert not np.array_equal(first, second)
