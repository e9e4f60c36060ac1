"""Runs a gateway: `python -m streamfleet_producer.gateway`."""

import sys

from streamfleet_producer.gateway.process import main

if __name__ == "__main__":
    sys.exit(main())
