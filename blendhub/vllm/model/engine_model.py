"""The loaded model of a vLLM worker: its layers, its paged KV, and forwards of our own over chosen tokens."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.lora.layers import LoRAMapping
from vllm.model_executor.models.interfaces import requires_raw_input_tokens
from vllm.v1.kv_cache_interface import FullAttentionSpec

from blendhub.contracts import AttentionRules, ChosenAttention, ChosenTokens
from blendhub.core.errors import Unsupported
from blendhub.core.spans import Span
from blendhub.vllm.model.attention_metadata import AttentionMetadata
from blendhub.vllm.model.drafter import Drafter
from blendhub.vllm.model.own_layers import Attend, own_attention, rules_of
from blendhub.vllm.model.platform import Platform, Tensors, keeps_index_keys, keeps_latent
from blendhub.vllm.model.recompute_set import RecomputeSet, pages_in
from blendhub.vllm.model.runner import Graphs, Inputs, Runner
from blendhub.vllm.model.sampling import Look
from blendhub.vllm.model.states.maps import recurrent_layer
from blendhub.vllm.model.states.recurrent_layer import SCRATCH, RecurrentLayer, SpanStates
from blendhub.vllm.model.states.state_path import own_recurrence, steps_of

NO_SLOT = -1
"""Where nothing is written, as vLLM counts."""


class StopForward(Exception):
    """Ends one of our forwards in the middle; never leaves ``EngineModel``."""


class GroupAttention(NamedTuple):
    """The device's attention over a group of layers, which share a block table."""

    layers: Sequence[str]
    attention: ChosenAttention


