"""A table that cannot work is refused with the key, the value and what would do."""

import pytest
from nanotrain_deepseek.config import DeepSeekConfig
from nanotrain_deepseek.model import DeepSeek
from nanotrain_deepseek.samples import V2, V3

from nanotrain_core.errors import RecipeError
from nanotrain_core.testing import Case


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({**V3, "dense_layers": 4}, "model.dense_layers: 4 exceeds the model's 3 layers"),
        ({**V3, "rope_size": 5}, "model.rope_size: 5 is odd"),
        ({**V3, "max_length": 8}, "batch.length: 16 exceeds model.max_length = 8"),
        ({**V3, "mtp": 16}, "model.mtp: 16 further tokens leave none of batch.length = 16"),
        ({**V3, "top_k": 9}, "model.top_k: 9 exceeds the 8 experts there are"),
        ({**V3, "groups": 3}, "model.groups: 3 groups do not divide 8 experts"),
        ({**V3, "group_limit": 5}, "model.group_limit: 5 exceeds the 4 groups there are"),
        ({**V3, "group_limit": 1}, "1 groups of 2 experts are too few for top_k = 3: at least 2"),
        ({**V3, "groups": 8, "group_limit": 4}, "so at most 4 groups"),
        ({**V3, "device_balance": 0.1}, "model.device_balance: is a loss on softmax scores"),
        ({**V2, "bias_update_rate": 0.1}, "model.bias_update_rate: a softmax router has no bias"),
        ({**V2, "groups": 1, "group_limit": 0}, "set model.groups to at least 2"),
        ({**V2, "dense_layers": 3}, "model.expert_balance: balances experts, but every layer is dense"),
        ({**V2, "score": "relu"}, "model.score"),
        ({**V2, "yarn": {"beta_slow": 40.0}}, "must be below beta_fast = 32.0, got 40.0"),
    ],
)
def test_refusals_name_the_key(table, text):
    with pytest.raises(RecipeError, match="refused") as refusal:
        Case("model", use="deepseek", config=table).recipe()
    assert text in str(refusal.value)


def test_a_balance_loss_weighs_the_sum_over_layers_and_counts_sequences_and_layers():
    model = DeepSeek(DeepSeekConfig(**V3))  # 2 layers with experts, and 2 modules for further tokens
    assert model.loss_weights == {"lm": 1.0, "mtp": 0.3, "seq_balance": 0.04}
