"""The geometry of stored KV.

A *slot* holds the KV of one chunk. The shards of the ranks follow each other; neighbouring ranks that hold the same KV
share a shard. A shard has a *section* for each group of layers, most models have one; a section has one part a layer
for keys and one for values, and a part has a row a token, in which heads follow each other. A chunk with fewer tokens
leaves the ends of its parts unused. Behind the shards of a chunk that ends with a state of recurrent layers, the states
of the ranks follow; behind those of a segment's last chunk, its maps.
"""

import itertools
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

from blendhub.core.errors import InvalidInput, LayoutMismatch
from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.provenance import Provenance
from blendhub.core.spans import Span

ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "float8_e5m2": 1, "int8": 1}

Count = Annotated[int, Meta(ge=1, le=2**20)]
LONGEST_TEXT = 1024
Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]


SECTION_ALIGNMENT = 256
"""A section of a shard begins at a multiple of so many bytes, so that rows of any dtype can be accessed widely."""


class KVLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV of a token on one rank, in layers of one shape. Layers with a joint latent (MLA) have one head and
    ``value_dim`` 0."""

    layers: Count
    kv_heads: Count
    key_dim: Count
    value_dim: Annotated[int, Meta(ge=0, le=2**20)]
    dtype: str
    chunk_tokens: Annotated[int, Meta(ge=1, le=2**16)] = 256

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise LayoutMismatch(f"no KV dtype {self.dtype!r}; there are: {', '.join(ITEM_SIZES)}")

    @property
    def key_row_bytes(self) -> int:
        """The keys of one token in one layer."""
        return self.kv_heads * self.key_dim * ITEM_SIZES[self.dtype]

    @property
    def value_row_bytes(self) -> int:
        """The values of one token in one layer."""
        return self.kv_heads * self.value_dim * ITEM_SIZES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """The KV of one token on one rank."""
        return self.layers * (self.key_row_bytes + self.value_row_bytes)

    @property
    def shard_bytes(self) -> int:
        """The section of a shard that these layers have; the whole shard, if all layers have this shape."""
        return self.chunk_tokens * self.token_bytes

    def keys_at(self, layer: int) -> int:
        """Where a layer's keys begin in the section, one row of ``key_row_bytes`` a token."""
        return layer * self.chunk_tokens * (self.key_row_bytes + self.value_row_bytes)

    def values_at(self, layer: int) -> int:
        """Where a layer's values begin in the section, one row of ``value_row_bytes`` a token."""
        return self.keys_at(layer) + self.chunk_tokens * self.key_row_bytes

    def chunks_of(self, span: Span) -> list[Span]:
        """The span cut at multiples of ``chunk_tokens``; the first and the last piece may be shorter."""
        size = self.chunk_tokens
        borders = [span.start, *range((span.start // size + 1) * size, span.end, size), span.end]
        return [Span(start, end) for start, end in itertools.pairwise(borders) if start < end]


def aligned(n_bytes: int) -> int:
    """The number of bytes, rounded up to where a section may begin."""
    return -(-n_bytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT


def section_starts(layouts: Sequence[KVLayout]) -> tuple[int, ...]:
    """Where the section of each group of layers begins in a shard."""
    sizes = (aligned(layout.shard_bytes) for layout in layouts)
    return tuple(itertools.accumulate(sizes, initial=0))[: len(layouts)]


def shard_bytes_of(layouts: Sequence[KVLayout]) -> int:
    """The bytes of a shard with a section for each of these layouts."""
    return section_starts(layouts)[-1] + layouts[-1].shard_bytes if layouts else 0


MIN_DONOR_CONTEXT = 256
"""KV that was computed with fewer tokens before it is no donor: see ``docs/answers.md``."""
MIN_SAVED_TOKENS = 64
"""Computed text between reused text is stored if it has so many tokens: matchers find no shorter text that has moved.
In a prompt whose KV is all exact, shorter text is stored, too."""
MIN_SEAM_TOKENS = 16
"""A segment is of use behind so many tokens that are computed: they begin its text behind what now stands before."""

DEFAULT_MATCHERS = (PluginChoice("prefix"), PluginChoice("rolling_hash"))


class Variant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The part of a namespace that each request chooses: its LoRA adapter and its salt."""

    lora: Text = ""
    """A name for the adapter's weights as they are loaded."""
    cache_salt: Text = ""

    def __post_init__(self) -> None:
        # A request chooses both texts. A text that no message can carry is refused here, before anything is sent.
        for name, text in (("lora", self.lora), ("cache_salt", self.cache_salt)):
            if len(text) > LONGEST_TEXT:
                raise InvalidInput(f"{name} has {len(text):,} characters, and at most {LONGEST_TEXT:,} are possible")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                wrong = text[error.start]
                raise InvalidInput(f"{name} has {wrong!r} at {error.start}, which is no character") from None


class Namespace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV that may be mixed. Namespaces that differ in any field share nothing.

    What an engine does not have stays empty. ``weights`` is a fingerprint of the model's configuration and of the
    weights as loaded, so that a fine-tune at the same path has another digest.
    """

    model: Text
    layout: KVLayout
    """The layout of the first group of layers; most models have no other one."""
    revision: Text = ""
    weights: Text = ""
    rotary: Text = ""
    lora: Text = ""
    cache_salt: Text = ""
    world_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    matchers: Annotated[tuple[PluginChoice, ...], Meta(min_length=1, max_length=8)] = DEFAULT_MATCHERS
    other_layouts: Annotated[tuple[KVLayout, ...], Meta(max_length=256)] = ()
    """The layouts of the other groups, which differ in the shape of their layers or in their block tables."""
    copies: Annotated[int, Meta(ge=1, le=1024)] = 1
    """The number of neighbouring ranks that hold the same KV: all of them with a joint latent (MLA), and some where a
    model has fewer KV heads than ranks."""
    state_layouts: Annotated[tuple[KVLayout, ...], Meta(max_length=256)] = ()
    """The layouts of recurrent layers, whose state is that of a whole prefix; ``chunk_tokens`` are the rows of one
    state. With them, KV is of use up to a state only."""
    moves_states: bool = False
    """Whether text of a model with recurrent layers may move: as segments, which bring maps of the states."""

    def __post_init__(self) -> None:
        if self.world_size % self.copies:
            raise LayoutMismatch(f"{self.world_size} ranks do not make groups of {self.copies} with the same KV")
        if len({layout.chunk_tokens for layout in (self.layout, *self.other_layouts)}) > 1:
            raise LayoutMismatch("all groups of layers must have the same chunk_tokens")
        if self.moves_states and not self.state_layouts:
            raise LayoutMismatch("moves_states concerns models with recurrent layers, but there are no state_layouts")

    @property
    def layouts(self) -> tuple[KVLayout, ...]:
        """The layout of each group of layers, in the order of their sections in a shard."""
        return (self.layout, *self.other_layouts)

    def chunks_of(self, span: Span) -> list[Span]:
        """The span cut at the borders of chunks."""
        return self.layout.chunks_of(span)

    @property
    def chunk_tokens(self) -> int:
        """The most tokens of a chunk."""
        return self.layout.chunk_tokens

    @property
    def shard_bytes(self) -> int:
        """The part of a slot that belongs to one rank, or to several that hold the same KV."""
        return shard_bytes_of(self.layouts)

    def shard_start(self, rank: int) -> int:
        """Where a rank's shard begins in a slot."""
        return rank // self.copies * self.shard_bytes

    def writes(self, rank: int, chunk: Span) -> bool:
        """Whether a rank writes its shard of the chunk: ranks that share a shard take turns, chunk by chunk."""
        return (chunk.start // self.chunk_tokens - rank) % self.copies == 0

    @property
    def state_bytes(self) -> int:
        """A state of the recurrent layers on one rank."""
        return shard_bytes_of(self.state_layouts)

    def state_start(self, rank: int) -> int:
        """Where a rank's state begins in the slot of a chunk that ends with one."""
        return self.map_start(rank, self.state_bytes)

    def map_start(self, rank: int, shard_bytes: int) -> int:
        """Where a rank's map of so many bytes begins in the slot of a segment's last chunk."""
        return aligned(self.slot_bytes) + rank * aligned(shard_bytes)

    def bytes_behind(self, provenance: Provenance, chunk_end: int) -> int:
        """What each rank has behind the KV of a chunk: a state, the map of the segment that ends there, or nothing."""
        return self.state_bytes if provenance.has_state else provenance.map_bytes_at(chunk_end)

    def check_stored(self, provenance: Provenance) -> None:
        """Raise InvalidInput if KV of this provenance is never stored here."""
        provenance.check_stored()
        if provenance.has_state and not (self.state_layouts and provenance.is_exact):
            raise InvalidInput("states are those of recurrent layers behind exact KV, and this KV ends with none")
        if provenance.map and not self.moves_states:
            raise InvalidInput("a segment is text of a model with recurrent layers that may move (moves_states)")

    @property
    def digest(self) -> str:
        """A name for this namespace that is the same in every process."""
        named = msgspec.to_builtins(self, order="deterministic")
        # Models without other groups and copies keep the digest under which stores have their KV.
        for name in ("other_layouts", "state_layouts", "moves_states"):
            if not named[name]:
                del named[name]
        if self.copies == 1:
            del named["copies"]
        return blake2b(msgspec.json.encode(named), digest_size=16).hexdigest()

    @property
    def base(self) -> "Namespace":
        """The namespace of the same engine for requests without LoRA and salt."""
        return self.with_variant(Variant())

    @property
    def variant(self) -> Variant:
        return Variant(self.lora, self.cache_salt)

    def with_variant(self, variant: Variant) -> "Namespace":
        """The namespace of the same engine for requests with this LoRA adapter and this salt."""
        return msgspec.structs.replace(self, lora=variant.lora, cache_salt=variant.cache_salt)

    @property
    def slot_bytes(self) -> int:
        """The KV of one chunk, of all ranks, without copies."""
        return self.world_size // self.copies * self.shard_bytes

    def slot_bytes_of(self, provenance: Provenance, chunk_end: int) -> int:
        """What a chunk of this provenance takes: its KV, and the state or the map that it may end with."""
        behind = self.bytes_behind(provenance, chunk_end)
        return self.map_start(self.world_size - 1, behind) + behind if behind else self.slot_bytes


def check_same(known: Namespace, given: Namespace, owner: str) -> None:
    """Raise unless both are the same; the sentence names every field that differs, and both values."""
    if known == given:
        return
    differing = [
        f"{name} is {mine!r} there and {yours!r} here"
        for name, mine, yours in zip(
            known.__struct_fields__, msgspec.structs.astuple(known), msgspec.structs.astuple(given), strict=True
        )
        if mine != yours
    ]
    raise LayoutMismatch(
        f"{owner} is registered with another namespace: {'; '.join(differing)}; "
        "all ranks of an engine must load the same model in the same way"
    )
