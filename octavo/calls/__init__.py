"""Calls to a scheduler: channels, streams that go on after a loss, credentials."""
