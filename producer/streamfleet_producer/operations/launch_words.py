"""Why a batch was launched just then, in a sentence."""

from __future__ import annotations

from streamfleet_common.schemas import Batch, End

_ITEMS = {
    "full": "It was full, so it was launched at once.",
    "delay": "Its oldest item had waited `max_delay` for company, so it was launched as it was.",
    "waited": "Its items had waited long enough.",
    "ratio": "Its items were enough to be run beside others.",
    "deadline": "One of its items would have missed its deadline, so it was launched as it was.",
    "drain": "Its worker was to end and took nothing in any more, so it waited for no company.",
}
_ROWS = {
    "full": "The newcomers were as many as the free rows, so they joined at once.",
    "delay": "Nothing ran before, and the oldest had waited `max_delay` for company.",
    "waited": "Other rows ran, and the newcomers had waited as long as they may (`max_waiting_tokens`, "
    "`max_waiting`), or until another had computed the prompt that they begin with.",
    "ratio": "Other rows ran, and the newcomers were enough for these to be held up for them.",
    "deadline": "One of the newcomers would have missed its deadline if it had waited on.",
    "drain": "Its worker was to end and took nothing in any more, so it waited for no company.",
}


def has_rows(end: End) -> bool:
    """Whether it joined running rows, rather than that its items ran in a micro-batch."""
    if end.choices or end.timing.batches or end.timing.device_ms:
        return bool(end.choices)
    # Others may have asked the same before, so that no batch was its own.
    return not (end.embeddings or end.classifications or end.ranking or end.outputs)


def launch_words(batch: Batch, end: End) -> str:
    """The batch, its size, what of it was only filling, and why it was launched."""
    if has_rows(end):
        rows = "1 row ran" if batch.size == 1 else f"{batch.size:,} rows ran"
        first = f"It joined the running batch {batch.id}: {rows} then."
        known = _ROWS
    else:
        count = "1 item" if batch.size == 1 else f"{batch.size:,} items"
        first = f"It ran in {batch.id}, a batch of {count}."
        known = _ITEMS
    words = [first]
    if batch.padded_ratio > 0:
        words.append(f"{_share(batch.padded_ratio)} of its tokens only filled rows up to one length.")
    if batch.reason:
        words.append(known.get(batch.reason, f"Its worker says it was launched for: {batch.reason}."))
    if end.timing.batches > 1:
        words.append(f"It was the last of {end.timing.batches:,} batches with items of this request.")
    return " ".join(words)


def _share(ratio: float) -> str:
    return f"{100 * ratio:.0f} %" if ratio >= 0.01 else "Under 1 %"
