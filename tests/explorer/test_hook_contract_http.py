"""Hooks of engines behind HTTP keep the contract of hooks; the engines are fakes with real engines' faults."""

from support.engine_beds import LoraBed, SglangBed, SglangLoraBed, VllmBed
from support.hook_contract import HookContract


class TestVllm(HookContract):
    bed_type = VllmBed


class TestSglang(HookContract):
    bed_type = SglangBed


class TestLora(HookContract):
    bed_type = LoraBed


class TestSglangLora(HookContract):
    bed_type = SglangLoraBed
