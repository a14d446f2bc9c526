"""What tests of explorers share: assertions of the contract say what they compared."""

import pytest

pytest.register_assert_rewrite(
    "support.hook_contract", "support.real_contract", "support.real_bed", "support.gateway_case"
)
