"""What tests of explorers share: assertions of the contract say what they compared."""

import pytest

pytest.register_assert_rewrite("hook_contract", "real_contract", "real_bed")
