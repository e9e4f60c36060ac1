"""The pure core: sequences in, tokens out; it knows neither Redis nor asyncio."""
