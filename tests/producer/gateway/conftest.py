"""A gateway, OpenAI's client of it, and workers that do as they are told."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from openai import AsyncOpenAI

from gated_engine import GatedEngine
from gateway_process import Gateway
from hand_worker import HandWorker
from hired import Hired
from openai_client import client_of


@pytest.fixture
async def hired(redis_url: str) -> AsyncIterator[Hired]:
    """A worker of the scripted engine on the queue `q`."""
    hired = await Hired(redis_url, "w0", GatedEngine()).start()
    try:
        yield hired
    finally:
        await hired.dismiss()


@pytest.fixture
async def hand(redis_url: str) -> AsyncIterator[HandWorker]:
    """A worker of the queue `q`, moved by hand."""
    async with HandWorker(redis_url) as hand:
        await hand.announce()
        yield hand


@pytest.fixture
async def gateway(redis_url: str) -> AsyncIterator[Gateway]:
    async with Gateway(redis_url) as gateway:
        yield gateway


@pytest.fixture
async def api(gateway: Gateway) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(gateway) as api:
        yield api
