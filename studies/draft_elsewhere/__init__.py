"""Drafts of speculative decoding on other silicon: how much faster a user's tokens come."""

from perfmodel.studies.draft_elsewhere.study import TITLE, run, summary

__all__ = ["TITLE", "run", "summary"]
