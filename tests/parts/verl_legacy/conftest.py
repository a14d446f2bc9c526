"""These tests are skipped where torch is missing."""

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")
