"""Who writes what, and where each byte goes: properties over any export."""

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from safetensors.torch import load  # noqa: E402

from syncd.errors import UsageError  # noqa: E402
from syncd.protocol.safetensors import ALIGN, DTYPE_BITS, METADATA, aligned, parse_header  # noqa: E402
from syncd.transports.files import buffers  # noqa: E402
from syncd.transports.files.buffers import PinnedBuffer  # noqa: E402
from syncd.transports.files.export_walk import ExportWalk, ShardLayout, TensorSpec, tied_names  # noqa: E402
from syncd.transports.torch_tensors import FROM_TORCH, view  # noqa: E402

sizes = st.lists(st.integers(0, 10_000), max_size=80)
worlds = st.integers(1, 9)
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
names = st.text(max_size=12).filter(lambda name: name != METADATA)
exports = st.dictionaries(names, st.tuples(st.sampled_from(sorted(FROM_TORCH.values())), shapes))


def specs_of(export):
    found = []
    for name, (dtype, shape) in export.items():
        count = 1
        for length in shape:
            count *= length
        found.append(TensorSpec(name, dtype, shape, count * DTYPE_BITS[dtype] // 8))
    return found


class TestShares:
    @given(sizes, worlds)
    def test_every_tensor_has_one_owner_and_all_ranks_agree(self, sizes, world_size):
        tensors = [(f"w{place}", torch.empty(size, dtype=torch.uint8)) for place, size in enumerate(sizes)]
        walks = [ExportWalk(tensors, rank, world_size, None) for rank in range(world_size)]
        owned = [piece.spec.name for walk in walks for piece in walk]
        assert sorted(owned) == sorted(name for name, _ in tensors)
        assert all(walk.weight_map == walks[0].weight_map for walk in walks)
        assert all(walk.total_size == sum(sizes) for walk in walks)
        loads = [sum(spec.size for spec in walk.specs) for walk in walks]
        assert max(loads) - min(loads) <= max(sizes, default=0)

    def test_a_tensor_that_is_named_twice_is_refused_and_not_left_out(self):
        with pytest.raises(UsageError, match="twice"):
            list(ExportWalk([("w", weight := torch.ones(4)), ("w", weight)], 0, 1, None))

    def test_tensors_with_the_same_storage_and_view_are_tied(self):
        weight = torch.ones(4, 4)
        held = {
            "a": weight,
            "b": weight.detach(),
            "turned": weight.t(),
            "part": weight[:2],
            "same": weight.clone(),
        }
        assert tied_names(held.items()) == {"b"}
        assert tied_names(list(held.items())) == {"b"}
        assert tied_names(iter(held.items())) == frozenset()
        assert tied_names([("a", torch.empty(0)), ("b", torch.empty(0))]) == frozenset()


class TestLayout:
    @given(exports)
    def test_a_shard_header_is_padded_and_parses(self, export):
        layout = ShardLayout(specs_of(export))
        assert layout.data_offset == len(layout.header)
        assert layout.data_offset % ALIGN == 0
        header = parse_header(layout.header, layout.size)
        assert {name: (t.dtype, t.shape) for name, t in header.tensors.items()} == export

    @given(exports)
    def test_every_tensor_is_aligned_and_no_byte_is_unused(self, export):
        layout, position = ShardLayout(specs_of(export)), 0
        for spec, tensor in zip(layout.specs, layout.tensors(), strict=True):
            assert tensor[:3] == spec[:3]
            assert tensor.start == position
            assert tensor.end - tensor.start == spec.size
            assert tensor.start % (DTYPE_BITS[spec.dtype] // 8) == 0
            position = tensor.end
        assert position == layout.data_size == layout.size - layout.data_offset

    @given(exports)
    def test_the_export_walk_and_the_shard_layout_have_the_same_order(self, export):
        back = {name: dtype for dtype, name in FROM_TORCH.items()}
        tensors = [(name, torch.zeros(shape, dtype=back[dtype])) for name, (dtype, shape) in export.items()]
        walk = ExportWalk(tensors, 0, 1, None, tied=())
        walk._tied = frozenset()
        met = [piece.spec for piece in walk.in_file_order()]
        assert met == ShardLayout(walk.specs).specs

    @given(exports)
    def test_safetensors_reads_a_generated_shard(self, export):
        known = {name: value for name, value in export.items() if not value[0].startswith("C")}
        layout = ShardLayout(specs_of(known))
        found = load(layout.header + bytes(layout.data_size))
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
            name: shape for name, (_, shape) in known.items()
        }

    @given(st.integers(0, 1 << 40))
    def test_aligned_rounds_up_to_the_next_multiple(self, size):
        assert aligned(size) % ALIGN == 0
        assert 0 <= aligned(size) - size < ALIGN


class Cuda:
    """As much of CUDA's runtime as pinned memory needs; the addresses that are registered."""

    def __init__(self):
        self.registered = set()

    def cudaHostRegister(self, address, size, flags):  # noqa: N802 -- CUDA's name
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802 -- CUDA's name
        self.registered.remove(address)


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda()
    monkeypatch.setattr(buffers, "_cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


class TestArena:
    def test_growing_a_pinned_buffer_keeps_its_bytes_and_renewing_clears_it(self):
        arena = PinnedBuffer()
        arena.bytes[:5] = torch.arange(5, dtype=torch.uint8)
        for size in (1, ALIGN + 1, 10 * ALIGN, 1 << 20):
            arena.reserve(size)
            assert arena.capacity >= size
            assert arena.capacity % ALIGN == 0
            assert arena.bytes.data_ptr() % ALIGN == 0
            assert arena.bytes[:5].tolist() == [0, 1, 2, 3, 4]
        assert not arena.bytes[5:].any()
        arena.renew(9 * ALIGN)
        assert arena.capacity == 9 * ALIGN
        assert not arena.bytes.any()
        address = arena.bytes.data_ptr()
        arena.renew(8 * ALIGN)
        assert arena.bytes.data_ptr() == address

    def test_a_buffer_that_is_dropped_is_unregistered_while_its_memory_is_there(self, cuda):
        arena = PinnedBuffer(pinned=True)
        address = arena.bytes.data_ptr()
        assert cuda.registered == {address}
        piece = arena.piece(0, torch.uint8, torch.Size([4]))
        del arena
        assert not cuda.registered
        assert piece.data_ptr() == address

    def test_a_buffer_that_grows_renews_or_closes_is_registered_where_it_is(self, cuda):
        arena = PinnedBuffer(pinned=True)
        arena.reserve(1 << 20)
        assert not cuda.registered
        arena.renew(1 << 20)
        assert cuda.registered == {arena.bytes.data_ptr()}
        arena.close()
        assert not cuda.registered

    def test_a_view_shares_the_tensor_s_memory(self):
        tensor = torch.zeros(8, dtype=torch.uint8)
        memory = view(tensor)
        tensor[3] = 9
        assert bytes(memory) == bytes([0, 0, 0, 9, 0, 0, 0, 0])
