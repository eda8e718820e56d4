"""Throughput against interactivity of one network on four chips."""

from perfmodel.studies.frontier.study import TITLE, run, summary

__all__ = ["TITLE", "run", "summary"]
