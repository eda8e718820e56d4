"""Prefill and decode on chips of their own: which ratio each load wants, and what it gains."""

from perfmodel.studies.prefill_decode.study import TITLE, run, summary

__all__ = ["TITLE", "run", "summary"]
