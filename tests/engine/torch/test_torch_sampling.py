"""The distribution from which a token is drawn, against numbers worked out by hand."""

from __future__ import annotations

import math
import random
import timeit
from copy import copy
from dataclasses import replace

import pytest
import torch
from batches import make_chunk, make_prompt_request
from machine import is_below

from slosched.core import GrammarError, Request, SamplingParams, ScheduledChunk
from slosched.engine.torch.draws import Draws
from slosched.engine.torch.penalties import Penalties
from slosched.engine.torch.random_tokens import drawn_tokens, next_token_weights, random_number
from slosched.engine.torch.sampling import Sampler

torch.set_num_threads(1)

LOGITS = torch.tensor([math.log(p) for p in (0.1, 0.4, 0.2, 0.3)])
NARROW = SamplingParams(temperature=2.0, top_k=3, top_p=0.5, min_p=0.3)
"""Limits that a row beside the one that is looked at has."""


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(temperature=1.0), [0.1, 0.4, 0.2, 0.3]),
        # Half the temperature squares the odds.
        (SamplingParams(temperature=0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        (SamplingParams(temperature=1.0, top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (SamplingParams(temperature=1.0, top_k=9), [0.1, 0.4, 0.2, 0.3]),
        # 0.4 + 0.3 is the smallest set of at least 0.6; for 0.75 a third is needed.
        (SamplingParams(temperature=1.0, top_p=0.6), [0, 4 / 7, 0, 3 / 7]),
        (SamplingParams(temperature=1.0, top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9]),
        (SamplingParams(temperature=1.0, top_p=0.0), [0, 1, 0, 0]),
        # Top-k first: within {4/7, 3/7}, 0.5 needs only the first.
        (SamplingParams(temperature=1.0, top_k=2, top_p=0.5), [0, 1, 0, 0]),
        # Half as likely as the likeliest is enough for min-p 0.5, a quarter is not.
        (SamplingParams(temperature=1.0, min_p=0.49), [0, 4 / 9, 2 / 9, 3 / 9]),
        (SamplingParams(temperature=1.0, min_p=1.0), [0, 1, 0, 0]),
        # Min-p first: of what it leaves, 4/9 + 3/9 is the smallest set of at least 0.7.
        (SamplingParams(temperature=1.0, min_p=0.49, top_p=0.7), [0, 4 / 7, 0, 3 / 7]),
    ],
)
def test_probabilities(sampling: SamplingParams, expected: list[float]) -> None:
    for rows, samplings in ((1, [sampling]), (3, [NARROW, sampling, SamplingParams(1.0)])):
        weights = next_token_weights(LOGITS.repeat(rows, 1), samplings)[rows // 2]
        got = weights / weights.sum()
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32))


def test_a_number_picks_the_token_at_its_share_of_the_odds() -> None:
    """The odds of each row add up to 1: token 1 of the whole ones has those from 0.1 to 0.5."""
    whole, best_two = SamplingParams(1.0), SamplingParams(1.0, top_p=0.6)
    wanted = [(whole, 0.0, 0), (whole, 0.3, 1), (best_two, 0.3, 1), (whole, 0.6, 2)]
    wanted += [(best_two, 0.6, 3), (whole, 0.999999, 3), (best_two, 0.5, 1)]
    samplings, numbers, tokens = (list(column) for column in zip(*wanted, strict=True))
    assert drawn_tokens(LOGITS.repeat(len(wanted), 1), samplings, numbers).tolist() == tokens
    spoilt = torch.full_like(LOGITS, math.nan)
    assert drawn_tokens(torch.stack([spoilt, LOGITS]), [whole, whole], [0.6, 0.6])[1] == 2


def test_random_numbers_are_spread_evenly_and_differ() -> None:
    numbers = torch.tensor([random_number(seed, i) for seed in range(50) for i in range(200)])
    assert len(numbers.unique()) > 9_900  # of 10,000 numbers in float32
    shares = torch.histc(numbers, 10, 0.0, 1.0) / len(numbers)
    assert float((shares - 0.1).abs().max()) < 0.015


@pytest.mark.parametrize("temperature", [1e4, 1e39, 1e300])
def test_what_is_forbidden_stays_so_at_any_temperature(temperature: float) -> None:
    logits = torch.tensor([3.0, -math.inf, 1e30, -1e30])
    (weights,) = next_token_weights(logits[None], [SamplingParams(temperature=temperature)])
    assert weights[1] == 0
    assert float(weights.sum()) == pytest.approx(1)


def draw(sampler: Sampler, rows: torch.Tensor, *requests: Request) -> Draws:
    """Draw one token for each request, and append it to the request's output."""
    chunks = [make_chunk(request, [0, 1, 2, 3]) for request in requests]
    draws = sampler.launch(chunks, rows.clone()).wait()
    for request in requests:
        if request.request_id in draws.token_ids:
            request.output_token_ids.append(draws.token_ids[request.request_id])
            request.num_output_tokens += 1
    return draws


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_a_row_that_is_no_number_fails_alone(spoilt: float) -> None:
    sampler = Sampler(frozenset(), torch.device("cpu"))
    rows = LOGITS.repeat(3, 1)
    rows[1, 2] = spoilt
    hot = SamplingParams(temperature=1.0, seed=1)
    requests = [make_prompt_request(name, [1, 2], hot) for name in ("a", "b", "c")]
    draws = draw(sampler, rows, *requests)
    assert draws.token_ids.keys() == {"a", "c"}
    assert draws.failed == {"b": "the model's logits are not numbers"}


def test_a_row_that_allows_no_token_fails_alone() -> None:
    sampler = Sampler(frozenset({1}), torch.device("cpu"))
    only_the_end = SamplingParams(allowed_token_ids=(1,), min_tokens=1)
    requests = [make_prompt_request("a", [1, 2], only_the_end), make_prompt_request("b", [1, 2])]
    draws = draw(sampler, LOGITS.repeat(2, 1), *requests)
    assert draws.token_ids == {"b": 1}
    assert "leave no token" in draws.barred["a"]
    assert not draws.failed


def test_only_allowed_tokens_are_drawn() -> None:
    sampler = Sampler(frozenset(), torch.device("cpu"))
    greedy = make_prompt_request("greedy", [1], SamplingParams(allowed_token_ids=(0, 2)))
    hot = SamplingParams(temperature=1.0, seed=3, allowed_token_ids=(0, 2))
    hot_one = make_prompt_request("hot", [1], hot)
    for _ in range(30):
        draw(sampler, LOGITS.repeat(2, 1), greedy, hot_one)
    assert set(greedy.output_token_ids) == {2}
    assert set(hot_one.output_token_ids) == {0, 2}


class OneAfterTheOther:
    """A grammar of the tokens 0, 1, 2 in this order, and the end 3; a mask of two bytes."""

    def __init__(self) -> None:
        self._next = 0

    def begin(self) -> OneAfterTheOther:
        return OneAfterTheOther()

    def mask(self) -> bytes | None:
        if self._next == 2:
            raise GrammarError("two is too much")
        return bytes([1 << self._next, 0])

    def accept(self, token_id: int) -> None:
        assert token_id == self._next
        self._next += 1

    def fork(self) -> OneAfterTheOther:
        return copy(self)


def test_a_grammar_rules_its_own_row_alone() -> None:
    sampler = Sampler(frozenset(), torch.device("cpu"))
    grammar = OneAfterTheOther()
    bound = make_prompt_request("bound", [1], SamplingParams(grammar=grammar))
    hot = SamplingParams(temperature=1.0, seed=3, grammar=grammar)
    hot_one, free = make_prompt_request("hot", [1], hot), make_prompt_request("free", [1])
    for _ in range(2):
        draws = draw(sampler, LOGITS.repeat(3, 1), free, bound, hot_one)
        assert not draws.barred
    assert bound.output_token_ids == hot_one.output_token_ids == [0, 1]
    draws = draw(sampler, LOGITS.repeat(3, 1), bound, free, hot_one)
    assert draws.barred == {"bound": "two is too much", "hot": "two is too much"}
    assert free.output_token_ids == [1, 1, 1]


@pytest.mark.parametrize(
    ("drafts", "num_accepted", "token"),
    [
        ([0], 1, 1),
        ([1, 1], 0, 0),  # the first breaks the grammar
        ([0, 3, 1], 1, 1),  # the second does
        ([0, 1, 1], 1, 1),  # what comes behind the second cannot be found in time
        ([0, 200], 1, 1),  # the mask does not reach so far
    ],
)
def test_drafts_are_accepted_as_far_as_the_grammar_goes(
    drafts: list[int], num_accepted: int, token: int
) -> None:
    sampler = Sampler(frozenset(), torch.device("cpu"))
    bound = make_prompt_request("r", [1], SamplingParams(grammar=OneAfterTheOther()))
    draws = with_drafts(sampler, bound, drafts, LOGITS.repeat(1 + len(drafts), 1))
    assert (draws.num_accepted.get("r", 0), draws.token_ids["r"]) == (num_accepted, token)
    assert not draws.barred
    if token == 1:  # the request's own place in the grammar is behind both tokens
        draws = with_drafts(sampler, bound, [], LOGITS[None])
        assert draws.barred == {"r": "two is too much"}


def test_log_probabilities_come_for_each_accepted_draft() -> None:
    sampler = Sampler(frozenset(), torch.device("cpu"))
    request = make_prompt_request("r", [0], SamplingParams(num_logprobs=1))
    rows = torch.stack([LOGITS, LOGITS.flip(0), LOGITS])
    draws = with_drafts(sampler, request, [1, 2], rows)
    assert (draws.num_accepted["r"], draws.token_ids["r"]) == (2, 1)
    places = [(1, rows[0]), (2, rows[1]), (1, rows[2])]
    for (token, row), found in zip(places, draws.logprobs["r"], strict=True):
        assert found.drawn == pytest.approx(float(row.log_softmax(-1)[token]))
        assert [likeliest for likeliest, _ in found.likeliest] == [token]


def test_a_grammar_comes_before_min_tokens_but_not_before_other_rules() -> None:
    """Where only the end is left it may come, although `min_tokens` asks for more tokens."""
    sampler = Sampler(frozenset({0}), torch.device("cpu"))
    ends = SamplingParams(grammar=OneAfterTheOther(), min_tokens=5)
    never = SamplingParams(grammar=OneAfterTheOther(), allowed_token_ids=(1, 2, 3))
    requests = [make_prompt_request("ends", [1], ends), make_prompt_request("never", [1], never)]
    draws = draw(sampler, LOGITS.repeat(2, 1), *requests)
    assert draws.token_ids == {"ends": 0}
    assert "grammar" in draws.barred["never"]


def test_bad_words_are_never_completed() -> None:
    """The likeliest tokens are 1, 3, 2, 0 in this order."""
    sampler = Sampler(frozenset(), torch.device("cpu"))
    one = make_prompt_request("one", [1], SamplingParams(bad_words=((1,),)))
    pair = make_prompt_request("pair", [1], SamplingParams(bad_words=((1, 1), (1, 3))))
    for _ in range(4):
        draw(sampler, LOGITS.repeat(2, 1), one, pair)
    assert one.output_token_ids == [3, 3, 3, 3]
    assert pair.output_token_ids == [1, 2, 1, 2]
    again = replace(pair, output_token_ids=[], num_output_tokens=0, num_computed_tokens=0)
    sampler.release("pair")
    assert draw(sampler, LOGITS[None], again).token_ids == {"pair": 1}, "nothing is left of it"


# Logits of the tokens 0 to 3: -2.30, -0.92, -1.61 and -1.20.
PENALISED = [
    (SamplingParams(logit_bias=((0, 2.0), (1, -1.0))), [0, 0, 0, 0]),
    (SamplingParams(presence_penalty=0.5), [1, 3, 1, 1]),
    (SamplingParams(frequency_penalty=0.5), [1, 3, 1, 2]),
    (SamplingParams(presence_penalty=-2.0), [1, 1, 1, 1]),
    (SamplingParams(repetition_penalty=2.0), [1, 2, 1, 1]),
    (SamplingParams(repetition_penalty=2.0, logit_bias=((3, 2.0),)), [3, 3, 3, 3]),
]
"""Each with what it draws greedily after a prompt of token 3 alone.  A repetition penalty counts the
prompt, too; with the bias, the logit of token 3 is 0.80, of which it leaves a half."""


@pytest.mark.parametrize(("sampling", "tokens"), PENALISED)
def test_biases_and_penalties_change_the_likeliest_token(
    sampling: SamplingParams, tokens: list[int]
) -> None:
    sampler = Sampler(frozenset(), torch.device("cpu"))
    request = make_prompt_request("penalised", [3, 3], sampling)
    plain = make_prompt_request("plain", [3, 3])
    for _ in tokens:
        draw(sampler, LOGITS.repeat(2, 1), request, plain)
    assert request.output_token_ids == tokens
    assert plain.output_token_ids == [1, 1, 1, 1], "nobody else's"


def test_penalties_count_the_drafts_before_a_place() -> None:
    sampler = Sampler(frozenset(), torch.device("cpu"))
    frequent = SamplingParams(frequency_penalty=0.5, ignore_eos=True)
    request = make_prompt_request("one", [0], frequent)
    draws = with_drafts(sampler, request, [1, 3, 1], LOGITS.repeat(4, 1))
    assert (draws.num_accepted["one"], draws.token_ids["one"]) == (3, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_of_a_long_output_are_those_of_all_its_tokens(dtype: torch.dtype) -> None:
    """The reference counts the whole output, drafts included, for each token."""
    sampling = SamplingParams(
        presence_penalty=0.25, frequency_penalty=-0.125, repetition_penalty=2, logit_bias=((7, 3),)
    )
    draws, vocab_size = random.Random(5), 400
    prompt, *steps = ([draws.randrange(vocab_size) for _ in range(3)] for _ in range(200))
    penalties = Penalties.of(sampling, prompt, torch.device("cpu"))
    assert penalties is not None
    logits = torch.linspace(-4, 4, vocab_size).to(dtype)
    outputs: list[int] = []
    for token, *drafts in steps:
        counts = torch.bincount(torch.tensor([*outputs, *drafts]), minlength=vocab_size)
        expected = logits.clone()
        expected[7] += 3
        for seen in {*prompt, *outputs, *drafts}:
            expected[seen] *= 0.5 if expected[seen] > 0 else 2
        expected -= torch.where(counts > 0, 0.25 - 0.125 * counts, 0).to(dtype)
        penalties.apply(got := logits.clone(), drafts)
        assert torch.equal(got, expected)
        penalties.accept(token)
        outputs.append(token)


@pytest.mark.cost
def test_a_penalised_token_of_a_long_output_takes_less_than_a_tenth_of_a_millisecond() -> None:
    """Counting 20,000 tokens anew for each token took several times as long."""
    sampling = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.1)
    penalties = Penalties.of(sampling, range(1000), torch.device("cpu"))
    assert penalties is not None
    for token in range(20_000):
        penalties.accept(token % 4000)
    logits = torch.zeros(50_000)

    def one_token() -> None:
        penalties.apply(logits)
        penalties.accept(7)

    assert is_below(0.1e-3, lambda: min(timeit.repeat(one_token, number=1, repeat=101)))


def with_drafts(sampler: Sampler, request: Request, drafts: list[int], rows: torch.Tensor) -> Draws:
    """Return what a decode of `request` draws that verifies `drafts`; nothing is appended."""
    num_new = 1 + len(drafts)
    chunk = ScheduledChunk(request, num_new, request.num_tokens - 1, True, [0, 1, 2, 3])
    return sampler.launch([chunk], rows.clone(), {request.request_id: drafts}).wait()


def test_drafts_do_not_change_how_often_a_token_is_drawn() -> None:
    """All tokens have the same odds in both places, behind an accepted draft as before it."""
    sampler = Sampler(frozenset(), torch.device("cpu"))
    first, second = [0] * 4, [0] * 4
    for seed in range(3000):
        hot = SamplingParams(temperature=1.0, seed=seed, ignore_eos=True)
        request = make_prompt_request(f"r{seed}", [0, 1], hot)
        draws = with_drafts(sampler, request, [3], LOGITS.repeat(2, 1))
        token = draws.token_ids[request.request_id]
        if draws.num_accepted[request.request_id]:
            first[3] += 1
            second[token] += 1
        else:
            assert token != 3
            first[token] += 1
        sampler.release(request.request_id)
    assert sum(second) == first[3]
    expected = torch.tensor([0.1, 0.4, 0.2, 0.3])
    for counts in (first, second):
        shares = torch.tensor(counts) / sum(counts)
        assert float((shares - expected).abs().max()) < 0.05


def test_a_seed_draws_the_same_tokens_whatever_is_drafted() -> None:
    hot = SamplingParams(temperature=1.0, seed=11, ignore_eos=True)
    plain = make_prompt_request("r", [0, 1], hot)
    sampler = Sampler(frozenset(), torch.device("cpu"))
    for _ in range(30):
        draw(sampler, LOGITS[None], plain)
    sampler.release("r")
    drafted = make_prompt_request("r", [0, 1], hot)
    while drafted.num_output_tokens < 30:
        drafts = [1, 1, 3][: 30 - drafted.num_output_tokens - 1]
        draws = with_drafts(sampler, drafted, drafts, LOGITS.repeat(1 + len(drafts), 1))
        emitted = [*drafts[: draws.num_accepted.get("r", 0)], draws.token_ids["r"]]
        drafted.output_token_ids += emitted
        drafted.num_output_tokens += len(emitted)
    assert drafted.output_token_ids == plain.output_token_ids


def test_what_a_request_may_not_have_is_no_accepted_draft_either() -> None:
    """The likeliest tokens are 1, 3, 2, 0 in this order."""
    sampler = Sampler(frozenset({1}), torch.device("cpu"))
    rows = LOGITS.repeat(4, 1)
    one = make_prompt_request("end", [0], SamplingParams(min_tokens=2))
    # In the first two places the end is forbidden, in the third it stops the request.
    draws = with_drafts(sampler, one, [3, 3, 1], rows)
    assert (draws.num_accepted["end"], draws.token_ids["end"]) == (2, 1)
    words = SamplingParams(bad_words=((1, 1),), ignore_eos=True)
    pair = make_prompt_request("pair", [0], words)
    draws = with_drafts(sampler, pair, [1, 1, 1], rows)
    assert (draws.num_accepted["pair"], draws.token_ids["pair"]) == (1, 3)


def test_a_place_among_the_drafts_that_is_no_number_fails_the_request() -> None:
    sampler = Sampler(frozenset(), torch.device("cpu"))
    rows = LOGITS.repeat(2, 1)
    rows[1] = math.nan
    right = make_prompt_request("right", [0])
    assert with_drafts(sampler, right, [1], rows).failed.keys() == {"right"}
    wrong = make_prompt_request("wrong", [0])
    assert with_drafts(sampler, wrong, [2], rows).token_ids == {"wrong": 1}
