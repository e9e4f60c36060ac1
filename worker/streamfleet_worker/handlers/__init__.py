"""Handlers: functions that somebody wrote, served in micro-batches."""
