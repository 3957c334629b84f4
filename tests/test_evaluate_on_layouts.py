"""Scores and generated texts are those of one process on every layout; each request is scored once."""

import pytest
from nanotrain_sample.evaluate import scorer
from nanotrain_sample.evaluate.generation import Generation, generate
from nanotrain_sample.evaluate.scorer import Scorer
from nanotrain_sample.evaluate.windows import Request
from nanotrain_sample.generate import Writer
from test_sample_on_layouts import CASES, OTHERS, PROMPTS, case_of

from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.probe import make_run

REQUESTS = [
    Request((3, 1, 4, 1, 5, 9, 2), 6),
    Request((6, 5), 1),
    Request((3, 5, 8, 9, 7), 2),
    Request((2, 7, 1, 8, 2, 8, 1, 8, 2), 3),
    Request((1, 4), 1),
]


def scores(case, most):
    scorer.LOGITS = most
    run = make_run(case, {}, trains=False)
    return [(each.log_probability, each.greedy) for each in Scorer(run, 33).score(REQUESTS)]


def assert_scores_as_one_process(case):
    """Pads sequences in one pass there, and in one process reads each alone."""
    (expected,) = run_ranks(scores, 1, case.alone(), 1)
    for rank, found in enumerate(run_ranks(scores, case.world_size, case, 33 * 14)):
        for number, ((log, greedy), (wanted, likeliest)) in enumerate(zip(found, expected, strict=True)):
            assert log == pytest.approx(wanted, abs=1e-9), f"rank {rank}, request {number}"
            assert greedy == likeliest


@pytest.mark.parametrize("name", ["llama-dp2-tp2", "v3-pp2-tp2-ep2"])
def test_scores_are_those_of_one_process(name):
    assert_scores_as_one_process(case_of(*(CASES | OTHERS)[name]))


@pytest.mark.full
@pytest.mark.parametrize("name", sorted({*CASES, *OTHERS} - {"llama-dp2-tp2", "v3-pp2-tp2-ep2"}))
def test_scores_of_all_layouts_are_those_of_one_process(name):
    assert_scores_as_one_process(case_of(*(CASES | OTHERS)[name]))


class Letters:
    """A codec whose tokens are letters."""

    def decode(self, tokens):
        return "".join(chr(ord("a") + token) for token in tokens)


def texts(case, until, caches):
    asked = [Generation(prompt, until) for prompt in PROMPTS]
    writer = Writer(make_run(case, {}, trains=False), caches=caches)
    return list(generate(writer, asked, Letters()))


@pytest.mark.full_cases("llama-dp2-tp2")
@pytest.mark.parametrize("name", ["llama-dp2-tp2", "v3-dp2-pp2-ep2"])
def test_generated_texts_are_those_of_one_process(name):
    """One of three ends after a few tokens, at a string that it contains, while other replicas go on."""
    case = case_of(*(CASES | OTHERS)[name])
    (whole,) = run_ranks(texts, 1, case.alone(), (), False)
    until = (whole[0][3:5],)
    expected = [text.partition(until[0])[0] for text in whole]
    assert len(expected[0]) <= 3 < len(expected[1])
    assert run_ranks(texts, case.world_size, case, until, True) == [expected] * case.world_size
