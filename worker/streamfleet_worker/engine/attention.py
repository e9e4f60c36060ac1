"""Attention over a ragged pass and the arenas of the cache, in the form that transformers' models call.

A model sees one row of tokens. Its attention layers hand their queries, keys and values to `attend`, which
stores keys and values where they belong and lets every token look at its own sequence only.

On a CPU all of it is matrix products over contiguous memory: torch's fused kernel computes one query head at
a time, and takes two to ten times as long for a single token of each row. Prompts are computed in tiles of
`TILE` queries, counted from the prompt's first token, so that a token's numbers depend neither on how the
prompt was cut into chunks nor on what the prefix cache held of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from streamfleet_worker.engine.batch import Batch, Group, Segment

NAME = "streamfleet"
"""What the attention is called in a model's config."""

TILE = 64

UNKNOWN = ("s_aux", "position_bias", "head_mask", "alibi")
"""What some models add to attention and `attend` cannot do."""


def register() -> None:
    """Make the attention known to transformers; without a `batch` it is the library's own."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    batch: Batch | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer.

    Args:
        module: the layer; it has a `layer_idx`.
        query: `[1, heads, tokens, head_dim]`.
        key: `[1, kv_heads, tokens, head_dim]`, of the new tokens.
        value: the same with the values' size.
        attention_mask: unused with a `batch`, which tells all.
        scaling: of the scores; the inverse root of `head_dim` if None.
        sliding_window: so many tokens, the last ones, are looked at; all if None.
        softcap: the limit that scores tend to; none if None.
        batch: what the pass computes; None gives the library's own attention.
        others: what else models pass on.

    Returns:
        `[1, tokens, heads, value_dim]`, and no weights.

    Raises:
        NotImplementedError: the model's attention has a part that is not known here.
    """
    if batch is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return output, None
    for name in UNKNOWN:
        if others.get(name) is not None:
            raise NotImplementedError(f"its attention has {name}")
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    output = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    scale = q.shape[2] ** -0.5 if scaling is None else scaling
    call = _Call(batch, module.layer_idx, q, k, v, output, scale, sliding_window, softcap)
    for group in batch.groups:
        _decode(call, group)
    for segment in batch.segments:
        _prefill(call, segment)
    return output[None], None


class _Call(NamedTuple):
    """One layer's attention; the tensors are `[tokens, heads, dim]`."""

    batch: Batch
    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    output: torch.Tensor
    scale: float
    window: int | None
    softcap: float | None


def _decode(call: _Call, group: Group) -> None:
    arena, first, end = group.arena, group.first, group.first + group.count
    layer = arena.layers(group.count)[call.layer]
    places = arena.layers(arena.spare + 1)[call.layer]
    k, v = call.k[first:end], call.v[first:end]
    places.key_places.index_copy_(0, group.places, k.reshape(-1, k.shape[2]))
    places.value_places.index_copy_(0, group.places, v.reshape(-1, v.shape[2]))
    keys, values = layer.keys, layer.values
    if group.rows is not None:
        keys = arena.keys[call.layer][group.rows].flatten(0, 1).transpose(1, 2)
        values = arena.values[call.layer][group.rows].flatten(0, 1)
    pairs = group.count * arena.shape.heads
    queries = call.q[first:end].reshape(pairs, -1, call.q.shape[2])
    weights = _weights(call, queries, keys, group.mask(call.window, queries.shape[1]))
    torch.bmm(weights, values, out=call.output[first:end].view(pairs, queries.shape[1], -1))


def _prefill(call: _Call, segment: Segment) -> None:
    start, end = segment.start, segment.end
    mine = slice(segment.first, segment.first + end - start)
    arena, row = segment.slot.arena, segment.slot.row
    keys, values = arena.keys[call.layer, row], arena.values[call.layer, row]
    keys[:, start:end] = call.k[mine].transpose(0, 1)
    values[:, start:end] = call.v[mine].transpose(0, 1)
    queries, output = call.q[mine], call.output[mine]
    if queries.device.type != "cpu" and call.softcap is None:
        output.copy_(_fused(call, segment, queries, keys[:, :end], values[:, :end]))
        return
    heads = arena.shape.heads
    shared, dim = queries.shape[1] // heads, queries.shape[2]
    place = start
    while place < end:
        tile = place - place % TILE
        stop = min(tile + TILE, end)
        # Always a whole tile, of which some may be void, so that the shape of the products depends on the
        # place in the prompt alone.
        some = queries.new_zeros(heads, shared, TILE, dim)
        some[:, :, place - tile : stop - tile] = (
            queries[place - start : stop - start].view(-1, heads, shared, dim).permute(1, 2, 0, 3)
        )
        seen = tile + TILE
        mask = _tile_mask(call, tile, shared)
        weights = _weights(call, some.view(heads, -1, dim), keys[:, :seen].transpose(1, 2), mask)
        found = torch.bmm(weights, values[:, :seen]).view(heads * shared, TILE, -1)
        output[place - start : stop - start] = found[:, place - tile : stop - tile].transpose(0, 1)
        place = stop


def _fused(
    call: _Call, segment: Segment, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """A GPU's own kernel over a whole chunk; `[tokens, heads, dim]`."""
    start, end = segment.start, segment.end
    mask = None
    if start or call.window is not None:
        mask = call.batch.masks.get((start, end, 0, call.window))
        if mask is None:
            mask = call.batch.masks[start, end, 0, call.window] = _mask(start, end, end, call.window, queries)
    found = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=call.scale,
        enable_gqa=True,
    )
    return found[0].transpose(0, 1)


def _tile_mask(call: _Call, tile: int, shared: int) -> torch.Tensor:
    """`[shared x TILE, tile + TILE]`."""
    key = (tile, tile + TILE, shared, call.window)
    found = call.batch.masks.get(key)
    if found is None:
        mask = _mask(tile, tile + TILE, tile + TILE, call.window, call.q)
        found = call.batch.masks[key] = mask.repeat(shared, 1)
    return found


def _mask(start: int, end: int, seen: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """Additive, `[end - start, seen]`: each token looks at itself and those before, `window` in all."""
    here = torch.arange(start, end, device=like.device)[:, None]
    places = torch.arange(seen, device=like.device)
    hidden = places > here
    if window is not None:
        hidden |= places <= here - window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


def _weights(call: _Call, queries: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Softmax of `[pairs, queries, dim]` times `[pairs, dim, width]`: `[pairs, queries, width]`."""
    if call.softcap is None:
        scores = torch.baddbmm(mask, queries, keys, alpha=call.scale)
    else:
        scores = (
            torch.bmm(queries, keys).mul_(call.scale / call.softcap).tanh_().mul_(call.softcap).add_(mask)
        )
    return torch.softmax(scores, dim=-1)
