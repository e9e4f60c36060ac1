"""Bulk jobs: a file of requests in, a file of answers out, carried by an RQ worker that may die at any time.

Nothing here is on the way of a token: a job is one more client of the fleet, on its `bulk` lane. Needs the
extra `bulk` (RQ). `Batches` is the face for whoever starts jobs, `BulkWorker` runs them.
"""
