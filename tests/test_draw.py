"""What is drawn from logits has the probabilities that it says."""

import pytest
import torch

from nanotrain_core.models.sampling import sample_token

#: Probabilities 1/2, 1/8, 1/4, 1/8, 0.
LOGITS = torch.tensor([0.5, 0.125, 0.25, 0.125, 0.0]).log()


def shares(count=1000, **options):
    """Return how often each token is drawn."""
    generator = torch.Generator().manual_seed(0)
    drawn = [sample_token(LOGITS, generator, **options) for _ in range(count)]
    return torch.bincount(torch.tensor(drawn), minlength=5) / count


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0.125, 0.25, 0.125, 0]),
        ({"temperature": 0.5}, [16 / 22, 1 / 22, 4 / 22, 1 / 22, 0]),
        ({"top_k": 2}, [2 / 3, 0, 1 / 3, 0, 0]),
        ({"top_k": 3}, [0.5, 0.125, 0.25, 0.125, 0]),  # two are as likely as the third
        ({"top_k": 99}, [0.5, 0.125, 0.25, 0.125, 0]),
        ({"top_p": 0.7}, [2 / 3, 0, 1 / 3, 0, 0]),
        ({"top_p": 0.4}, [1, 0, 0, 0, 0]),
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0, 0]),  # of the two that are left 2/3 is enough
        ({"temperature": 0}, [1, 0, 0, 0, 0]),
        ({"temperature": 1e-310}, [1, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_they_should(options, expected):
    torch.testing.assert_close(
        shares(**options), torch.tensor(expected, dtype=torch.float32), rtol=0, atol=0.05
    )


def test_rounding_draws_the_same_tokens():
    """As logits of another layout differ, by some bits of float32."""
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    other = logits * (1 + 1e-7 * torch.randn(5000, generator=torch.Generator().manual_seed(2)))
    one, two = (torch.Generator().manual_seed(3) for _ in range(2))
    options = {"temperature": 0.9, "top_p": 0.95}
    assert [sample_token(logits, one, **options) for _ in range(50)] == [
        sample_token(other, two, **options) for _ in range(50)
    ]


def test_each_token_takes_one_number_of_the_generator():
    """So what is drawn next does not depend on what was left to draw from."""
    one, two = (torch.Generator().manual_seed(5) for _ in range(2))
    sample_token(LOGITS, one, top_k=1)
    sample_token(LOGITS, two)
    assert torch.equal(one.get_state(), two.get_state())
