"""Tests of executor_svc/transfers."""