class EngineModel:
    """BlendHub's access to the model of one worker. Everything happens on the worker's own thread."""

    def __init__(self, runner: Any, config: VllmConfig, platform: Platform) -> None:
        self.config = config
        self._runner = Runner(runner)
        layers = self._runner.layers
        self._platform = platform
        self.tables = {name: table for name, (table, _) in layers.items()}
        """The number of the block table of each attention layer."""
        self.recurrent = self._runner.recurrent
        """For each recurrent layer, the number of its block table, and what its state is."""
        self.page_sizes = {
            name: int(group.get_metadata_builder().kv_cache_spec.block_size) for name, (_, group) in layers.items()
        }
        """The tokens of a page: where attention kernels want smaller blocks than vLLM deals in, a block is several."""
        specs = [group.kv_cache_spec for _, group in layers.values()]
        windows = [spec for spec in specs if not isinstance(spec, FullAttentionSpec)]
        self.frees_blocks_early = bool(windows)
        """Whether vLLM takes blocks of KV from requests that still run: those that have left the attention's window."""
        self._windows = {
            int(getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 2)
            for spec in windows
        }
        self.block_sizes = tuple(int(group.kv_cache_spec.block_size) for group in self._runner.block_groups)
        """The tokens of a block in each of the block tables that vLLM keeps for a request."""
        self.has_indexer = any(keeps_index_keys(self.layer(name)) for name in layers)
        """Whether attention reads the tokens that an indexer picks. Such a model computes no forwards of BlendHub's."""
        self._only_metadata, self._why_no_metadata = None, ""
        try:
            if not self.has_indexer:
                self._only_metadata = AttentionMetadata(self._runner, self._platform, config)
        except Exception as error:  # a backend of a new kind: exact prefixes are reused without forwards
            self._why_no_metadata = f"the attention backend's builder failed: {type(error).__name__}: {error}"
        self.device = self._runner.device
        self.max_tokens: int = config.scheduler_config.max_num_batched_tokens
        self.graphs: Graphs | None = None
        """vLLM's graphs, which small forwards replay; None: none does."""
        self.attention: Sequence[GroupAttention] = ()
        """The device's attention over all layers; empty: chosen tokens attend by the engine's backend."""
        self.long_span: int | None = None
        """Spans of so many tokens attend by the engine's backend nevertheless; None: none does."""
        self.can_cut = not any(keeps_latent(self.layer(name)) for name in layers)
        """Whether some tokens of a forward may attend by the device, and others by the engine."""
        self.n_blocks = self._runner.n_blocks
        self.samples_last = self._runner.samples_last
        drafting = self._layers_of_drafter(layers)
        # Some layers read the KV that another one wrote.
        readers = {name for name in layers if getattr(self.layer(name), "kv_sharing_target_layer_name", None)}
        own = sorted(set(layers) - drafting - readers, key=_layer_order)
        self.layer_names = [*own, *sorted(drafting - readers, key=_layer_order)]
        """The layers whose KV is stored: all that keep some, the model's own and behind them those of the drafter."""
        self.n_own_layers = len(own)
        """How many of them are the model's own."""
        self._attending_layers = set(layers)
        self._drafter: Drafter | None = None
        self.why_no_drafts = ""
        """Why the KV of the drafter cannot be computed for chosen tokens."""
        if drafting - readers:
            try:
                self._drafter = Drafter(self._runner.proposer, self.module, config)
            except Unsupported as error:
                self.why_no_drafts = str(error)

    @property
    def _metadata(self) -> AttentionMetadata:
        """For forwards, which there are only with a builder that works."""
        if not self._only_metadata:
            raise Unsupported(self._why_no_metadata)
        return self._only_metadata

    def chunk_tokens(self, most: int) -> int:
        """The tokens of a stored chunk: its blocks must be in the window still in the step that completes the chunk."""
        most = max(1, min([most, *(window // 2 for window in self._windows)]))
        # Windows of local attention begin anew, so no chunk may lie in two of them; and states stand behind a chunk.
        periods = {*self._windows, *(self.block_sizes[table] for table, _ in self.recurrent.values())}
        return next(n for n in range(most, 0, -1) if all(period % n == 0 for period in periods))

    @property
    def dtype(self) -> torch.dtype:
        dtype = self.config.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def max_spans(self) -> int:
        """The most spans of one forward."""
        return self.max_tokens if self.attention else self._metadata.max_spans

    @property
    def metadata_bytes(self) -> int:
        """The most device memory that a forward's metadata takes."""
        is_needed = not self.attention or self.long_span is not None
        return self._only_metadata.table_bytes if self._only_metadata and is_needed else 0

    def rules(self) -> list[AttentionRules]:
        """How the tokens of each layer attend; raises Unsupported for what no attention but the engine's computes."""
        # Layers that keep no KV attend, too, and have rules that only the engine knows.
        rules = {name: rules_of(self.layer(name)) for name in self._attending_layers}
        return [rules[name] for name in self.layer_names]

    def layer(self, name: str) -> Any:
        """vLLM's attention layer."""
        return self.config.compilation_config.static_forward_context[name]

    @property
    def module(self) -> torch.nn.Module:
        return self._runner.module

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The model, and the drafter's if that keeps KV: what is stored was computed with the weights of both."""
        drafting = self._runner.draft_module if len(self.layer_names) > self.n_own_layers else None
        return [self.module] if drafting is None else [self.module, drafting]

    @property
    def adapters(self) -> Any:
        """The manager of the worker's LoRA adapters; None without LoRA."""
        return self._runner.adapters

    def slots(self, chosen: RecomputeSet, layer: int = 0) -> torch.Tensor:
        """The slots of the tokens in a layer's pages, as vLLM counts, on the model's device."""
        table = self.tables[self.layer_names[layer]]
        return self._platform.slots(chosen.slots(self.block_sizes[table], table), self.device)

    def slots_of_tables(self, chosen: RecomputeSet, n: int = 0) -> list[torch.Tensor]:
        """The slots of the tokens in each block table, and behind them none, ``n`` in all; none in the tables of
        recurrent layers."""
        of_states = {table for table, _ in self.recurrent.values()}
        none, behind = np.zeros(0, np.int64), np.full(max(0, n - len(chosen)), NO_SLOT)
        return [
            self._platform.slots(
                none if table in of_states else np.append(chosen.slots(size, table), behind), self.device
            )
            for table, size in enumerate(self.block_sizes)
        ]

    def to_device(self, numbers: npt.NDArray[Any]) -> torch.Tensor:
        """The numbers on the model's device, without waiting for it."""
        return self._platform.to_device(numbers, self.device)

    def find_graphs(self) -> int:
        """Have small forwards replay vLLM's graphs. Returns the most tokens of such a one; raises Unsupported if there
        are none. Called when vLLM has captured them."""
        self.graphs = self._runner.graphs(self.config)
        return self.graphs.most

    def forward(
        self, chosen: RecomputeSet, *, positions: torch.Tensor | None = None, replays: bool = True
    ) -> torch.Tensor:
        """Compute tokens anew, each with everything before it in its prompt as context, and write their KV.

        Keys of all tokens are written before any query is answered, so spans may build on each other. ``positions``
        are other positions to pretend, for tests of the rotation. Returns the hidden states of the tokens, which are
        to be used before the next forward: graphs share their memory. ``replays``: False while the engine still needs
        what a step of its own has left there. A drafter computes the tokens, too.

        To the attention of the engine's backend each span is a virtual request: as many queries as the span has
        tokens, and a context that ends with it.
        """
        with torch.inference_mode():
            size = self.graphs.size(len(chosen)) if self.graphs and replays else None
            slots = self.slots_of_tables(chosen, size or 0)
            pretended = self.to_device(chosen.positions) if positions is None else positions.to(self.device)
            by_layer = {name: slots[self.tables[name]] for name in self._metadata.layer_names}
            attend, by_engine, n_ours = None, chosen, 0
            if self.attention:
                short, by_engine = chosen.cut(self.long_span or self.max_tokens + 1, self._metadata.max_spans)
                attend, n_ours = self._over_pages(short), len(short)
            metadata = dict[str, Any]()
            if len(by_engine):
                metadata = self._metadata.build(by_engine, pretended[n_ours:], [of[n_ours:] for of in slots])

            def attending() -> AbstractContextManager[None]:
                return own_attention(self.layer_names, attend, n_ours) if attend else nullcontext()

            with (
                self._forward_context(chosen, pretended, metadata, by_layer, size) as inputs,
                attending(),
                self._own_recurrence(chosen, slots),
            ):
                hidden = self._runner.forward(**inputs)
            if self._drafter:
                ids, behind = self.to_device(chosen.ids), self.to_device(chosen.ids_behind)
                with self._forward_context(chosen, pretended, metadata, by_layer, None) as inputs, attending():
                    positions = inputs["positions"] if self._drafter.uses_mrope else pretended
                    self._drafter.forward(ids, behind, positions, hidden)
            # For some drafters, the model returns the states behind several layers beside the last.
            last: torch.Tensor = hidden[0] if isinstance(hidden, tuple) else hidden
            return last[: len(chosen)]

    def begin_attention(
        self, chosen: RecomputeSet, readable: npt.NDArray[np.bool_] | None = None
    ) -> dict[str, Callable[..., None]]:
        """The device's attention of these tokens by layer; ``readable``: that of a probe, to these keys in the pages.

        Each group of layers attends over the pages of its own block table.
        """
        attend_in: dict[str, Callable[..., None]] = {}
        n_keys = int(chosen.positions.max()) + 1 if readable is None else readable.shape[1]
        for layers, attention in self.attention:
            table = self.tables[layers[0]]
            size = self.block_sizes[table]
            n_pages = size // self.page_sizes[layers[0]]
            blocks = chosen.table(-(-n_keys // size), table)
            pages = np.stack([pages_in(row, n_pages) for row in blocks]).astype(np.int32)
            attention.begin(ChosenTokens(chosen.positions, chosen.token_owners, pages, readable))
            attend = attention.attend if readable is None else attention.probe
            attend_in |= {name: partial(attend, number) for number, name in enumerate(layers)}
        return attend_in

    @cached_property
    def recurrent_layers(self) -> list[RecurrentLayer]:
        """The model's recurrent layers, in its order. Raises Unsupported for layers of which no map can be made."""
        return [recurrent_layer(name, self.layer(name)) for name in sorted(self.recurrent, key=_layer_order)]

    def copy_states(self, blocks: Mapping[int, int], sources: Mapping[int, int]) -> None:
        """Have blocks hold the states of others: for each table of recurrent layers, ``blocks`` has one."""
        with torch.inference_mode():
            for layer in self.recurrent_layers:
                table, _ = self.recurrent[layer.name]
                layer.copy(blocks[table], sources[table])

    def _own_recurrence(self, chosen: RecomputeSet, slots: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """The recurrent layers compute one span of a request after another."""
        if not self.recurrent:
            return nullcontext()

        def states_of(owner: int, span: Span, makes_map: bool) -> dict[str, SpanStates]:
            part = chosen.parts[owner]
            blocks = {table: int(part.tables[table][0]) for table, _ in self.recurrent.values()}
            metadata = self._metadata.of_states(span, blocks, slots)
            scratch = self._metadata.of_states(span, dict.fromkeys(blocks, SCRATCH), slots) if makes_map else metadata
            keeps = part.path.keeps if part.path else None
            kept = keeps.blocks if keeps and keeps.end == span.end else {}
            return {
                name: SpanStates(blocks[table], metadata[name], scratch[name], kept.get(table))
                for name, (table, _) in self.recurrent.items()
            }

        paths = [part.path for part in chosen.parts if part.path]
        assert len(paths) == len(chosen.parts), "a model with recurrent layers computes nothing without a state"
        steps = steps_of(chosen.owners.tolist(), chosen.spans, paths, states_of)
        return own_recurrence(self.recurrent_layers, steps)

    def _over_pages(self, chosen: RecomputeSet) -> Attend:
        n = len(chosen)
        if not n:
            return lambda *_: None
        attend_in = self.begin_attention(chosen)

        def attend(layer: Any, query: torch.Tensor, key: Any, value: Any, output: torch.Tensor) -> None:
            attend_in[layer.layer_name](query[:n], output[:n])

        return attend

    def forward_apart(self, chosen: RecomputeSet, layers: Sequence[str], attend: Attend) -> None:
        """Compute tokens with ``attend`` as the attention of these layers, and write no KV.

        ``attend`` raises StopForward at the last of them.
        """
        with torch.inference_mode(), suppress(StopForward):
            positions = self.to_device(chosen.positions)
            size = self.graphs.size(len(chosen)) if self.graphs else None
            with self._forward_context(chosen, positions, {}, {}, size) as inputs, own_attention(layers, attend):
                self._runner.forward(**inputs)

    @contextmanager
    def _forward_context(
        self,
        chosen: RecomputeSet,
        positions: torch.Tensor,
        metadata: dict[str, Any],
        slots: dict[str, torch.Tensor],
        size: int | None,
    ) -> Iterator[dict[str, Any]]:
        """The context of a forward over these tokens; gives what the model is called with.

        ``metadata``: by layer; those that are left out have none. ``size``: that of the graphs to replay.
        """
        # int32 like the runner's own buffer: compiled models do not check, and read garbage from int64.
        ids = self.to_device(chosen.ids)
        of_layers = dict.fromkeys(self._metadata.layer_names) | metadata
        replaying = (
            self.graphs.inputs(ids, positions, size) if self.graphs and size else nullcontext(Inputs(ids, positions))
        )
        with self._without_adapters(len(chosen)), replaying as inputs:
            placed = self._runner.dimensions(inputs.positions, self.max_tokens)
            with self._platform.forward_context(of_layers, self.config, inputs, slots):
                yield {**self._inputs(inputs.ids), "positions": placed, "intermediate_tensors": None}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """What the model predicts behind each of these tokens; None on a rank to which vLLM sends no predictions.

        All ranks call it together.
        """
        with torch.inference_mode(), self._without_adapters(len(hidden)):
            module: Any = self.module
            predicted: torch.Tensor | None = module.compute_logits(hidden)
            return predicted

    def watch_sampling(self, look: Look) -> None:
        """Have ``look`` called before each step is sampled; raises Unsupported where a token cannot be held."""
        self._runner.watch_sampling(look)

    def forward_until(self, layer: int, chosen: RecomputeSet) -> Tensors:
        """Run ``forward`` and end it where layer ``layer`` would write its KV: returns that KV, which is not written.

        The layers before it are complete, and their KV is written.
        """
        attention = self.layer(self.layer_names[layer])
        caught: list[Tensors] = []
        method, find = self._platform.write_hook(attention)

        def catch(*arguments: Any, **named: Any) -> None:
            keys, values = find(*arguments, **named)
            caught.append((keys[:n].clone(), values[:n].clone()))
            raise StopForward

        n = len(chosen)
        setattr(attention.impl, method, catch)
        try:
            with suppress(StopForward):
                self.forward(chosen)
        finally:
            delattr(attention.impl, method)
        if not caught:
            raise Unsupported(f"{self.layer_names[layer]} writes its KV in a way that BlendHub cannot look into")
        return caught[0]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write KV as the layer itself does."""
        with torch.inference_mode():
            self._platform.write(self.layer(self.layer_names[layer]), keys, values, slots)

    def unscaled(self, name: str, keys: torch.Tensor, values: torch.Tensor) -> Tensors:
        """KV out of a layer's pages, as the model computed it: 8-bit floats are kept divided by a scale."""
        if keys.dtype.itemsize > 1:
            return keys, values
        attention = self.layer(name)
        return keys.float() * attention._k_scale.view(-1, 1), values.float() * attention._v_scale.view(-1, 1)

    def _layers_of_drafter(self, names: Iterable[str]) -> set[str]:
        """The layers of a model that only proposes tokens, whose KV vLLM keeps beside the model's own.

        Where their KV is missing or old, fewer proposals are accepted, and answers are the same. vLLM takes it for
        computed wherever that of the model is.
        """
        if self.config.speculative_config is None:
            return set()
        own = set(map(id, self.module.modules()))
        return {name for name in names if id(self.layer(name)) not in own}

    def _inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """Tokens as the runner gives them: a compiled model takes them in this one way, and does not check."""
        if not self._runner.takes_embeddings:
            return {"input_ids": ids, "inputs_embeds": None}
        module: Any = self.module
        raw = ids if requires_raw_input_tokens(module) else None
        return {"input_ids": raw, "inputs_embeds": module.embed_input_ids(ids)}

    @contextmanager
    def _without_adapters(self, n_tokens: int) -> Iterator[None]:
        """Layers that know LoRA look up each token's adapter: these have none. The step's own come back after."""
        manager = self._runner.adapters
        if manager is None:
            yield
            return
        before = manager._last_mapping
        # The second is for predictions. vLLM has memory for as many as it serves requests, and spans may be more.
        manager.set_adapter_mapping(LoRAMapping((0,) * n_tokens, (0,), is_prefill=True))
        try:
            yield
        finally:
            if before is not None:
                manager.set_adapter_mapping(before)


def _layer_order(name: str) -> tuple[tuple[int, ...], str]:
    """Layers by their numbers, because groups list them in another order, and in all processes in the same one."""
    return tuple(int(part) for part in name.split(".") if part.isdigit()), name
