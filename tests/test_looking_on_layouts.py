"""What monitors look at is the whole model's on every layout of the pairwise matrix.

Apart from what ranks run, which is in :mod:`test_looking`: they import its module, and to choose the matrix
takes seconds.
"""

import pytest
from compositions import pairwise
from test_looking import assert_looks_the_same


@pytest.mark.full
@pytest.mark.parametrize("composition", pairwise(), ids=lambda composition: composition.id)
def test_every_statistic_is_that_of_one_process(composition):
    assert_looks_the_same(composition, ["*"], {"run": {"steps": 3}})
