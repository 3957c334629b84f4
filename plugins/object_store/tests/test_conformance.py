"""Every check that the core has for monitors."""

import pytest

from nanotrain_core.testing import Case, conformance

pytestmark = pytest.mark.full

test_object_store = conformance(Case("monitor", use="object_store", config={"url": "memory://x/{folder}"}))
