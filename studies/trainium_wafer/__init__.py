"""Prompts on Trainium 2, tokens on wafers: what it adds by rack, by power and by cost."""

from perfmodel.studies.trainium_wafer.study import TITLE, run, summary

__all__ = ["TITLE", "run", "summary"]
