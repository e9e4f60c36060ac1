"""Runs a gateway: `python -m streamfleet_producer.gateway`."""

import sys

from streamfleet_producer.early_end import Beginning
from streamfleet_producer.gateway.extra import missing

if __name__ == "__main__":
    beginning = Beginning()
    beginning.watch()
    lacking = missing()
    if lacking is not None:
        print(lacking, file=sys.stderr)  # noqa: T201 - nobody logs yet
        sys.exit(2)
    from streamfleet_producer.gateway.process import main

    sys.exit(main(beginning))
