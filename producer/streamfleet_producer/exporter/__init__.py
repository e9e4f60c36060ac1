"""The exporter: a page of the queues' figures for Prometheus, read from Redis when it is asked for.

Needs the extra `exporter`; whoever imports streamfleet_producer imports nothing of it.
"""
