"""Attention over a ragged pass and the arenas of the cache, in the form that transformers' models call.

A model sees one row of tokens. Its attention layers hand their queries, keys and values to `attend`, which
stores keys and values where they belong and lets every token look at its own sequence only.

On a CPU all of it is matrix products over contiguous memory: torch's fused kernel computes one query head at
a time, and takes two to ten times as long for a single token of each row. Prompts are computed in tiles of
`TILE` queries, counted from the prompt's first token, so that a token's numbers depend neither on how the
prompt was cut into chunks nor on what the prefix cache held of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    batch: Batch | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """`query` `[1, heads, tokens, head_dim]`, the others with `kv_heads`; gives `[1, tokens, heads, value_dim]`.

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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    output = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    for group in batch.groups:
        _decode(group, module.layer_idx, q, k, v, output, scale, sliding_window, softcap)
    for segment in batch.segments:
        _prefill(batch, segment, module.layer_idx, q, k, v, output, scale, sliding_window, softcap)
    return output[None], None


def _decode(
    group: Group,
    index: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    arena, first, end = group.arena, group.first, group.first + group.count
    heads, dim = arena.shape.heads, q.shape[2]
    if group.rows is None:
        layer = arena.layers(group.count)[index]
        keys, values = layer.keys, layer.values
    else:
        layer = arena.layers(len(arena.slots))[index]
    layer.key_places.index_copy_(0, group.places, k[first:end].reshape(-1, k.shape[2]))
    layer.value_places.index_copy_(0, group.places, v[first:end].reshape(-1, v.shape[2]))
    if group.rows is not None:
        keys = arena.keys[index][group.rows].flatten(0, 1).transpose(1, 2)
        values = arena.values[index][group.rows].flatten(0, 1)
    shared = q.shape[1] // heads
    queries = q[first:end].reshape(group.count * heads, shared, dim)
    weights = _weights(queries, keys, group.mask(window, shared), scale, softcap)
    result = output[first:end].view(group.count * heads, shared, -1)
    torch.bmm(weights, values, out=result)


def _prefill(
    batch: Batch,
    segment: Segment,
    index: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    first, start, end = segment.first, segment.start, segment.end
    arena, row = segment.slot.arena, segment.slot.row
    keys, values = arena.keys[index, row], arena.values[index, row]
    keys[:, start:end] = k[first : first + end - start].transpose(0, 1)
    values[:, start:end] = v[first : first + end - start].transpose(0, 1)
    queries = q[first : first + end - start]
    result = output[first : first + end - start]
    if q.device.type != "cpu" and softcap is None:
        _prefill_fused(batch, segment, queries, keys, values, result, scale, window)
        return
    heads, shared, dim = arena.shape.heads, q.shape[1] // arena.shape.heads, q.shape[2]
    place = start
    while place < end:
        tile = place - place % TILE
        stop = min(tile + TILE, end)
        count = stop - place
        # [kv_heads, shared x TILE, dim]: always a whole tile, of which some may be void, so that the shape of
        # the products depends on the place in the prompt alone.
        some = q.new_zeros(heads, shared, TILE, dim)
        some[:, :, place - tile : stop - tile] = (
            queries[place - start : stop - start].view(count, heads, shared, dim).permute(1, 2, 0, 3)
        )
        mask = _tile_mask(batch, tile, window, shared, q)
        weights = _weights(
            some.view(heads, shared * TILE, dim), keys[:, : tile + TILE].transpose(1, 2), mask, scale, softcap
        )
        found = torch.bmm(weights, values[:, : tile + TILE]).view(heads * shared, TILE, -1)
        result[place - start : stop - start] = found[:, place - tile : stop - tile].transpose(0, 1)
        place = stop


def _prefill_fused(
    batch: Batch,
    segment: Segment,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    result: torch.Tensor,
    scale: float,
    window: int | None,
) -> None:
    start, end = segment.start, segment.end
    mask = None
    if start or window is not None:
        mask = batch.masks.get((start, end, 0, window))
        if mask is None:
            mask = batch.masks[start, end, 0, window] = _mask(start, end, end, window, queries)
    found = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys[None, :, :end],
        values[None, :, :end],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    result.copy_(found[0].transpose(0, 1))


def _tile_mask(batch: Batch, tile: int, window: int | None, shared: int, like: torch.Tensor) -> torch.Tensor:
    found = batch.masks.get((tile, tile + TILE, shared, window))
    if found is None:
        mask = _mask(tile, tile + TILE, tile + TILE, window, like)
        found = batch.masks[tile, tile + TILE, shared, window] = mask.repeat(shared, 1)
    return found


def _mask(start: int, end: int, seen: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """Additive, `[end - start, seen]`: each token looks at itself and those before, `window` in all."""
    here = torch.arange(start, end, device=like.device)[:, None]
    places = torch.arange(seen, device=like.device)
    hidden = places > here
    if window is not None:
        hidden |= places <= here - window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


def _weights(
    queries: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """Softmax of the scores, `[batch, queries, width]`, of `[batch, queries, dim]` and `[batch, dim, width]`."""
    if softcap is None:
        scores = torch.baddbmm(mask, queries, keys, alpha=scale)
    else:
        scores = torch.bmm(queries, keys).mul_(scale / softcap).tanh_().mul_(softcap).add_(mask)
    return torch.softmax(scores, dim=-1)
