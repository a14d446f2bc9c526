"""Hooks of engines behind HTTP keep the contract of hooks; the engines are fakes with real engines' faults."""

import pytest
from engine_beds import LoraBed, SglangBed, VllmBed
from hook_contract import HookContract


class TestVllm(HookContract):
    @pytest.fixture
    def bed(self, tmp_path):
        with VllmBed(tmp_path) as bed:
            yield bed


class TestSglang(HookContract):
    @pytest.fixture
    def bed(self, tmp_path):
        with SglangBed(tmp_path) as bed:
            yield bed


class TestLora(HookContract):
    @pytest.fixture
    def bed(self, tmp_path):
        with LoraBed(tmp_path) as bed:
            yield bed
