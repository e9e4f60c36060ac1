"""Across a real fleet: what one tenant's prompt has left is of use to that tenant alone."""

from __future__ import annotations

import random

import pytest

from streamfleet_producer import ChatMessage, Client, GenerateRequest, Tool, Unsupported

ROUNDS = 6


async def test_no_tenant_finds_what_another_has_left(fleet_url: str) -> None:
    source = random.Random(11)
    request = GenerateRequest(
        prompt_token_ids=[source.randrange(3, 1024) for _ in range(50)], max_tokens=2, ignore_eos=True
    )
    found: dict[tuple[str, str], list[int]] = {}
    answers = set()
    for tenant in ("default", "acme", "other"):
        async with Client(fleet_url, queue="tiny", tenant=tenant) as client:
            for _ in range(ROUNDS):
                end = await client.run(request)
                found.setdefault((tenant, end.worker), []).append(end.usage.cached_tokens)
                answers.add(end.token_ids)
    # On each worker a tenant's first prompt finds nothing; its others find the 6 whole blocks of 8 tokens.
    assert len({tenant for tenant, _ in found}) == 3
    assert all(cached == [0] + [48] * (len(cached) - 1) for cached in found.values()), found
    assert max(map(len, found.values())) > 1
    assert len(answers) == 1


async def test_a_model_without_a_template_for_tools_refuses_them(fleet: Client) -> None:
    request = GenerateRequest(
        messages=[ChatMessage(role="user", content="Is it cold?")],
        tools=[Tool(name="weather", parameters={"type": "object"})],
    )
    with pytest.raises(Unsupported, match="knows nothing of tools") as caught:
        await fleet.run(request)
    assert caught.value.feature == "tools"
